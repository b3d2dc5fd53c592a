"""Documents that begin alike get what each gets alone, where that is computed once: outputs, losses
and gradients."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import autopack
from autopack.attention.call import by_stretches
from autopack.attention.choose import BACKENDS
from autopack.proving import kept
from compat.exactness import built, stand_in
from compat.standins import taken_for_kernels
from tests.prefixes.forms import FORMS, agree, parts, without_labels
from tests.support.padded import GRADIENT, build, packs_at_once, twins
from tests.support.padded import agree as as_padded
from tests.support.prefixes import group, padded, tree

TYPES = [
    "llama",
    "gemma2",
    "gpt2",
    "opt",
    "mixtral",
    "gemma3_text",
    "falcon",
    "bamba",
    "qwen3_next",
]
IN_BATCHES = ["cohere2", "gpt_oss", "bloom", "bart", "lfm2"]
CASES = [
    *((form, name) for form in FORMS for name in TYPES),
    *(("padded", name) for name in IN_BATCHES),
]
EAGER = {"gemma2", "gpt_oss", "bloom"}
"""Types that know no other attention."""
in_both_forms = pytest.mark.parametrize("form", FORMS)


class TestAgreement:
    @pytest.mark.parametrize("labels", [True, False], ids=["labels", "loss of logits"])
    @pytest.mark.parametrize(("form", "model_type"), CASES)
    def test_logits_loss_and_gradients(self, form, model_type, labels):
        stock, model = twins(
            build(model_type, attn_implementation="eager" if model_type in EAGER else "sdpa").eval()
        )
        with packs_at_once(model) as handle:
            agree(stock, model, FORMS[form](tree()), labels)
            volume = handle.tally.training
            assert volume.shared > 40
            assert volume.columns + volume.shared == volume.tokens == sum(map(len, tree()))

    @in_both_forms
    @torch.no_grad()
    def test_states_of_layers_and_the_backbone_alone(self, pair, form):
        stock, model = pair
        batch = without_labels(FORMS[form](tree()))
        with autopack.enable(model) as handle:
            found = model(**batch, use_cache=False, output_hidden_states=True).hidden_states
            assert handle.tally.evaluation.shared > 40
        for row, first, end in parts(batch):
            alone = stock(
                input_ids=batch["input_ids"][row : row + 1, first:end], output_hidden_states=True
            )
            for one, other in zip(found, alone.hidden_states, strict=True):
                assert torch.allclose(one[row, first:end], other[0], atol=1e-5)
        with autopack.enable(model.model) as handle:
            last, as_tuple = (
                model.model(**batch, use_cache=False, return_dict=given) for given in (True, False)
            )
            assert isinstance(as_tuple, tuple)
            for row, first, end in parts(batch):
                assert torch.allclose(last[0][row, first:end], found[-1][row, first:end], atol=1e-5)
            assert handle.tally.evaluation.shared > 80

    @pytest.mark.parametrize("backend", ["eager", "sdpa", "flash", "flex"])
    @pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
    @in_both_forms
    def test_every_backend(self, form, model_type, backend):
        """Kernels of flash and flex need a GPU: these are stand-ins of their signatures, and no
        twin proves them."""
        with stand_in(backend):
            model = built(model_type, backend).eval()
            stock = built(model_type, "sdpa").eval()
            stock.load_state_dict(model.state_dict())
            with packs_at_once(model, verify=False) as handle:
                taken_for_kernels(handle)
                agree(stock, model, FORMS[form](tree()))
                assert handle.tally.training.shared > 40

    @pytest.mark.parametrize(
        ("form", "kept"),
        [
            *((form, kept) for form in FORMS for kept in (1, 7)),
            ("padded", torch.tensor([3, 40, 41])),
        ],
        ids=str,
    )
    @torch.no_grad()
    def test_logits_of_some_columns(self, pair, form, kept):
        stock, model = pair
        batch = without_labels(FORMS[form](group(32, (11, 11, 11))))
        rows = batch["input_ids"] if form == "padded" else batch["input_ids"][:, -43:]
        with autopack.enable(model) as handle:
            found = model(**batch, use_cache=False, logits_to_keep=kept).logits
            assert handle.tally.evaluation.shared == 64
        assert torch.allclose(found, stock(input_ids=rows, logits_to_keep=kept).logits, atol=1e-5)

    @pytest.mark.parametrize("task", ["sequence classification", "token classification"])
    def test_heads(self, task):
        stock, model = twins(build("llama", task).eval())
        batch = padded(tree())
        with autopack.enable(model) as handle, torch.no_grad():
            as_padded(model, stock, batch, use_cache=False)
            assert handle.tally.evaluation.shared > 40

    def test_left_padding(self, pair):
        rows = [torch.cat([row[:30], row[-6:]]) for row in group(24, (12, 12, 12))]
        with packs_at_once(pair[1]) as handle:
            agree(*pair, padded([*rows, rows[0][:9]], "left", labels=True))
            assert handle.tally.training.shared == 48

    @in_both_forms
    def test_random_trees(self, form):
        # windows in every other layer
        stock, model = twins(build("gemma2", sliding_window=5).eval())

        @settings(max_examples=25, deadline=None)
        @given(
            st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=4), min_size=1, max_size=4),
            st.integers(0, 9),
            st.sampled_from([{}, {"max_length": 64}] if form == "packed" else [{}]),
        )
        def check(branches, seed, options):
            rows = []
            for number, rests in enumerate(branches):
                for row in group(18 + number, rests, seed + number):
                    rows += [row, row[: len(row) // 2 + 1]] if len(rows) % 3 == 0 else [row]
            before = handle.tally.training.shared
            agree(stock, model, FORMS[form]([*rows, rows[0]], **options))
            assert handle.tally.training.shared > before

        with packs_at_once(model) as handle:
            check()


class TestLeaks:
    """Controls: what would be wrong is seen."""

    def test_the_twin_and_the_auditor_see_that_too(self, pair, monkeypatch):
        """With the fault the twin gives something else, so every row is computed; audits have a
        mode for it."""
        stock, model = pair
        with autopack.enable(model) as handle:
            report = autopack.audit(model, modes=("default", "one beginning"), training=(False,))
            (tried,) = (result for result in report.results if result.mode == "one beginning")
            assert report.exact
            assert tried.influence is not None
            assert tried.gradient < GRADIENT
        for name in ("eager", "sdpa"):
            monkeypatch.setitem(
                BACKENDS,
                name,
                replace(
                    BACKENDS[name],
                    over_prefixes=lambda call, shared: by_stretches(call, shared) * 1.01,
                ),
            )
        with autopack.enable(model, verify=False):
            report = autopack.audit(model, modes=("default", "one beginning"), training=(False,))
            assert {result.mode for result in report.results if not report.is_exact(result)} == {
                "one beginning"
            }
        kept.forget()
        batch = padded(group())
        with autopack.enable(model) as handle, torch.no_grad():
            as_padded(model, stock, batch, use_cache=False)
            assert handle.tally.evaluation.shared == 0
            assert "its twin gives something else" in repr(handle)
        with autopack.enable(model, share=False):
            assert (
                "one beginning"
                in autopack.audit(model, modes=("default", "one beginning")).left_out
            )
