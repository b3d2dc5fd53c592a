"""Compiled code of one test is none of the next."""

import pytest
import torch
from torch._dynamo.utils import counters


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
