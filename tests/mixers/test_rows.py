"""Mixers on documents as rows: what each document gets alone, at every length that could go
wrong."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import autopack
from autopack import registry, tiny
from autopack.inspection import modules
from autopack.layout.packed import PackedLayout
from autopack.layout.token_map import GROWTH, buckets
from autopack.mixers.operations import run_per_document_row
from tests.conftest import (
    FLOAT32,
    FLOAT64,
    LEAK,
    alone,
    attributes,
    error,
    positions,
    same,
)
from tests.engine import Call, Limits, check, leaks, must_be_exact, weighted
from tests.support.precision import float64_throughout
from tests.support.refusals import refused, refused_by_its_first_call
from tests.support.trained import checkpointed

CONVOLUTION, CHUNK = 4, 8
"""Width of the convolutions and length of the chunks in tiny models."""
AROUND_CHUNKS = (1, CONVOLUTION - 1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 130, 1, 40)
OTHERS = (64, 1, 2, 100, 34)
RECURRENT = [
    f for f in registry.families() if f.positions and any(way.recurs for way in f.mixers.values())
]
TYPES = sorted(
    frozenset().union(*(f.model_types for f in RECURRENT)) & set(tiny.types_for("causal-lm"))
)
MIXERS = {"lfm2": "Lfm2ShortConv", "mamba2": "Mamba2Mixer", "minimax": "MiniMaxLightningAttention"}


_weighted = partial(weighted, loss=1e-3)
"""What cancels in its loss rounds."""


@pytest.mark.parametrize("model_type", TYPES)
def test_every_length_gives_logits_and_gradients_of_the_document_alone(model_type):
    model, rows = tiny.build(model_type).train(), (AROUND_CHUNKS, OTHERS)
    call = {
        "input_ids": tiny.tokens(model.config, 2, sum(AROUND_CHUNKS)),
        "position_ids": positions(*rows),
    }
    expected = _weighted(model, alone(model, call["input_ids"], *rows))
    assert leaks(_weighted(model, model(**call, use_cache=False).logits), expected), (
        "stock has become exact"
    )
    with autopack.enable(model):
        check(_weighted(model, model(**call).logits), expected)


@pytest.mark.parametrize("model_type", TYPES)
def test_float64(model_type):
    model = tiny.build(model_type).double()
    # the default, grouped matrix products, takes no float64
    model.set_experts_implementation("eager")
    ids = tiny.tokens(model.config, 1, sum(AROUND_CHUNKS))
    with float64_throughout():
        expected = _weighted(model, alone(model, ids, AROUND_CHUNKS))
        with autopack.enable(model, verify=False):
            found = _weighted(
                model, model(input_ids=ids, position_ids=positions(AROUND_CHUNKS)).logits
            )
    assert found.documents[0].dtype == torch.float64
    expected.limits = Limits(FLOAT64, FLOAT64, FLOAT64)
    check(found, expected)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("model_type", ["bamba", "qwen3_next", "lfm2"])
def test_checkpointed_mixers_know_their_documents(model_type, reentrant):
    must_be_exact(model_type, Call().row, partial(checkpointed, reentrant=reentrant))


def test_a_mixer_reached_past_the_entry_is_refused():
    model = tiny.build("bamba")
    (mixer, *_) = modules.mixers(model, frozenset({"BambaMixer"}))
    with autopack.enable(model), refused("past-the-entry"):
        mixer(torch.zeros(1, 3, model.config.hidden_size))


lengths = st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=8), min_size=1, max_size=3)


@settings(max_examples=60)
@given(lengths)
def test_any_causal_mixer_gets_every_document_once_and_from_its_start(rows):
    width = max(map(sum, rows))
    rows = [[*row, *([width - sum(row)] if sum(row) < width else [])] for row in rows]
    layout = PackedLayout.from_lengths(rows)
    hidden = torch.randn(len(rows), width, 2, dtype=torch.float64)

    def mix(spread):
        return spread(hidden).cumsum(1) + spread(hidden)

    found = run_per_document_row(mix, layout)
    for row, start, end in layout.spans:
        part = hidden[row, start:end]
        assert torch.allclose(found[row, start:end], part.cumsum(0) + part, atol=1e-12)
    groups = [[layout.lengths[i] for i in group] for group in buckets(layout)]
    assert sorted(n for group in groups for n in group) == sorted(layout.lengths)
    assert all(max(group) <= GROWTH * min(group) for group in groups)


CONVOLUTIONS = frozenset({"Lfm2ShortConv"})


@pytest.mark.parametrize(
    "when", ["before enable", "while enabled", "before enable, gone while enabled"]
)
@pytest.mark.parametrize("model_type", MIXERS)
def test_under_the_hooks_of_accelerate_documents_stay_apart(model_type, when):
    """They keep the forward that they found, and call that past the class."""
    hooks = pytest.importorskip("accelerate.hooks")
    model = tiny.build(model_type)
    ids = tiny.tokens(model.config, 1, 12)
    expected = torch.cat(
        [model(input_ids=part, use_cache=False).logits for part in ids.split([5, 7], dim=1)], dim=1
    )

    def hook():
        for module in model.modules():
            if not list(module.children()) or type(module).__name__ == MIXERS[model_type]:
                hooks.add_hook_to_module(module, hooks.AlignDevicesHook("cpu", io_same_device=True))

    def error_now(**options):
        return error(
            model(input_ids=ids, position_ids=positions((5, 7)), **options).logits, expected
        )

    if when.startswith("before"):
        hook()
    before = attributes(model)
    handle = autopack.enable(model)
    if when == "while enabled":
        hook()
    assert error_now() < FLOAT32
    if when.endswith("gone while enabled"):
        hooks.remove_hook_from_submodules(model)
        assert error_now() < FLOAT32
    handle.remove()
    if when == "before enable":
        assert same(attributes(model), before)
    assert error_now(use_cache=False) > LEAK


@pytest.mark.parametrize("name", ["Lfm2ShortConv", "OtherConv"])
def test_code_from_elsewhere_is_checked_whatever_type_it_goes_by(name, monkeypatch):
    """Remote code with a covered model_type: served and checked, refused where its mixers have
    other names."""
    model = tiny.build("lfm2")
    for mixer in modules.mixers(model, CONVOLUTIONS):
        own = {k: v for k, v in vars(type(mixer)).items() if k not in ("__dict__", "__weakref__")}
        cls = type(name, (torch.nn.Module,), {**own, "__module__": __name__})
        cls.__qualname__ = name
        monkeypatch.setitem(globals(), name, cls)
        mixer.__class__ = cls
    if name == "OtherConv":
        refused_by_its_first_call(model)
    else:
        with autopack.enable(model) as handle:
            assert "but for Lfm2ShortConv: its calls are checked closely" in handle.verified
