"""Boundaries found by a token that is not there.

masks: torchtitan#3130

Documents were told apart by the end token in the inputs. The inputs had lost it when they were
shifted against the labels, so that all documents of a row were one.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from compat.museum.models._plain import Plain, made

END = 60


class SplitsAtEndTokens(Plain):
    def documents(
        self, input_ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None
    ) -> Tensor:
        return (input_ids == END).roll(1, 1).cumsum(1)


mistaken = partial(made, SplitsAtEndTokens, eos_token_id=60)
sound = partial(made, Plain, eos_token_id=60)
