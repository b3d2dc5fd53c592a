"""Errors of float32 that are gone in double precision are none; leaks stay leaks in any
precision."""

import pytest
import torch

import autopack
from autopack import tiny
from autopack.auditing.running import can_be_doubled, in_double


def drawn(model_type, task, seed):
    """A tiny model whose weights its own class draws from a seed."""
    kind = type(tiny.build(model_type, task=task))
    torch.manual_seed(seed)
    return kind(tiny.config(model_type, task=task)).eval()


@pytest.mark.parametrize(("seed", "mode"), [(8, "left-padded"), (21, "right-padded, no labels")])
def test_a_kink_is_no_leak(seed, mode):
    """With these weights a unit of a ReLU is at its kink: its gradient is on or off by rounding."""
    model = drawn("t5", "seq2seq", seed)
    with autopack.enable(model, verify=False):
        report = autopack.audit(model, modes=(mode,), training=(True,))
    assert report.exact, report
    if "precision" not in report.notes:
        pytest.skip("float32 leaves no doubt on this processor")


class Leaky(torch.nn.Module):
    """A layer whose tokens get a little of the first token of the row: some ten times what float32
    allows."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, hidden):
        return self.inner(hidden) + 1e-5 * hidden[:, :1]


@pytest.mark.parametrize("seed", range(3))
def test_a_small_leak_stays_one(seed):
    model = drawn("llama", "causal-lm", seed)
    for layer in model.model.layers:
        layer.mlp = Leaky(layer.mlp)
    with autopack.enable(model, verify=False):
        report = autopack.audit(model, modes=("default",))
    assert not report.exact
    assert 1e-4 < report.worst < 1e-1


def test_compiled_code_is_not_run_in_double_precision():
    """Torch may run it uncompiled there, and what leaks where it is compiled would pass for
    exact."""
    model = drawn("llama", "causal-lm", 0)
    assert can_be_doubled(model)
    model.compile(backend="eager")
    assert not can_be_doubled(model)


def test_weights_come_back_by_identity():
    model = drawn("llama", "causal-lm", 0)
    tensors = {
        name: (t, t.clone()) for name, t in (*model.named_parameters(), *model.named_buffers())
    }
    with pytest.raises(KeyboardInterrupt), in_double(model):  # noqa: PT012
        assert not any(p is tensors[name][0] for name, p in model.named_parameters())
        raise KeyboardInterrupt
    found = dict((*model.named_parameters(), *model.named_buffers()))
    assert all(found[name] is t and torch.equal(t, copy) for name, (t, copy) in tensors.items())
