import pytest

from tests.support.padded import build, twins


@pytest.fixture(autouse=True)
def _nothing_is_left_behind(nothing_left_behind):
    """After every test here, transformers is as it was before."""


@pytest.fixture
def pair():
    """A stock Llama and a copy of it, which tests enable."""
    return twins(build("llama").eval())
