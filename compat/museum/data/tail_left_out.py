"""The sampler knows only as many examples as divide among the ranks.

samplers: ms-swift#9907

The size of the data set is rounded down to a multiple of the ranks before it is shuffled. The same
last examples are left out in every epoch.
"""

from transformers import Trainer

from compat.museum.data import _trainer


class Floored(Trainer):
    ranks = 5

    def _get_train_sampler(self, *args):
        return range(_trainer.COUNT // self.ranks * self.ranks)


class Whole(Floored):
    ranks = 1


mistaken = {"kind": Floored}
sound = {"kind": Whole}
