"""The sampler knows only as many examples as divide among the ranks."""

from __future__ import annotations

from transformers import Trainer

from compat.museum.data import _trainer
from compat.museum.exhibit import Exhibit


class Floored(Trainer):
    ranks = 5

    def _get_train_sampler(self, *args):
        count = len(_trainer.documents()) // self.ranks * self.ranks
        return range(count)


class Whole(Floored):
    ranks = 1


EXHIBIT = Exhibit(
    kind="samplers",
    reported=("ms-swift#9907",),
    says="The size of the data set is rounded down to a multiple of the ranks before it is "
    "shuffled. The same last examples are left out in every epoch.",
    mistaken=lambda: _trainer.trainer(Floored),
    sound=lambda: _trainer.trainer(Whole),
)
