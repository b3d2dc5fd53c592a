"""Whatever a test here does, it leaves nothing behind."""

import pytest


@pytest.fixture(autouse=True)
def _leaves_nothing_behind(nothing_left_behind):
    """It ends last, after the fixtures of the test."""
