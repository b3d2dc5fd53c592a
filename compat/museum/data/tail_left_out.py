"""The sampler knows only as many examples as divide among the ranks.

samplers: ms-swift#9907

The size of the data set is rounded down to a multiple of the ranks before it is shuffled. The same
last examples are left out in every epoch.
"""

from __future__ import annotations

from transformers import Trainer

from compat.museum.data import _trainer


class Floored(Trainer):
    ranks = 5

    def _get_train_sampler(self, *args):
        count = len(_trainer.documents()) // self.ranks * self.ranks
        return range(count)


class Whole(Floored):
    ranks = 1


def mistaken():
    return _trainer.trainer(Floored)


def sound():
    return _trainer.trainer(Whole)
