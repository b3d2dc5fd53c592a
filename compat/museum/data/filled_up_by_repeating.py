"""The sampler repeats examples until their number divides.

samplers: pytorch#25162

A sampler for several ranks adds the first examples again until all ranks have equally many. They
are trained on twice, or counted twice in an evaluation.
"""

from __future__ import annotations

from transformers import Trainer

from compat.museum.data import _trainer


class Filling(Trainer):
    ranks = 5

    def _get_train_sampler(self, *args):
        numbers = list(range(len(_trainer.documents())))
        return numbers + numbers[: -len(numbers) % self.ranks]


class Whole(Filling):
    ranks = 1


def mistaken():
    return _trainer.trainer(Filling)


def sound():
    return _trainer.trainer(Whole)
