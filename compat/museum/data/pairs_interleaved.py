"""A batch has each pair side by side, and the loss takes its halves for chosen and rejected.

pairs: Generalizable-Reward-Model#9

One program lays chosen and rejected answers side by side, another one expects all chosen ones
first. Taken from one to the other, answers are compared with those to other prompts.
"""

import torch

from compat.museum.data._pairs import trainer


def side_by_side(collate):
    def collate_pairs(features):
        batch = collate(features)
        order = torch.arange(2 * len(features)).reshape(2, -1).T.flatten()
        return {name: value[order] for name, value in batch.items()}

    return collate_pairs


def mistaken():
    made = trainer()
    made.data_collator = side_by_side(made.data_collator)
    return made


sound = trainer
