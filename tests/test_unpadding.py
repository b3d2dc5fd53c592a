"""Padded batches of an enabled model give what stock gives, in the shape that stock gives, without computing padding."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

import autopack
from autopack import positions, registry, tiny, unpadding
from autopack.entry import PoolerHook
from tests.padded import (
    FLOAT32,
    GRADIENT,
    LENGTHS,
    PADDING,
    batch,
    build,
    gradient_error,
    logit_error,
    loss_error,
    mask_of,
    twins,
    unpredicted,
)

pytestmark = pytest.mark.usefixtures("nothing_left_behind")
DECODERS = ["llama", "gemma2", "qwen3_moe", "gpt2", "opt"]
ENCODERS = ["bert", "roberta"]
CASES = [
    *((model_type, "causal LM") for model_type in DECODERS),
    *((model_type, "sequence classification") for model_type in [*DECODERS, *ENCODERS]),
    *((model_type, "token classification") for model_type in ["llama", "gemma2", "qwen3_moe", "gpt2", *ENCODERS]),
    *((model_type, "masked LM") for model_type in ENCODERS),
]
STEPS = 20


def _handle(model) -> autopack.Handle:
    return model.__dict__["_autopack_handle"]


def _tally(model) -> unpadding.Tally:
    return _handle(model).enabled.tally


@pytest.fixture
def pair(request):
    """A stock model and an enabled one with the same parameters."""
    stock, model = twins(build(*request.param))
    with autopack.enable(model):
        yield stock, model


llamas = pytest.mark.parametrize("pair", [("llama",)], indirect=True, ids=["llama"])


def _run(model, inputs, **options):
    outputs = model(**inputs, **options)
    outputs.loss.backward()
    return outputs


class TestAgreement:
    @pytest.mark.parametrize("side", ["right", "left"])
    @pytest.mark.parametrize("case", CASES, ids="-".join)
    def test_logits_loss_and_gradients(self, case, side):
        if case[0] in ENCODERS and case[1] == "sequence classification" and side == "left":
            pytest.skip("the head reads padding: see TestLeftAsItCame")
        stock, model = twins(build(*case))
        inputs = batch(case[1], mask_of(LENGTHS, side))
        with autopack.enable(model) as handle:
            expected, found = _run(stock, inputs), _run(model, inputs)
            assert found.logits.shape == expected.logits.shape
            assert logit_error(found.logits, expected.logits, inputs["attention_mask"]) < FLOAT32
            assert loss_error(found.loss, expected.loss) < FLOAT32
            assert gradient_error(model, stock) < GRADIENT
            tally = handle.enabled.tally
            assert (tally.batches, tally.tokens, tally.padding) == (1, sum(LENGTHS), 4 * 24 - sum(LENGTHS))

    @pytest.mark.parametrize("model_type", ["llama", "gpt2", "opt", "qwen3_moe", "bert", "roberta"])
    def test_holes_in_the_mask_are_padding(self, model_type):
        task = "masked LM" if model_type in ENCODERS else "causal LM"
        stock, model = twins(build(model_type, task))
        inputs = batch(task, mask_of((24, 5, 11, 1), "holes"))
        with autopack.enable(model):
            expected, found = _run(stock, inputs), _run(model, inputs)
            assert logit_error(found.logits, expected.logits, inputs["attention_mask"]) < FLOAT32
            assert loss_error(found.loss, expected.loss) < FLOAT32
            assert gradient_error(model, stock) < GRADIENT
            assert _tally(model).batches == 1

    @pytest.mark.parametrize("settings", [{}, {"accumulate": 2}, {"reentrant": False}, {"reentrant": True}], ids=str)
    @pytest.mark.parametrize(
        "case",
        [*((m, "causal LM") for m in DECODERS), ("bert", "sequence classification"), ("bert", "token classification"),
         ("llama", "sequence classification"), ("llama", "question answering"), ("bert", "question answering")],
        ids="-".join,
    )  # fmt: skip
    def test_twenty_optimizer_steps(self, case, settings):
        """Losses agree along the way. The learning rate moves them by several per cent without chaos."""
        stock, model = twins(build(*case))
        accumulate = settings.get("accumulate", 1)
        losses = []
        for which in (stock, model):
            if "reentrant" in settings:
                which.gradient_checkpointing_enable({"use_reentrant": settings["reentrant"]})
            if which is model:
                autopack.enable(model)
            optimizer = torch.optim.SGD(which.parameters(), lr=1e-3)
            found = []
            for step in range(STEPS):
                side = "left" if step % 3 == 2 else "right"
                lengths = [2 + (7 * step + 5 * row) % 23 for row in range(1 + step % 5)]
                inputs = batch(case[1], mask_of(lengths, side), seed=step)
                loss = which(**inputs).loss
                (loss / accumulate).backward()
                if (step + 1) % accumulate == 0:
                    torch.nn.utils.clip_grad_norm_(which.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                found.append(loss)
            losses.append(found)
        assert max(loss_error(f, e) for e, f in zip(*losses, strict=True)) < FLOAT32
        autopack.disable(model)

    @llamas
    @pytest.mark.parametrize("rows", [1, 2, 8, 32])
    def test_any_number_of_rows(self, pair, rows):
        stock, model = pair
        lengths = [2 + (5 * row) % 23 for row in range(rows)]
        inputs = batch("causal LM", mask_of(lengths, columns=24))
        expected, found = _run(stock, inputs), _run(model, inputs)
        assert logit_error(found.logits, expected.logits, inputs["attention_mask"]) < FLOAT32
        assert gradient_error(model, stock) < GRADIENT

    @settings(max_examples=40)
    @given(data=st.data(), side=st.sampled_from(["right", "left", "holes"]))
    def test_any_shape(self, data, side):
        columns = data.draw(st.integers(2, 30))
        lengths = data.draw(st.lists(st.integers(1, columns), min_size=1, max_size=9))
        stock = build("llama")
        mask = mask_of(lengths, side, columns)
        inputs = batch("causal LM", mask)
        stock_logits = stock(**inputs).logits
        with autopack.enable(stock):
            found = stock(**inputs).logits
        assert logit_error(found, stock_logits, mask) < FLOAT32
        assert not found[mask == 0].any() or mask.all()

    @llamas
    def test_two_forwards_before_one_backward(self, pair):
        """As DPO does, here with gradient checkpointing, which must give each its own layout."""
        stock, model = pair
        first, second = (batch("causal LM", mask_of(n), seed=n[0]) for n in ((9, 4, 7), (3, 12)))
        for which in pair:
            which.gradient_checkpointing_enable({"use_reentrant": False})
            (which(**first).loss - 0.5 * which(**second).loss).backward()
        assert gradient_error(model, stock) < GRADIENT

    @llamas
    def test_embeddings_and_explicit_positions(self, pair):
        stock, model = pair
        inputs = batch("causal LM", mask_of(LENGTHS, "left"))
        mask = inputs["attention_mask"]
        inputs["position_ids"] = (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)
        embedded = []
        for which in pair:
            ids = inputs["input_ids"]
            embedded.append(which.get_input_embeddings()(ids).detach().requires_grad_())
            call = {k: v for k, v in inputs.items() if k != "input_ids"}
            _run(which, call, inputs_embeds=embedded[-1])
        real = mask.bool()
        expected, found = (e.grad[real] for e in embedded)
        assert _tally(model).batches == 1
        assert ((found - expected).abs().max() / expected.abs().max()).item() < GRADIENT

    @llamas
    def test_loss_over_a_number_of_items(self, pair):
        """Trainer counts the targets of an accumulated batch before the entry."""
        inputs = batch("causal LM", mask_of(LENGTHS))
        expected, found = (_run(which, inputs, num_items_in_batch=torch.tensor(57)) for which in pair)
        assert loss_error(found.loss, expected.loss) < FLOAT32

    def test_router_loss_of_a_mixture_counts_real_tokens(self):
        stock, model = twins(build("qwen3_moe"))
        inputs = batch("causal LM", mask_of(LENGTHS))
        with autopack.enable(model):
            expected, found = (_run(which, inputs, output_router_logits=True) for which in (stock, model))
            assert loss_error(found.aux_loss, expected.aux_loss) < FLOAT32
            real = inputs["attention_mask"].bool().reshape(-1)
            for ours, theirs in zip(found.router_logits, expected.router_logits, strict=True):
                assert ours.shape == theirs.shape
                assert (ours[real] - theirs[real]).abs().max() < FLOAT32

    @pytest.mark.parametrize("implementation", ["eager", "sdpa"])
    def test_compiled(self, implementation):
        stock, model = twins(build("llama", attn_implementation=implementation, num_hidden_layers=1))
        compiled = torch.compile(model, backend="aot_eager")
        with autopack.enable(model):
            for lengths in ((9, 4, 7), (3, 12), (8, 8, 2, 1)):
                inputs = batch("causal LM", mask_of(lengths, columns=12))
                expected, found = _run(stock, inputs), _run(compiled, inputs)
                assert logit_error(found.logits, expected.logits, inputs["attention_mask"]) < FLOAT32
            assert gradient_error(model, stock) < GRADIENT
            assert _tally(model).batches == 3


def _types() -> list[str]:
    served = frozenset().union(*(family.model_types for family in registry.families()))
    return sorted(served & set(tiny.causal_lm_types()))


class TestEveryType:
    @pytest.mark.parametrize("side", ["right", "left", "holes"])
    @pytest.mark.parametrize("model_type", _types())
    def test_logits_and_loss(self, model_type, side):
        """Left out, and so equal by themselves, are only those whose positions or windows count the padding."""
        try:
            model = tiny.build(model_type, attn_implementation="sdpa")
        except tiny.CannotBuild:
            model = tiny.build(model_type)
        mask = mask_of(LENGTHS, side)
        inputs = batch("causal LM", mask)
        with torch.no_grad():
            expected = model(**inputs, use_cache=False)
            with autopack.enable(model) as handle:
                found = model(**inputs, use_cache=False)
                assert logit_error(found.logits, expected.logits, mask) < FLOAT32
                assert loss_error(found.loss, expected.loss) < FLOAT32
                tally = handle.enabled.tally
        if side == "right":
            assert (tally.batches, tally.left) == (1, {})
        elif not tally.batches:
            (reason,) = tally.left
            assert ("windows count it" in reason and side == "holes") or "counts" in reason


class TestNegativeControls:
    """What each precaution is for: without it, the run differs."""

    def test_a_pooler_that_reads_the_packed_row(self, monkeypatch):
        monkeypatch.setattr(PoolerHook, "__call__", lambda self, module, args: None)
        stock, model = twins(build("bert", "sequence classification"))
        inputs = batch("sequence classification", mask_of(LENGTHS))
        with autopack.enable(model), pytest.raises(Exception, match=r"batch_size|shape"):
            model(**inputs)

    def test_columns_as_positions_of_a_model_that_counts_along_the_mask(self, monkeypatch):
        monkeypatch.setattr(positions, "_FROM_MASK", set())
        monkeypatch.setattr("autopack.unpadding.positions.known_in_padded_batch", lambda *_: True)
        stock, model = twins(build("opt"))
        inputs = batch("causal LM", mask_of(LENGTHS, "left"))
        with autopack.enable(model) as handle:
            handle.enabled.knows_padded_positions = True
            assert logit_error(model(**inputs).logits, stock(**inputs).logits, inputs["attention_mask"]) > 0.1

    def test_labels_of_first_tokens(self):
        """Stock's loss predicts the first token of a left-padded row from padding; that term is left out."""
        stock, model = twins(build("gpt2"))
        inputs = batch("causal LM", mask_of(LENGTHS, "left"))
        mask, ids = inputs["attention_mask"], inputs["input_ids"]
        unmasked = {**inputs, "labels": ids.masked_fill(mask == 0, -100)}
        with autopack.enable(model):
            assert loss_error(model(**unmasked).loss, stock(**inputs).loss) < FLOAT32
            assert loss_error(model(**unmasked).loss, stock(**unmasked).loss) > 10 * FLOAT32


class TestLeftAsItCame:
    def _unchanged(self, stock, model, inputs, reason, **options):
        """The call gives bit for bit what stock gives, and the handle says why."""
        expected, found = stock(**inputs, **options), model(**inputs, **options)
        assert torch.equal(found[0], expected[0])
        assert reason in repr(_handle(model)), repr(_handle(model))
        assert _tally(model).batches == 0
        return found

    @llamas
    def test_where_a_cache_is_wanted(self, pair):
        inputs = batch("causal LM", mask_of(LENGTHS))
        found = self._unchanged(*pair, inputs, "a cache is wanted", use_cache=True)
        assert found.past_key_values.get_seq_length() == 24

    @llamas
    def test_where_a_cache_is_filled(self, pair):
        stock, model = pair
        mask = mask_of(LENGTHS, "left")
        ids = batch("causal LM", mask)["input_ids"]
        with torch.no_grad():
            caches = []
            for which in pair:
                cache = DynamicCache(config=which.config)
                which(input_ids=ids[:, :12], attention_mask=mask[:, :12], past_key_values=cache, use_cache=True)
                call = {"input_ids": ids[:, 12:], "attention_mask": mask, "past_key_values": cache}
                caches.append(which(**call, use_cache=True).logits)
        assert torch.equal(*caches)
        assert _tally(model).batches == 0

    @llamas
    def test_in_evaluation_without_labels(self, pair):
        stock, model = (which.eval() for which in pair)
        inputs = batch("causal LM", mask_of(LENGTHS))
        labels = inputs.pop("labels")
        found = self._unchanged(stock, model, inputs, "may want the cache")
        assert found.past_key_values is not None
        model(**inputs, use_cache=False)
        model(**inputs, labels=labels)
        assert _tally(model).batches == 2

    def test_in_evaluation_without_labels_always_unpads(self):
        stock, model = twins(build("llama").eval())
        inputs = batch("causal LM", mask_of(LENGTHS))
        inputs.pop("labels")
        with autopack.enable(model, unpad="always"):
            assert logit_error(model(**inputs).logits, stock(**inputs).logits, inputs["attention_mask"]) < FLOAT32
            assert _tally(model).batches == 1

    @pytest.mark.parametrize("pair", [("bert", "sequence classification")], indirect=True)
    def test_an_encoder_has_no_cache_to_want(self, pair):
        stock, model = (which.eval() for which in pair)
        inputs = batch("sequence classification", mask_of(LENGTHS))
        inputs.pop("labels")
        assert logit_error(model(**inputs).logits, stock(**inputs).logits, inputs["attention_mask"]) < FLOAT32
        assert _tally(model).batches == 1

    @pytest.mark.parametrize("pair", [("llama", "causal LM", "eager")], indirect=True)
    def test_where_attention_weights_are_wanted(self, pair):
        stock, model = pair
        inputs = batch("causal LM", mask_of(LENGTHS))
        found = self._unchanged(*pair, inputs, "attention weights are wanted", output_attentions=True)
        assert found.attentions[0].shape[-2:] == (24, 24)

    @llamas
    def test_where_padding_is_labelled(self, pair):
        """Labels that are a copy of the tokens: stock learns to predict padding, so padding has to be computed."""
        inputs = batch("causal LM", mask_of(LENGTHS))
        inputs["labels"] = inputs["input_ids"].clone()
        self._unchanged(*pair, inputs, "padding is labelled")

    def test_labelled_padding_is_dropped_where_that_is_asked_for(self):
        stock, model = twins(build("llama"))
        inputs = batch("causal LM", mask_of(LENGTHS))
        expected = stock(**inputs).loss
        inputs["labels"] = inputs["input_ids"].clone()
        with autopack.enable(model, unpad="always"):
            assert loss_error(model(**inputs).loss, expected) < FLOAT32

    @pytest.mark.parametrize("pair", [("bert", "question answering"), ("llama", "question answering")], indirect=True)
    def test_question_answering_which_compares_padding_too(self, pair):
        inputs = batch("question answering", mask_of(LENGTHS))
        self._unchanged(*pair, inputs, "compares all columns")

    @pytest.mark.parametrize("model_type", ["bert", "llama"])
    def test_logits_of_question_answering_can_be_unpadded(self, model_type):
        stock, model = twins(build(model_type, "question answering"))
        inputs = batch("question answering", mask_of(LENGTHS))
        with autopack.enable(model, unpad="always"):
            expected, found = stock(**inputs), model(**inputs)
            for name in ("start_logits", "end_logits"):
                assert logit_error(found[name], expected[name], inputs["attention_mask"]) < FLOAT32
            assert _tally(model).batches == 1

    @pytest.mark.parametrize("pair", [(m, "sequence classification") for m in ENCODERS], indirect=True)
    def test_left_padding_where_the_head_reads_the_first_column(self, pair):
        self._unchanged(*pair, batch("sequence classification", mask_of(LENGTHS, "left")), "the head reads is padding")

    def test_right_padding_where_the_head_reads_the_last_column(self):
        """Without a padding token, a decoder's head takes the last column."""
        stock, model = twins(build("llama", "sequence classification"))
        stock.config.pad_token_id = model.config.pad_token_id = None
        with autopack.enable(model):
            inputs = batch("sequence classification", mask_of((5,), columns=9))
            self._unchanged(stock, model, inputs, "the head reads is padding")

    @pytest.mark.parametrize("pair", [("llama", "sequence classification")], indirect=True)
    def test_padding_that_the_head_takes_for_a_token(self, pair):
        inputs = batch("sequence classification", mask_of(LENGTHS))
        inputs["input_ids"] = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, 7)
        self._unchanged(*pair, inputs, "the head reads is padding")

    @llamas
    def test_a_row_of_padding_alone(self, pair):
        mask = mask_of((5, 3, 4))
        mask[1] = 0
        inputs = batch("causal LM", mask)
        self._unchanged(*pair, inputs, "nothing but padding")

    @pytest.mark.parametrize("pair", [("mistral",)], indirect=True)
    def test_holes_that_windows_count(self, pair):
        self._unchanged(*pair, batch("causal LM", mask_of(LENGTHS, "holes")), "windows count it")

    @llamas
    def test_a_batch_without_padding(self, pair):
        stock, model = pair
        inputs = batch("causal LM", torch.ones(3, 8, dtype=torch.long))
        assert torch.equal(model(**inputs).logits, stock(**inputs).logits)
        assert str(_tally(model)) == "no padded batch yet"

    def test_where_that_is_asked_for(self):
        stock, model = twins(build("llama"))
        inputs = batch("causal LM", mask_of(LENGTHS))
        with autopack.enable(model, unpad="never") as handle:
            assert torch.equal(model(**inputs).logits, stock(**inputs).logits)
            assert "unpad='never'" in repr(handle)

    @llamas
    @pytest.mark.parametrize("use_cache", [True, False])
    def test_generation(self, pair, use_cache):
        stock, model = (which.eval() for which in pair)
        mask = mask_of((8, 4, 7), "left")
        inputs = batch("causal LM", mask)
        inputs.pop("labels")
        options = {"max_new_tokens": 4, "do_sample": False, "use_cache": use_cache, "eos_token_id": None}
        assert torch.equal(model.generate(**inputs, **options), stock.generate(**inputs, **options))
        assert _tally(model).batches == 0

    @llamas
    def test_other_models_are_not_touched(self, pair):
        stock, _ = pair
        inputs = batch("causal LM", mask_of(LENGTHS))
        before = copy.deepcopy(stock)(**inputs).logits
        assert torch.equal(stock(**inputs).logits, before)


class TestFurtherIn:
    """What the top cannot unpad, its backbone may."""

    @llamas
    def test_last_logits(self, pair):
        stock, model = pair
        inputs = batch("causal LM", mask_of(LENGTHS, "left"))
        inputs.pop("labels")
        expected, found = (which(**inputs, logits_to_keep=3).logits for which in pair)
        assert found.shape == (4, 3, stock.config.vocab_size)
        assert logit_error(found[:, -1], expected[:, -1], inputs["attention_mask"]) < FLOAT32
        assert _tally(model).batches == 1

    @llamas
    def test_a_forward_that_other_code_has_put_there(self, pair):
        """It may return what has no place in the batch; here, log-probabilities of all tokens but the first."""
        stock, model = pair
        inputs = batch("causal LM", mask_of(LENGTHS))
        labels = inputs["labels"][:, 1:].clamp(min=0)
        found = []
        for which in pair:

            def forward(*args, which=which, shifted=None, **kwargs):
                hidden = which.model(*args, **kwargs).last_hidden_state[:, :-1]
                return which.lm_head(hidden).log_softmax(-1).gather(2, shifted[..., None])[..., 0]

            which.forward = forward
            call = {name: inputs[name] for name in ("input_ids", "attention_mask")}
            found.append(which(**call, shifted=labels))
            found[-1].masked_fill(unpredicted(inputs["attention_mask"])[:, 1:], 0).sum().backward()
            del which.forward
        expected, found = found
        assert found.shape == expected.shape == (4, 23)
        assert _tally(model).batches == 1
        assert gradient_error(model, stock) < GRADIENT

    @llamas
    def test_the_backbone_called_by_itself(self, pair):
        stock, model = pair
        mask = mask_of(LENGTHS)
        ids = batch("causal LM", mask)["input_ids"]
        expected, found = (which.model(input_ids=ids, attention_mask=mask)[0] for which in pair)
        assert logit_error(found, expected, mask) < FLOAT32
        assert _tally(model).batches == 1

    def test_a_backbone_with_a_pooler(self):
        stock, model = twins(build("bert", "backbone"))
        mask = mask_of(LENGTHS)
        ids = batch("masked LM", mask)["input_ids"]
        with autopack.enable(model):
            for options in ({}, {"return_dict": False}):
                expected, found = (which(input_ids=ids, attention_mask=mask, **options) for which in (stock, model))
                assert logit_error(found[0], expected[0], mask) < FLOAT32
                assert found[1].shape == expected[1].shape
                assert (found[1] - expected[1]).abs().max() < FLOAT32
            assert _tally(model).batches == 2


def test_a_second_enable_may_not_ask_for_something_else():
    model = build("llama")
    with autopack.enable(model, unpad="never"):
        assert autopack.enable(model) is _handle(model)
        with pytest.raises(ValueError, match="enabled with unpad='never'"):
            autopack.enable(model, unpad="always")
    with pytest.raises(ValueError, match="unpad must be one of auto, always, never; found 'yes'"):
        autopack.enable(model, unpad="yes")


def test_a_mask_of_any_dtype():
    stock, model = twins(build("llama"))
    inputs = batch("causal LM", mask_of(LENGTHS))
    expected = stock(**inputs).loss
    with autopack.enable(model):
        for dtype in (torch.bool, torch.int32, torch.float32):
            given_mask = inputs["attention_mask"].to(dtype)
            assert loss_error(model(**{**inputs, "attention_mask": given_mask}).loss, expected) < FLOAT32
        assert _tally(model).batches == 3


def test_padding_token_is_set():
    assert PADDING == build("llama").config.pad_token_id
