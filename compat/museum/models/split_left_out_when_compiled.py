"""A split that compiled code leaves out.

compiled graphs: transformers#41827

To look for documents breaks a graph, so that compiled code was to leave it out. Packed rows that
are told by positions alone would then be one document, and only when compiled.
"""

import torch

from compat.museum.models._plain import Plain, together


@torch.compile(backend="eager", dynamic=True)
def split(documents):
    """Return who sees whom, in compiled code for all documents of a row."""
    known = torch.zeros_like(documents) if torch.compiler.is_compiling() else documents
    return together(known)[:, None].tril()


class SplitsUncompiled(Plain):
    def mask(self, call):
        return split(call.documents)


mistaken = SplitsUncompiled
