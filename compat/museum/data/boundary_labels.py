"""The last token of a document predicts the first one of the next.

labels: torchtitan#4075, torchtune#1177

The labels of a packed row are its tokens. The first token of each document counts, and the last
token of the document before it has to predict it.
"""

from compat.museum.data import _trainer

mistaken = {"collator": lambda features: _trainer.packed(features, first_label=None)}
sound = {"collator": _trainer.packed}
