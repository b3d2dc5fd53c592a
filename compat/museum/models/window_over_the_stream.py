"""A window that knows no documents.

windows and chunks: torchtitan#4801

A sparse layer made its window from distances in the flattened stream of tokens, and dropped the
positions that it was given. Windows reached into the document before.
"""

import torch

from compat.museum.models._plain import Plain


class WindowOfDocument(Plain):
    def mask(self, call):
        return super().mask(call).triu(-3)


class WindowOfStream(Plain):
    def mask(self, call):
        return torch.ones_like(super().mask(call)).tril().triu(-3)


mistaken = WindowOfStream
sound = WindowOfDocument
