"""Modes of torch that are in force around a model: a check of a call runs in them."""

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import autopack
from autopack import tiny
from tests.support.conditional import EXACT, error, row
from tests.support.refusals import refused


class Mixing(TorchFunctionMode):
    """A mode that mixes tokens, in force around calls; in another thread it is not."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        return found + 0.3 * found.cumsum(1) if function is nn.functional.silu else found


class MixingBelow(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        return found + 0.3 * found.cumsum(1) if function is torch.ops.aten.silu.default else found


class Looking(TorchFunctionMode):
    """A mode that changes nothing."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [Mixing, MixingBelow])
def test_a_mode_that_mixes_tokens_is_met_in_its_first_call(mode):
    """The second call is one of those that are checked."""
    model = tiny.build("llama")
    with autopack.enable(model), torch.no_grad():
        model(**row(5, 9))
        with mode(), refused("leak-detected"):
            model(**row(5, 9))


def test_a_mode_that_changes_nothing_is_served():
    model, stock = tiny.build("llama"), tiny.build("llama")
    with autopack.enable(model) as handle, Looking():
        assert error(model, stock, row(5, 9)) <= EXACT
        assert handle.checked.checks == 1
    with autopack.enable(model) as handle, torch.device("cpu"):
        assert error(model, stock, row(5, 9)) <= EXACT
        assert handle.checked.checks == 1
