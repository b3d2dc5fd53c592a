"""What tests draw is the same in every run and every order."""

import random

import numpy
import pytest
import torch


def drawn():
    return random.random(), numpy.random.rand(), torch.rand(()).item()


SEEN = []


@pytest.fixture(scope="module")
def of_the_module():
    return drawn()


@pytest.fixture
def of_a_test():
    return drawn()


@pytest.mark.parametrize("number", range(2))
def test_draws_alike(number, of_a_test, of_the_module):
    SEEN.append((drawn(), of_a_test, of_the_module))
    assert len({value for values in SEEN for value in values}) == 1
