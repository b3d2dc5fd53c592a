"""A twin speaks for a model: of any size, wherever it is, and only as far as the two are alike."""

import contextlib
from dataclasses import replace
from itertools import pairwise
from types import MethodType

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

import autopack
from autopack import tiny
from autopack.enabling import by_twin
from autopack.errors import UnsupportedModel
from autopack.proving import alike, configuration, twin
from autopack.proving.apart import apart
from tests.conftest import FLOAT32, LENGTHS, alone, error, positions, token_ids
from tests.proving.untouched import Doubled, built, left_alone
from tests.support.refusals import refused, refused_by_its_first_call


class Rolled(nn.Linear):
    def forward(self, states):
        return super().forward(states.roll(1, dims=1))


def like(kind, part):
    """A linear layer of one's own of the size of another."""
    return kind(part.in_features, part.out_features, bias=False)


def packed_error(model):
    ids = token_ids()
    expected = alone(model, ids, LENGTHS)
    with autopack.enable(model):
        return error(model(input_ids=ids, position_ids=positions(LENGTHS)).logits, expected)


def source(model):
    with autopack.enable(model) as handle:
        return handle.enabled.proof.source


class TestParts:
    def test_a_layer_of_ones_own_is_proven_by_itself(self):
        model = built()
        attention = model.model.layers[1].self_attn
        attention.o_proj = like(Doubled, attention.o_proj)
        with autopack.enable(model) as handle:
            assert handle.enabled.proof.source == "part"
            assert "but for Doubled: its calls are checked closely" in handle.verified
        assert packed_error(model) < FLOAT32

    def test_one_that_stands_behind_a_fine_one_of_its_class_is_found(self):
        model = built()
        for layer in model.model.layers:
            layer.self_attn.o_proj = like(Doubled, layer.self_attn.o_proj)
        layer.self_attn.o_proj.forward = MethodType(
            Rolled.forward, like(Rolled, layer.self_attn.o_proj)
        )
        refused_by_its_first_call(model)


class TestIsSilent:
    """Where the two are not alike, the model itself is audited, and the reason says where they
    differ."""

    @pytest.mark.parametrize("value", [True, "all", 3, len, None])
    def test_where_something_was_put_on_the_model_later(self, value):
        class Switched(LlamaForCausalLM):
            def forward(self, *args, **kwargs):
                output = super().forward(*args, **kwargs)
                if hasattr(self, "averages"):
                    output.logits = output.logits + output.logits.mean(dim=1, keepdim=True)
                return output

        model = Switched(tiny.config("llama"))
        assert source(model) == "twin"
        model.averages = value
        refused_by_its_first_call(model)

    def test_where_a_class_has_sizes_of_its_own(self):
        class Large(LlamaForCausalLM):
            def __init__(self, config):
                super().__init__(config)
                self.table = nn.Embedding(1_000_000, 64)

            def forward(self, *args, **kwargs):
                return super().forward(*args, **kwargs)

        with torch.device("meta"):
            model = Large(tiny.config("llama"))
        with pytest.raises(
            twin.NoTwin, match=r"64,078,144 parameters of the smallest configuration"
        ):
            apart(lambda: twin.of(model))


class TestAlike:
    @pytest.mark.parametrize("seed", range(8))
    def test_layers_keep_their_neighbours(self, seed):
        """Every pair of different kinds that follow each other is a word; a kind that follows itself
        is there twice."""
        several = torch.randint(2, (24,), generator=torch.Generator().manual_seed(seed)).tolist()
        kinds = [("sliding_attention", "full_attention")[number] for number in several]
        config = tiny.config("gemma3_text", num_hidden_layers=24, layer_types=kinds)
        words = configuration.describe(config)
        found = next(
            found for found in alike.alike(config) if configuration.describe(found) == words
        )
        assert found.num_hidden_layers <= 8, "each pair once or twice"
        assert found.layer_types[0] == kinds[0]
        every, few = set(pairwise(kinds)), found.layer_types
        assert set(pairwise(few)) <= every
        assert all(few.count(a) > 1 if a == b else (a, b) in pairwise(few) for a, b in every)

    def test_layers_that_take_over_keys_of_others(self):
        """Gemma 4 refuses four layers of which the last two take over keys, and takes five."""
        kinds = 2 * [*3 * ["sliding_attention"], "full_attention"]
        config = tiny.config(
            "gemma4_text", num_hidden_layers=8, layer_types=kinds, num_kv_shared_layers=4
        )
        found = apart(lambda: twin.of(AutoModelForCausalLM.from_config(config)))
        assert not found.others
        assert found.model.config.num_kv_shared_layers == 2

    def test_words_that_differ_leave_no_twin(self, monkeypatch):
        model = built()
        monkeypatch.setattr(
            twin, "alike", lambda config: iter([tiny.config("llama", attention_bias=True)])
        )
        with pytest.raises(twin.NoTwin, match="attention_bias of 'llama' is false, not true"):
            apart(lambda: twin.of(model))


@contextlib.contextmanager
def _default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def test_where_models_are_made_without_weights_none_is_enabled():
    model = tiny.build("llama")
    with pytest.importorskip("accelerate").init_empty_weights(), refused("not-proven"):
        autopack.enable(model)
    assert source(model) == "twin"


class _Doubling(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        return found * 2 if function is nn.functional.linear else found


IN_FORCE = {
    "a default device": lambda: torch.device("meta"),
    "a default dtype": lambda: _default_dtype(torch.bfloat16),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "a mode": _Doubling,
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("layer", [False, True], ids=["the class", "a layer"])
@pytest.mark.parametrize("name", IN_FORCE)
def test_whatever_is_in_force_where_a_model_is_enabled(name, layer):
    model = built()
    if layer:
        model.model.layers[1].mlp.down_proj = like(Doubled, model.model.layers[1].mlp.down_proj)
    state = torch.get_rng_state()
    with left_alone(model, model.model.layers[1].mlp.down_proj), IN_FORCE[name]():
        handle = autopack.enable(model)
    with handle:
        assert handle.enabled.proof.source == ("part" if layer else "twin")
        assert "e-1" in handle.verified  # float64
    assert torch.equal(state, torch.get_rng_state())
    assert packed_error(model) < FLOAT32


@pytest.mark.sampled(1)
@pytest.mark.parametrize("model_type", ["zamba2", "qwen3_5_moe", "kimi_linear"])
def test_layers_that_share_weights_and_experts_that_know_no_float64(model_type):
    """Zamba 2 reads earlier layers of its own; a mixture in float32 rounds by nearly as much as
    leaks."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type))
    with autopack.enable(model) as handle:
        assert ", float64)" in handle.verified


class Patching(LlamaForCausalLM):
    """Puts forwards on its layers when it is called, as transformers 4 does when states are asked
    for."""

    def forward(self, *args, **kwargs):
        for layer in self.model.layers:
            layer.forward = MethodType(type(layer).forward, layer)
        return super().forward(*args, **kwargs)


def test_a_twin_that_changes_while_it_is_audited_is_waited_for_by_nobody():
    """The thread of the twin looks at it anew, while that of the model holds the lock of those that
    do so."""
    with autopack.enable(built(cls=Patching)) as handle:
        assert handle.enabled.proof.source == "twin"


def test_what_one_precision_does_not_measure_another_does(monkeypatch):
    """Of Moshi in transformers 4.57 a padded batch gives no numbers in float64, and its mask makes
    it causal."""
    measured = by_twin.audited

    def audited(*given):
        report = measured(*given)
        padded = [result for result in report.results if result.kind == "padded"]
        if report.dtype == "float64":
            left_out = {result.mode: "stock gives values that are no numbers" for result in padded}
            rest = [result for result in report.results if result not in padded]
            return replace(report, results=rest, left_out=left_out)
        off = [replace(r, error=2.0, unpadded=True) if r in padded else r for r in report.results]
        return replace(
            report, results=[replace(r, error=0.5) if r not in padded else r for r in off]
        )

    monkeypatch.setattr(by_twin, "audited", audited)
    with autopack.enable(built()) as handle:
        proof = handle.enabled.proof
    assert proof.why_not_packed is None, "what float64 has measured counts"
    assert "float64), worst relative error" in proof.how
    assert (
        "it was not exact without its padding when its twin was audited" in proof.why_not_unpadded
    )


def test_gradients_that_one_precision_does_not_measure_another_does(monkeypatch):
    measured = by_twin.audited

    def audited(*given):
        report = measured(*given)
        if report.dtype == "float64":
            results = [replace(result, gradient=None) for result in report.results]
            return replace(
                report, results=results, notes={"gradients": "not measured, because stock has none"}
            )
        return replace(report, results=[replace(r, gradient=1.0) for r in report.results])

    monkeypatch.setattr(by_twin, "audited", audited)
    proof = None
    with contextlib.suppress(UnsupportedModel), autopack.enable(built()) as handle:
        proof = handle.enabled.proof
    assert proof is None, "its gradients are wrong in float32"


@pytest.mark.parametrize(
    ("model_type", "field", "small"),
    [
        ("longformer", "attention_window", [4, 4]),
        ("llama4_text", "no_rope_layers", [1, 1, 1, 0, 1]),
    ],
)
def test_windows_and_numbers_of_layers_are_no_kinds_of_layers(model_type, field, small):
    """Documents of twins were padded to windows of 512, and a list that counts the layers kept all
    of them."""
    config = AutoConfig.for_model(model_type)
    if model_type == "longformer":
        config.attention_window = [512] * config.num_hidden_layers
    found = next(alike.alike(config))
    assert getattr(found, field) == small
    assert found.num_hidden_layers == len(small) < config.num_hidden_layers


@pytest.mark.parametrize(
    "leaks_in",
    [
        lambda ids, given: len(ids) > 1,
        lambda ids, given: given.get("output_hidden_states"),
        lambda ids, given: given.get("position_ids") is not None and given["position_ids"][0, 0],
    ],
    ids=["two rows", "every output", "an offset"],
)
def test_a_leak_in_eval_with_gradients_alone_is_refused(leaks_in):
    """Forms that are called in eval run with gradients, as an evaluation without `no_grad` does."""

    class Leaky(LlamaForCausalLM):
        def forward(self, input_ids=None, **given):
            output = super().forward(input_ids=input_ids, **given)
            if torch.is_grad_enabled() and not self.training and leaks_in(input_ids, given):
                output.logits = output.logits + output.logits.mean(1, keepdim=True)
            return output

    with pytest.raises(UnsupportedModel, match="not exact"):
        autopack.enable(Leaky(tiny.config("llama")))
