"""Every causal-LM type that autopack says it serves: packed equals alone, on eager, sdpa or flash
in turn.

The recorded table has all types in every call mode on every backend (`python -m compat.exactness`),
and the matrix those of every release; flex takes seconds per type on a CPU:
tests/attention/test_flex.py runs some. The measurement is `compat.exactness.measure`, the same that
prints the table. Tolerances are those of the auditor: 1e-4 of the logits' standard deviation, 1e-3
for gradients and losses in float32."""

import pytest
import torch

import autopack
from autopack import registry, tiny
from compat.exactness import Undeclared, built, measure, recorded, stand_in
from tests.support.precision import float64_throughout
from tests.support.refusals import refused

SERVED = sorted(frozenset().union(*(f.model_types for f in registry.families())))
REFUSED = sorted({t: r for f in registry.families() for t, r in f.refused_types.items()})
AVAILABLE = set(tiny.types_for("causal-lm"))
BACKENDS = ("eager", "sdpa", "flash")


def _types(names):
    return [name for name in names if name in AVAILABLE]


@pytest.mark.parametrize(
    ("model_type", "backend"),
    [(name, BACKENDS[i % len(BACKENDS)]) for i, name in enumerate(_types(SERVED))],
)
def test_packed_equals_alone(model_type, backend):
    some = {"modes": ("default", "padding mask", "two rows", "right-padded"), "training": (True,)}
    try:
        with stand_in(backend):
            built(model_type, backend)
    except Undeclared:
        backend = "eager"
    result = measure(model_type, backend, torch.float32, **some)
    if result["status"] == "undeclared":
        pytest.skip(f"{model_type} declares no support of {backend}")
    if result["status"] == "upstream error":
        pytest.skip(f"stock transformers cannot run it: {result['reason']}")
    assert result["status"] == "exact", result


def test_casts_to_float32_in_upstreams_code_are_all_that_keeps_a_type_from_float64():
    """GPT-J multiplies queries and keys in float32, which shows where a machine adds up in another
    order; what autopack does to it is held to 1e-9 without that."""
    model = tiny.build("gptj", dtype=torch.float64)
    with autopack.enable(model):
        found = autopack.audit(model, modes=("two rows",), training=(True,))
        with float64_throughout():
            lifted = autopack.audit(model, modes=("two rows",), training=(True,))
    assert found.worst < 1e-5
    assert lifted.exact, str(lifted)
    assert lifted.worst < 1e-12
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("model_type", _types(REFUSED))
def test_what_leaks_is_refused_with_the_reason_and_left_alone(model_type):
    try:
        model = tiny.build(model_type)
    except tiny.CannotBuild as error:
        pytest.skip(str(error))
    before = dict(vars(model))
    with refused("cannot-be-packed"):
        autopack.enable(model, verify=False)
    assert vars(model) == before


def test_every_type_of_the_recorded_table_is_served_or_refused():
    for model_type, cells in recorded()["causal-lm"].items():
        statuses = {cell["status"] for cell in cells.values()}
        assert "LEAK" not in statuses, model_type
        configs = {cell["config"] for cell in cells.values() if "config" in cell}
        if "exact" in statuses:
            assert configs <= set(SERVED), f"{model_type} is exact but no family lists {configs}"
