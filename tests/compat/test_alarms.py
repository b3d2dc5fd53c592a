"""`python -m compat.alarms` runs every call under checks, and counts what they take for leaks."""

import pytest
import torch

from autopack.watching import influence, schedule
from compat import alarms


@pytest.mark.parametrize(
    ("name", "setting"),
    [("causal-lm llama", "plain"), ("seq2seq t5", "plain"), ("causal-lm llama", "reentrant")],
)
def test_exact_types_have_none(name, setting):
    found = alarms.checked(name, "float32", setting)
    assert found["status"] == "exact"
    assert 0 < found["checks"] <= found["calls"]
    assert found["worst"] < 1e-4


def test_a_false_one_is_counted(monkeypatch):
    """The control: what nobody touched moves from run to run."""
    how_far = influence.how_far
    monkeypatch.setattr(
        influence, "how_far", lambda name, one, two: how_far(name, one, two + torch.ones_like(two))
    )
    monkeypatch.setattr(schedule.Runs, "widened", lambda self, worst, *_: worst)
    found = alarms.checked("causal-lm llama")
    assert found["status"] == "ALARM"
    assert "LlamaForCausalLM" in found["reason"]
