"""Positions that begin elsewhere than the model's.

positions: sentence-transformers#3879, transformers#47496

A model of RoBERTa's kind numbers tokens from two. The collator of packed rows numbered them from
zero, and every token read the embedding of another place.
"""

from compat.museum.models._plain import Plain, places


class NumbersFromTwo(Plain):
    def positions(self, call):
        return places(call.documents) + 2 if call.position_ids is None else call.position_ids


class NumbersAllFromTwo(Plain):
    def positions(self, call):
        return super().positions(call) + 2


mistaken = NumbersFromTwo
sound = NumbersAllFromTwo
