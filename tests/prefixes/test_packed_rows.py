"""Documents of packed rows that begin alike get what each gets alone, where their beginning is computed once."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaForCausalLM, LlamaModel
from transformers.utils import ModelOutput

import autopack
from autopack import PackingCollator, tiny
from autopack.attention import prefixes
from autopack.layout.prefixes import Prefixes
from compat.exactness import built, stand_in
from compat.standins import taken_for_kernels
from tests.support.padded import FLOAT32, GRADIENT, build, loss_error, model_gradient_error, twins
from tests.support.prefixes import group, tree

pytestmark = pytest.mark.usefixtures("nothing_left_behind")
TYPES = ["llama", "gemma2", "gpt2", "opt", "mixtral", "gemma3_text", "falcon", "bamba", "qwen3_next"]
EAGER = {"gemma2"}


def packed(documents, **options):
    """Packed rows of these documents, as the collator makes them."""
    return dict(PackingCollator(**options)([{"input_ids": document} for document in documents]))


def _parts(batch):
    """Where each document lies, row by row: its row, and its first and end column."""
    positions, real = batch["position_ids"], batch.get("attention_mask", torch.ones_like(batch["input_ids"]))
    for row in range(len(positions)):
        columns = np.flatnonzero(real[row])
        starts = [c for c in columns if positions[row, c] == 0]
        for first, end in zip(starts, [*starts[1:], columns[-1] + 1], strict=True):
            yield row, int(first), int(end)


def agree(stock, model, batch, labels=True, **options):
    """Logits, loss and gradients of a packed call against those of each document alone in stock."""
    given = {name: value for name, value in batch.items() if labels or name != "labels"}
    model.zero_grad()
    output = model(**given, use_cache=False, **options)
    targets = batch["labels"]
    loss = output.loss if labels else _loss(output.logits, targets)
    loss.backward()
    stock.zero_grad()
    wanted, count = 0.0, int((targets != -100).sum())
    for row, first, end in _parts(batch):
        ids = batch["input_ids"][row : row + 1, first:end]
        alone = stock(input_ids=ids, use_cache=False).logits
        error = float((output.logits[row, first:end] - alone[0]).detach().abs().max() / alone.detach().abs().max())
        assert error < FLOAT32
        wanted = wanted + _loss(alone, targets[row : row + 1, first:end]) * int((targets[row, first:end] != -100).sum())
    (wanted / count).backward()
    assert loss_error(loss, wanted / count) < FLOAT32
    assert model_gradient_error(model, stock) < GRADIENT
    return output


def _loss(logits, labels):
    if not (labels[:, 1:] != -100).any():
        return logits.sum() * 0.0
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


class TestAgreement:
    @pytest.mark.parametrize("labels", [True, False], ids=["labels", "loss of logits"])
    @pytest.mark.parametrize("model_type", TYPES)
    def test_one_row(self, model_type, labels):
        stock, model = twins(build(model_type, attn_implementation="eager" if model_type in EAGER else "sdpa").eval())
        with autopack.enable(model) as handle:
            agree(stock, model, packed(tree()), labels)
            assert handle.tally.training.shared > 40
            assert handle.tally.training.tokens == sum(map(len, tree()))

    @pytest.mark.parametrize("labels", [True, False], ids=["labels", "loss of logits"])
    def test_several_rows_with_padding(self, labels):
        stock, model = twins(build("llama").eval())
        batch = packed(tree(), max_length=100)
        assert batch["attention_mask"].shape[0] > 1
        with autopack.enable(model) as handle:
            agree(stock, model, batch, labels)
            assert handle.tally.training.shared > 40

    @pytest.mark.parametrize("backend", ["eager", "sdpa", "flash", "flex"])
    def test_every_backend(self, backend):
        """Kernels of flash and flex need a GPU: these are stand-ins of their signatures, and no twin proves them."""
        with stand_in(backend):
            model = built("llama", backend).eval()
            stock = built("llama", "sdpa").eval()
            stock.load_state_dict(model.state_dict())
            with autopack.enable(model, verify=False) as handle:
                taken_for_kernels(handle)
                agree(stock, model, packed(tree()))
                assert handle.tally.training.shared > 40

    @pytest.mark.parametrize("how", ["cu_seq_lens", "seq_idx"])
    def test_documents_declared_in_other_ways(self, how):
        stock, model = twins(build("llama").eval())
        with autopack.enable(model) as handle:
            agree(stock, model, packed(tree(), declare=("attention_mask", how)))
            assert handle.tally.training.shared > 40

    def test_no_positions(self):
        stock, model = twins(build("llama").eval())
        batch = packed(tree(), declare=("attention_mask", "seq_idx"))
        given = {name: batch[name] for name in ("input_ids", "seq_idx")}
        with autopack.enable(model) as handle, torch.no_grad():
            found = model(**given, use_cache=False).logits
            for row, first, end in _parts(batch):
                alone = stock(input_ids=batch["input_ids"][row : row + 1, first:end]).logits
                assert torch.allclose(found[row, first:end], alone[0], atol=1e-5)
            assert handle.tally.evaluation.shared > 40

    @pytest.mark.parametrize("kept", [1, 7])
    def test_last_logits(self, kept):
        stock, model = twins(build("llama").eval())
        batch = packed(group(32, (11, 11, 11)))
        given = {name: batch[name] for name in ("input_ids", "position_ids")}
        with autopack.enable(model) as handle, torch.no_grad():
            found = model(**given, use_cache=False, logits_to_keep=kept).logits
            alone = stock(input_ids=batch["input_ids"][:, -43:], logits_to_keep=kept).logits
            assert torch.allclose(found, alone, atol=1e-5)
            assert handle.tally.evaluation.shared == 64

    def test_hidden_states_and_the_backbone_alone(self):
        stock, model = twins(build("llama").eval())
        batch = packed(tree(), max_length=100)
        given = {name: batch[name] for name in ("input_ids", "position_ids", "attention_mask")}
        with autopack.enable(model) as handle, torch.no_grad():
            found = model(**given, use_cache=False, output_hidden_states=True).hidden_states
            for row, first, end in _parts(batch):
                alone = stock(input_ids=batch["input_ids"][row : row + 1, first:end], output_hidden_states=True)
                for one, other in zip(found, alone.hidden_states, strict=True):
                    assert torch.allclose(one[row, first:end], other[0], atol=1e-5)
            assert handle.tally.evaluation.shared > 40
        with autopack.enable(model.model) as handle, torch.no_grad():
            last = model.model(**given, use_cache=False)
            assert torch.allclose(last.last_hidden_state, found[-1], atol=1e-5)
            assert isinstance(model.model(**given, use_cache=False, return_dict=False), tuple)
            assert handle.tally.evaluation.shared > 80

    def test_random_groups(self):
        stock, model = twins(build("gemma2", sliding_window=5).eval())  # windows in every other layer

        @settings(max_examples=15, deadline=None)
        @given(
            st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=4), min_size=1, max_size=3),
            st.integers(0, 9),
            st.sampled_from([None, 64]),
        )
        def check(branches, seed, max_length):
            documents = []
            for number, rests in enumerate(branches):
                documents += group(18 + number, rests, seed + number)
            before = handle.tally.training.shared
            agree(stock, model, packed([*documents, documents[0]], max_length=max_length))
            assert handle.tally.training.shared > before

        with autopack.enable(model) as handle:
            check()


@dataclass
class _Scored(ModelOutput):
    logits: torch.Tensor | None = None
    scores: torch.Tensor | None = None


class _Scoring(LlamaForCausalLM):
    """Adds scores that the last token of each row gives."""

    def __init__(self, config):
        super().__init__(config)
        self.score = torch.nn.Linear(config.hidden_size, 3)

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **{**kwargs, "output_hidden_states": True, "return_dict": True})
        return _Scored(output.logits, self.score(output.hidden_states[-1][:, -1]))


class _ScoringBackbone(LlamaModel):
    """The same of a model without a head."""

    def __init__(self, config):
        super().__init__(config)
        self.score = torch.nn.Linear(config.hidden_size, 3)

    def forward(self, *args, **kwargs):
        states = super().forward(*args, **{**kwargs, "return_dict": True}).last_hidden_state
        return _Scored(states, self.score(states[:, -1]))


class TestWhen:
    def test_never_and_too_little(self):
        model = build("llama").eval()
        for share, documents in ((False, tree()), (True, group(12, (30, 22, 41))), (True, group(16, (99, 150)))):
            with autopack.enable(model, share=share) as handle, torch.no_grad():
                model(**packed(documents), use_cache=False)
                assert handle.tally.evaluation.shared == 0

    def test_equal_tokens_at_other_positions(self):
        """A document of which a part was cut off goes on with its positions (`keep_positions`)."""
        stock, model = twins(build("llama").eval())
        one, other = group(32, (6, 6))
        batch = packed([one, other])
        batch["position_ids"][0, 38:] += 3
        with autopack.enable(model) as handle, torch.no_grad():
            given = {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"]}
            lengths = torch.tensor([0, 38, 76], dtype=torch.int32)
            found = model(**given, cu_seq_lens_q=lengths, cu_seq_lens_k=lengths, use_cache=False).logits
            alone = stock(input_ids=other[None], position_ids=batch["position_ids"][:, 38:]).logits
            assert torch.allclose(found[0, 38:], alone[0], atol=1e-5)
            assert handle.tally.evaluation.shared == 0

    def test_rows_of_fixed_shape(self):
        """Whoever compiles for one number of documents gets rows of that shape."""
        model = build("llama").eval()
        batch = packed(group(), max_length=256, rows=1, max_documents=8, declare=("attention_mask", "cu_seq_lens"))
        with autopack.enable(model) as handle, torch.no_grad():
            model(**batch, use_cache=False)
            assert handle.tally.evaluation.shared == 0

    @pytest.mark.parametrize("kind", [_Scoring, _ScoringBackbone])
    def test_what_a_forward_makes_of_each_row(self, kind):
        """A forward of somebody's own that scores the last token: documents get theirs, and it is remembered."""
        stock, model = twins(kind(build("llama").config).eval())
        documents = group(32, (5, 11, 8))
        batch = packed(documents)
        given = {name: batch[name] for name in ("input_ids", "position_ids")}
        with autopack.enable(model) as handle, torch.no_grad():
            for _ in range(2):
                found = model(**given, use_cache=False)
                alone = torch.cat([stock(input_ids=document[None]).scores for document in documents])
                assert torch.allclose(found.scores, alone, atol=1e-5)
                assert found.logits.shape[:2] == batch["input_ids"].shape
            assert handle.tally.evaluation.tokens == 2 * sum(map(len, documents))

    @pytest.mark.parametrize("rows", ["packed", "of one length"])
    def test_who_looks_into_layers_sees_every_document(self, rows):
        """A probe of activations by column: it would get those of a row of other columns."""
        model = build("llama").eval()
        batch = packed(group(32, (6, 6, 6)))
        if rows != "packed":
            batch = {"input_ids": batch["input_ids"].reshape(3, 38)}
        seen = []
        with autopack.enable(model) as handle, torch.no_grad():
            model(**batch, use_cache=False)
            assert handle.tally.evaluation.shared == 64
            hook = model.model.layers[0].register_forward_hook(lambda *given: seen.append(given[-1]))
            model(**batch, use_cache=False)
            hook.remove()
            assert handle.tally.evaluation.shared == 64
            states = seen[-1][0] if isinstance(seen[-1], tuple) else seen[-1]
            assert states.shape[:2] == batch["input_ids"].shape
            assert any("a hook looks into its layers" in reason for reason in handle.tally.apart)

    def test_explained_and_counted(self):
        model = build("llama").eval()
        batch = packed(tree(), max_length=100)
        with autopack.enable(model) as handle:
            said = str(handle.explain(**batch))
            assert "of them computed with those of another row" in said
            with torch.no_grad():
                model(**batch, use_cache=False)
            volume = handle.tally.evaluation
            assert volume.columns + volume.shared == volume.tokens == sum(map(len, tree()))
            assert volume.documents == len(tree())
            assert volume.skipped == batch["input_ids"].numel() - volume.tokens

    def test_checkpointing_and_a_compiled_model(self):
        stock, model = twins(build("llama").train())
        model.gradient_checkpointing_enable()
        with autopack.enable(model) as handle:
            agree(stock, model, packed(tree()))
            compiled = torch.compile(model, backend="eager")
            before = handle.tally.training.shared
            agree(stock, compiled, packed(tree(1), max_length=100))
            assert handle.tally.training.shared > before


class TestLeaks:
    def test_nothing_else_moves_with_a_rest(self):
        model = build("llama").eval()
        documents = group()
        changed = [*documents]
        changed[1] = torch.cat([documents[1][:32], tiny.tokens(None, 1, 11, seed=5)[0]])
        with autopack.enable(model) as handle, torch.no_grad():
            one, other = (model(**packed(each), use_cache=False).logits[0] for each in (documents, changed))
            assert handle.tally.evaluation.shared == 2 * 96
        first, end = 37, 37 + 43
        assert torch.equal(one[:first], other[:first])
        assert torch.equal(one[end:], other[end:])
        assert not torch.equal(one[first + 32 : end], other[first + 32 : end])

    def test_a_rest_that_sees_another_one_is_apart(self, monkeypatch):
        """The fault: each of three rests of one length sees the next one in its own place."""
        monkeypatch.setattr(Prefixes, "chains", property(lambda self: ((0,), (0, 2), (0, 3), (0, 1))))
        model = build("llama").eval()
        stock = copy.deepcopy(model)
        documents = group(32, (6, 6, 6))
        with autopack.enable(model, verify=False) as handle, torch.no_grad():
            handle.enabled.said_by_twins["prefixes",] = None
            found = model(**packed(documents), use_cache=False).logits[0, 38:76]
            alone = stock(input_ids=documents[1][None]).logits[0]
            assert float((found - alone).abs().max() / alone.abs().max()) > 100 * FLOAT32

    def test_the_auditor_tries_it(self, monkeypatch):
        """Documents that begin alike are a mode of its own: against each alone, and with one of them replaced."""
        model = build("llama").eval()
        with autopack.enable(model) as handle:
            report = autopack.audit(model, modes=("default", "one beginning"), training=(False,))
            tried = {result.mode: result for result in report.results}
            assert report.exact
            assert tried["one beginning"].influence is not None
            assert tried["one beginning"].gradient < GRADIENT
            handle.remove()
        by_stretches = prefixes.by_stretches
        monkeypatch.setattr(prefixes, "by_stretches", lambda call, shared: by_stretches(call, shared) * 1.01)
        with autopack.enable(model, verify=False):
            report = autopack.audit(model, modes=("default", "one beginning"), training=(False,))
            assert {result.mode for result in report.results if not report.is_exact(result)} == {"one beginning"}
        with autopack.enable(model, share=False):
            assert "one beginning" in autopack.audit(model, modes=("default", "one beginning")).left_out
