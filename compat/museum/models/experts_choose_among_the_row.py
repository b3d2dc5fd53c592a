"""Experts that choose tokens of the row.

routers: MoSA#3

Experts choose the tokens that score highest in a row, here those above its mean. Which tokens of a
document are chosen depends on all other documents, and on later tokens.
"""

from compat.museum.models._plain import Router, means


class ChoosesOfRow(Router):
    """Gives a token to the experts by which it scores above the mean of its row."""

    def chosen(self, scores, documents):
        return scores >= scores.mean(1, keepdim=True)


class ChoosesOfDocument(Router):
    def chosen(self, scores, documents):
        return scores >= means(scores, documents) - 1e-9


mistaken = ChoosesOfRow
sound = ChoosesOfDocument
