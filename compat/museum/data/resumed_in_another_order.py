"""A resumed run shuffles as if it were in its first epoch.

resume: ms-swift#10050, accelerate#2016

The order of an epoch follows the number of epochs that a sampler has seen. The sampler of a resumed
run is new, so the batches that are skipped are those of another order: some documents come again,
and some never.
"""

from __future__ import annotations

import torch
from torch.utils.data import Sampler
from transformers import Trainer

from compat.museum.data import _trainer


class Shuffled(Sampler):
    def __init__(self, size, heeds):
        self.size, self.heeds, self.epoch = size, heeds, 0

    def __len__(self):
        return self.size

    def set_epoch(self, epoch):
        self.epoch = epoch if self.heeds else self.epoch

    def __iter__(self):
        yield from torch.randperm(
            self.size, generator=torch.Generator().manual_seed(self.epoch)
        ).tolist()
        self.epoch += not self.heeds


class Resuming(Trainer):
    def _get_train_sampler(self, *args):
        return Shuffled(len(_trainer.documents()), self.args.run_name == "sound")


def mistaken():
    return _trainer.trainer(Resuming, run_name="mistaken")


def sound():
    return _trainer.trainer(Resuming, run_name="sound")
