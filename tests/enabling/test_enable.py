"""enable and disable: what they change, that all of it goes back by identity, copies, and
refusals."""

import re

import pytest
import torch
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

import autopack
from autopack import tiny
from autopack.calls.hooks import EntryHook
from autopack.runtime.marks import MARK
from tests.conftest import (
    attributes,
    installed_functions,
    llama,
    positions,
    same,
)
from tests.engine import Call, check, ids
from tests.subjects import WithoutTwin, put_own_layer, rebuilt
from tests.support.one_llama import is_exact, logits, users_hook
from tests.support.refusals import refused, refused_by_its_first_call

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


@pytest.fixture(scope="module")
def stock():
    return llama()


def _state(model):
    return attributes(model), installed_functions()


def _as_before(model, before):
    return all(map(same, _state(model), before))


class TestRestoring:
    """Afterwards everything is the same object as before: hooks, functions, configs, checkpoint
    functions, marks."""

    @pytest.fixture(
        params=["eager", "sdpa", pytest.param("flex_attention", marks=pytest.mark.exhaustive)]
    )
    def model(self, request):
        model = llama(request.param, torch.float32)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.register_forward_pre_hook(users_hook)
        return model

    @pytest.fixture
    def verify(self, model):
        """The hook asks for an audit, for which flex would be compiled."""
        return model.config._attn_implementation != "flex_attention"

    def test_enable_changes_what_disable_restores(self, model, verify):
        before = _state(model)
        handle = autopack.enable(model, verify=verify)
        assert not _as_before(model, before)
        assert autopack.is_enabled(model)
        assert MARK in vars(model.model.layers[0].self_attn)
        autopack.disable(model)
        assert not autopack.is_enabled(model)
        assert _as_before(model, before)
        autopack.disable(model)  # of a model that is not enabled: nothing to do
        handle.remove()
        assert _as_before(model, before)
        autopack.enable(model, verify=verify).remove()
        assert _as_before(model, before)
        with pytest.raises(ZeroDivisionError), autopack.enable(model, verify=verify):
            raise ZeroDivisionError
        assert _as_before(model, before)

    def test_changing_the_implementation_is_followed_and_restored(self, stock):
        model, before = llama("eager"), installed_functions()
        with autopack.enable(model):
            model.set_attn_implementation("sdpa")
            assert is_exact(model, stock)
            model.set_attn_implementation("eager")
            assert is_exact(model, llama("eager"))
        assert same(installed_functions(), before)


class LeakyLlama(LlamaForCausalLM):
    """A remote-code model whose structure looks servable, but whose first layer also takes from the
    token before."""

    def __init__(self, config):
        super().__init__(config)
        self.model.layers[0].mlp = MixingWithTheTokenBefore(config)


class MixingWithTheTokenBefore(LlamaMLP):
    def forward(self, states):
        return super().forward(
            states + states.roll(1, dims=1) * (torch.arange(states.shape[1]) > 0)[:, None]
        )


def _leaky(model_type="llama"):
    model = rebuilt(llama(), LeakyLlama)
    model.config.model_type = model_type
    return model


def _refused_as_it_was(model, code, match, **options):
    before = _state(model)
    with refused(code, match=match):
        autopack.enable(model, **options)
    assert _as_before(model, before)
    assert not autopack.is_enabled(model)


class TestFailures:
    """An enable that fails leaves everything as it was, and says what it wanted."""

    def test_a_twin_that_leaks(self):
        match = "audited it, and it is not exact: in mode .* logits are off by"
        _refused_as_it_was(_leaky(), "not-exact", match)

    def test_a_model_without_a_twin_that_leaks(self):
        model = _leaky("made_up")
        before = _state(model)
        refused_by_its_first_call(model)
        assert _as_before(model, before)
        assert not autopack.is_enabled(model)

    def test_a_structure_of_which_there_is_no_twin_is_checked(self):
        model = WithoutTwin(llama().config, None).eval()
        with autopack.enable(model) as handle:
            assert "call by call, in use" in handle.verified
            assert "no twin tells, for TypeError" in handle.verified
            assert handle.summary == "enabled, checked in use, no call yet"
            logits(model)
            assert (handle.checked.checks, handle.checked.leaks) == (1, 0)

    def test_what_is_trusted_is_not_audited(self):
        with autopack.enable(_leaky("made_up"), verify=False) as handle:
            assert "not asked for" in handle.verified

    @pytest.mark.parametrize(
        ("model_type", "options", "message"),
        [
            (
                "big_bird",
                {"attention_type": "block_sparse"},
                "Nothing was changed; train it on padded batches",
            ),
            ("falcon", {"alibi": True}, "bfloat16, counted from the start of the row"),
        ],
    )
    @pytest.mark.parametrize("verify", [True, False, "strict"])
    def test_architectures_that_leak_elsewhere(self, model_type, options, message, verify):
        _refused_as_it_was(
            tiny.build(model_type, **options), "cannot-be-packed", message, verify=verify
        )

    def test_options_that_do_not_exist(self):
        model = llama()
        with pytest.raises(
            ValueError,
            match="must be 'auto', 'eager', 'flash', 'flex', 'sdpa' or 'varlen'; found 'x'",
        ):
            autopack.enable(model, backend="x")
        for name, value, said in (
            ("unpad", "never", "unpad must be True or False; found 'never'"),
            ("share", 1, "share must be True or False; found 1"),
            ("verify", "full", "must be True, False or 'strict'; found 'full'"),
        ):
            with pytest.raises(ValueError, match=re.escape(said)):
                autopack.enable(model, **{name: value})

    @pytest.mark.parametrize(
        ("implementation", "backend", "way_out"),
        [
            ("sdpa", "eager", "Load the model with another attn_implementation"),
            ("sdpa", "flash", "possible: varlen, sdpa"),
            ("flex_attention", "sdpa", "possible: flex"),
            ("sdpa", "varlen", "backend='varlen' is not available here"),
        ],
    )
    def test_a_backend_that_cannot_serve_the_model(self, implementation, backend, way_out):
        if backend == "varlen" and torch.cuda.is_available():
            pytest.skip("varlen is available here")
        _refused_as_it_was(
            llama(implementation, torch.float32), "backend-unavailable", way_out, backend=backend
        )


class TestSeveralModels:
    def test_a_second_enable_changes_nothing(self):
        model = llama()
        with autopack.enable(model, backend="sdpa") as handle:
            assert autopack.enable(model).enabled is handle.enabled
            assert autopack.enable(model, backend="sdpa").enabled is handle.enabled
            with pytest.raises(
                ValueError, match="enabled with backend='sdpa'; call autopack.disable"
            ):
                autopack.enable(model, backend="flex")
            hooks = [h for h in model._forward_pre_hooks.values() if isinstance(h, EntryHook)]
            assert len(hooks) == 1

    def test_a_block_around_an_enabled_model_leaves_it_enabled(self):
        model, stock = llama(), llama()
        handle = autopack.enable(model)
        with autopack.enable(model) as inner, autopack.enable([model]):
            assert inner.enabled is handle.enabled
        assert autopack.is_enabled(model)
        assert is_exact(model, stock)
        handle.remove()
        with autopack.enable(model):
            autopack.enable(model)  # by itself it changes nothing
        assert not autopack.is_enabled(model)

    def test_a_part_of_an_enabled_model_is_not_enabled_again(self):
        model = llama()
        with autopack.enable(model.model), refused("part-enabled"):
            autopack.enable(model)


def test_the_handle_says_what_was_done():
    model = llama()
    handle = autopack.enable(model, backend="sdpa")
    text = repr(handle)
    for fact in (
        "LlamaForCausalLM (llama)",
        "2 modules, attn_implementation=sdpa",
        "backend:   sdpa",
    ):
        assert fact in text
    assert "<table><caption>autopack: enabled, exact, no call yet</caption>" in handle._repr_html_()
    handle.remove()
    assert repr(handle).startswith("autopack: disabled\n")


# A changed model is looked at in its next call, also inside generation and transforms of
# torch.func.

LENGTHS = (5, 7)


def without_twin():
    model = tiny.build("llama")
    model.__class__ = WithoutTwin
    return model


def generate(model, ids):
    model.generate(ids, max_new_tokens=3, do_sample=False)


def differentiate(model, ids, **given):
    def total(parameters):
        return torch.func.functional_call(
            model, parameters, (), {"input_ids": ids, "use_cache": False, **given}
        )[0].sum()

    return torch.func.grad(total)(dict(model.named_parameters()))


@pytest.mark.parametrize(
    "build", [without_twin, lambda: tiny.build("llama")], ids=["no twin", "twin"]
)
@pytest.mark.parametrize("first", [generate, differentiate])
@pytest.mark.parametrize("packed", [True, False])
def test_calls_after_it_are_exact(build, first, packed):
    model = build().eval()
    call = Call(labels=None, lengths=LENGTHS, given={"use_cache": False})
    with autopack.enable(model) as handle:
        put_own_layer(model)
        first(model, ids(lengths=LENGTHS))
        with torch.no_grad():
            found = (call.packed if packed else call.padded)(model)
        assert handle.checked.checks > 0
        assert packed or handle.tally.batches == 1
    with torch.no_grad():
        check(found, call.alone(model))


def test_a_packed_call_that_cannot_be_checked_here_is_refused_and_only_that_one():
    model = without_twin().eval()
    tokens, where = ids(lengths=LENGTHS), positions(LENGTHS)
    with autopack.enable(model):
        put_own_layer(model)
        with refused("recorded-call", match="Call it once outside"):
            differentiate(model, tokens, position_ids=where)
        assert model(input_ids=tokens, position_ids=where, use_cache=False).logits.isfinite().all()
        differentiate(model, tokens, position_ids=where)
