"""A resumed run shuffles as if it were in its first epoch.

resume: ms-swift#10050, accelerate#2016

The order of an epoch follows the number of epochs that a sampler has seen. The sampler of a resumed
run is new, so the batches that are skipped are those of another order: some documents come again,
and some never.
"""

import torch
from torch.utils.data import Sampler
from transformers import Trainer

from compat.museum.data import _trainer


class Shuffled(Sampler):
    def __init__(self, heeds):
        self.heeds, self.epoch = heeds, 0

    def __len__(self):
        return _trainer.COUNT

    def set_epoch(self, epoch):
        self.epoch = epoch if self.heeds else self.epoch

    def __iter__(self):
        drawn = torch.Generator().manual_seed(self.epoch)
        yield from torch.randperm(_trainer.COUNT, generator=drawn).tolist()
        self.epoch += not self.heeds


class Resuming(Trainer):
    heeds = False

    def _get_train_sampler(self, *args):
        return Shuffled(self.heeds)


class Heeding(Resuming):
    heeds = True


mistaken = {"kind": Resuming}
sound = {"kind": Heeding}
