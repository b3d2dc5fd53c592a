"""The last token of a document predicts the first one of the next.

labels: torchtitan#4075, torchtune#1177

The labels of a packed row are its tokens. The first token of each document counts, and the last
token of the document before it has to predict it.
"""

from __future__ import annotations

from compat.museum.data import _trainer


def mistaken():
    return _trainer.trainer(collator=lambda features: _trainer.packed(features, first_label=None))


def sound():
    return _trainer.trainer(collator=_trainer.packed)
