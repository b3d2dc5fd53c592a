"""The sampler repeats examples until their number divides.

samplers: pytorch#25162

A sampler for several ranks adds the first examples again until all ranks have equally many. They
are trained on twice, or counted twice in an evaluation.
"""

from transformers import Trainer

from compat.museum.data import _trainer


class Filling(Trainer):
    ranks = 5

    def _get_train_sampler(self, *args):
        numbers = list(range(_trainer.COUNT))
        return numbers + numbers[: -_trainer.COUNT % self.ranks]


class Whole(Filling):
    ranks = 1


mistaken = {"kind": Filling}
sound = {"kind": Whole}
