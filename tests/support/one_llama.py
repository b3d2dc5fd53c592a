"""Questions of tests about one Llama, enabled or copied: if it is exact on a row, or leaks."""

import torch

from tests.conftest import FLOAT64, LEAK, LENGTHS, OTHER_LENGTHS, alone, error, positions, token_ids

IDS = token_ids()
WHERE = positions(LENGTHS)


def logits(model, lengths=LENGTHS):
    """Return the logits of the row, cut into documents of these lengths."""
    return model(input_ids=IDS, position_ids=positions(lengths)).logits


def is_exact(model, stock):
    """Return True if the row's documents have the logits that they have alone, cut either way."""
    return all(
        error(logits(model, n), alone(stock, IDS, n)) <= FLOAT64 for n in (LENGTHS, OTHER_LENGTHS)
    )


def leaks(model, stock):
    """Return True if documents change each other.

    With a mask stock transformers never looks at positions.
    """
    found = model(input_ids=IDS, position_ids=WHERE, attention_mask=torch.ones_like(IDS)).logits
    return error(found, alone(stock, IDS, LENGTHS)) > LEAK


def users_hook(module, args):
    """Forward pre-hook of the user's, which changes nothing.

    It is a function of a module, so that it can be pickled.
    """
