"""A branch that a model takes by chance is run in its first training call, however rarely it is
taken."""

import pytest
import torch
from torch import nn

import autopack
from autopack.auditing.running import dtype_of
from tests.support.conditional import build, row
from tests.support.refusals import refused

RARE = 3e-4
"""How often a branch is taken: with the seed of these tests never by chance."""


def branching(takes, change=None):
    model = build(lambda self, **_: self.training and takes())
    if change is not None:
        type(model).change = staticmethod(change)
    return model.train()


TAKEN = {
    "a number below": lambda: torch.rand(()) < RARE,
    "a number above": lambda: torch.rand(1).item() > 1 - RARE,
    "in place": lambda: bool(torch.empty(1).uniform_() < RARE),
    "in place, of a range": lambda: bool(torch.empty(1).uniform_(-1, 3) > 3 - 4 * RARE),
    "a normal number": lambda: torch.randn(()) > 3.43,
    "a coin": lambda: bool(torch.bernoulli(torch.full((1,), RARE))),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", TAKEN)
def test_a_branch_that_mixes_tokens_is_refused(kind):
    model = branching(TAKEN[kind])
    # Coins return their probability while a model is proven, which is as good as true.
    with refused("leak-detected", "not-exact"), autopack.enable(model):
        model(**row(6, 6))


@pytest.mark.parametrize("kind", TAKEN)
def test_one_that_does_not_is_served(kind):
    model = branching(TAKEN[kind], lambda states: 2 * states)
    torch.manual_seed(0)
    model(**row(6, 6))
    state = torch.get_rng_state()
    torch.manual_seed(0)
    with autopack.enable(model):
        model(**row(6, 6))
    assert torch.equal(torch.get_rng_state(), state)


def test_code_that_gives_no_numbers_for_rare_draws_is_judged_by_others():
    """As Gumbel's noise gives none of a number that is nothing, and as code may stop at what never
    comes."""

    def takes():
        if float(torch.rand(())) > 1 - RARE:
            raise RuntimeError("hardly ever")
        return True

    model = branching(takes, lambda states: states + 0 * torch.log(torch.rand(()) - 2e-4))
    with autopack.enable(model) as handle:
        model(**row(6, 6))
        assert handle.checked.checks == 1


def test_the_precision_is_that_of_most_parameters():
    """One of half precision that comes first does not make a leak pass for rounding."""
    model = nn.Sequential(nn.Linear(1, 1, dtype=torch.bfloat16), nn.Linear(2, 2))
    assert dtype_of(model) == torch.float32
