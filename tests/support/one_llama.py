"""What tests ask of one Llama, enabled or copied: whether it is exact on one packed row, and
whether it leaks."""

import torch

from tests.conftest import FLOAT64, LEAK, LENGTHS, OTHER_LENGTHS, alone, error, positions, token_ids

IDS = token_ids()
WHERE = positions(LENGTHS)


def logits(model, lengths=LENGTHS):
    """The logits of the row, cut into documents of these lengths."""
    return model(input_ids=IDS, position_ids=positions(lengths)).logits


def is_exact(model, stock):
    """Whether every document of the row gets what it gets alone, for both ways of cutting it."""
    return all(
        error(logits(model, n), alone(stock, IDS, n)) <= FLOAT64 for n in (LENGTHS, OTHER_LENGTHS)
    )


def leaks(model, stock):
    """Whether documents change each other; with a mask stock transformers never looks at
    positions."""
    found = model(input_ids=IDS, position_ids=WHERE, attention_mask=torch.ones_like(IDS)).logits
    return error(found, alone(stock, IDS, LENGTHS)) > LEAK


def users_hook(module, args):
    """A forward pre-hook of the user's, which changes nothing; a function of a module, so that it
    can be pickled."""
