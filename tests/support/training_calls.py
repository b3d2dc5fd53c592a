"""Calls of a training run for the tests of `watch`: packed rows and padded batches of random
documents, and noise."""

import pytest
import torch

from tests.conftest import positions, token_ids
from tests.support.padded import batch, mask_of

FLOAT32 = 1e-4
"""Largest error that is rounding, as in the auditor."""
RATE = 0.3
"""Probability of dropout."""


def noisy(model, rate=RATE):
    """Return the model with so much dropout wherever it has some, set in place."""
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and (name == "p" or "dropout" in name or "jitter" in name):
                setattr(module, name, rate)
    return model


with_and_without_noise = pytest.mark.parametrize(
    "noise", [lambda model: model, noisy], ids=["", "dropout"]
)


def lengths_of(step):
    """Return four random lengths, always the same for a step."""
    return torch.randint(1, 14, (4,), generator=torch.Generator().manual_seed(step)).tolist()


def row(step):
    """Return a packed row of random documents."""
    lengths = lengths_of(step)
    ids = token_ids(columns=sum(lengths), seed=step)
    return {"input_ids": ids, "position_ids": positions(lengths), "labels": ids}


def segments(step):
    """Return a packed row that declares its documents by segment ids, with padding at its end.

    It is for models that take no positions.
    """
    lengths = lengths_of(step)
    ids = token_ids(columns=sum(lengths) + 3, seed=step)
    numbers = torch.tensor([*range(1, 5), 0]).repeat_interleave(torch.tensor([*lengths, 3]))[None]
    return {
        "input_ids": ids,
        "attention_mask": numbers,
        "labels": ids.masked_fill(numbers == 0, -100),
    }


def padded(step):
    """Return a padded batch of a masked language model with documents of random lengths."""
    return batch("masked LM", mask_of(lengths_of(step)), seed=step)


def trained(model, *batches):
    """Train the model for a step on each batch, and return the outputs."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    outputs = []
    for each in batches:
        outputs.append(model(**each))
        outputs[-1].loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return outputs
