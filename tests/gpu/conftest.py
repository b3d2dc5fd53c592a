"""Tests of the CUDA backends; skipped, and said so, where there is no CUDA device.

tests/attention/test_varlen.py runs some of them on CPU stand-ins, which is why modules name their
`DEVICE`."""

import pytest
import torch


def pytest_collection_modifyitems(items):
    for item in items:
        if "tests/gpu" in item.path.as_posix():
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(params=[torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def dtype(request):
    return request.param
