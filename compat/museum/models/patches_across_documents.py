"""Patches that hold two documents.

windows and chunks: blt#36

Bytes were grouped into patches over the row. The end of one document and the start of the next fell
into one patch.
"""

import torch
from torch import nn

from compat.museum.models._plain import means, places


class Patches(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.inner = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden_states, documents, **others):
        return self.inner(means(hidden_states, self.patches(documents)))

    def patches(self, documents):
        return torch.arange(documents.shape[1]).expand_as(documents) // 4


class PatchesOfDocuments(Patches):
    def patches(self, documents):
        return documents * documents.shape[1] + places(documents) // 4


mistaken = Patches
sound = PatchesOfDocuments
