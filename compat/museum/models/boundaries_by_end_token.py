"""Boundaries found by a token that is not there.

masks: torchtitan#3130

Documents were told apart by the end token in the inputs. The inputs had lost it when they were
shifted against the labels, so that all documents of a row were one.
"""

from functools import partial

from compat.museum.models._plain import Plain, PlainConfig


class SplitsByPositions(Plain):
    make_config = partial(PlainConfig, eos_token_id=60)


class SplitsAtEndTokens(SplitsByPositions):
    def documents(self, call):
        return (call.input_ids == self.config.eos_token_id).roll(1, 1).cumsum(1)


mistaken = SplitsAtEndTokens
sound = SplitsByPositions
