import pytest


@pytest.fixture(autouse=True)
def _nothing_is_left_behind(nothing_left_behind):
    """After every test here, transformers is as it was before."""
