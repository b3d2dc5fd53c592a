"""Which padded batches are unpadded, at which entry, and which are left bit for bit as they came."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import BigBirdModel, DynamicCache

import autopack
from autopack import tiny
from tests.support.padded import (
    FLOAT32,
    GRADIENT,
    PADDED,
    batch,
    build,
    handle_of,
    logit_error,
    loss_error,
    mask_of,
    model_gradient_error,
    packs_at_once,
    tally_of,
    twins,
    unpredicted,
)

pytestmark = pytest.mark.usefixtures("nothing_left_behind")
llamas = pytest.mark.parametrize("pair", [("llama",)], indirect=True, ids=["llama"])


class TestLeftAsItCame:
    def _unchanged(self, stock, model, inputs, reason, **options):
        """The call gives bit for bit what stock gives, and the handle says why."""
        expected, found = stock(**inputs, **options), model(**inputs, **options)
        assert torch.equal(found[0], expected[0])
        assert reason in repr(handle_of(model)), repr(handle_of(model))
        assert tally_of(model).batches == 0
        return found

    @llamas
    def test_where_a_cache_is_wanted(self, pair):
        inputs = batch("causal LM", mask_of(PADDED))
        found = self._unchanged(*pair, inputs, "a cache is wanted", use_cache=True)
        assert found.past_key_values.get_seq_length() == 24

    @llamas
    def test_where_a_cache_is_filled(self, pair):
        model = pair[1]
        mask = mask_of(PADDED, "left")
        ids = batch("causal LM", mask)["input_ids"]
        with torch.no_grad():
            caches = []
            for which in pair:
                cache = DynamicCache(config=which.config)
                which(input_ids=ids[:, :12], attention_mask=mask[:, :12], past_key_values=cache, use_cache=True)
                call = {"input_ids": ids[:, 12:], "attention_mask": mask, "past_key_values": cache}
                caches.append(which(**call, use_cache=True).logits)
        assert torch.equal(*caches)
        assert tally_of(model).batches == 0

    @llamas
    @torch.no_grad()
    def test_in_evaluation_without_labels(self, pair):
        stock, model = (which.eval() for which in pair)
        inputs = batch("causal LM", mask_of(PADDED))
        labels = inputs.pop("labels")
        found = self._unchanged(stock, model, inputs, "may want the cache")
        assert found.past_key_values is not None
        model(**inputs, use_cache=False)
        model(**inputs, labels=labels)
        assert tally_of(model).batches == 2

    @pytest.mark.parametrize("pair", [("bert", "sequence classification")], indirect=True)
    @torch.no_grad()
    def test_an_encoder_has_no_cache_to_want(self, pair):
        stock, model = (which.eval() for which in pair)
        inputs = batch("sequence classification", mask_of(PADDED))
        inputs.pop("labels")
        assert logit_error(model(**inputs).logits, stock(**inputs).logits, inputs["attention_mask"]) < FLOAT32
        assert tally_of(model).batches == 1

    @pytest.mark.parametrize("when", ["before", "after"])
    def test_where_layers_take_some_tokens_at_a_time(self, when):
        """Stock asks of the columns of a batch that they are a multiple, and the tokens of a batch may be none."""
        stock, model = twins(build("bert"))
        inputs = batch("masked LM", mask_of(PADDED))  # 24 columns, 41 tokens
        for which, size in ((stock, 4), (model, 4 if when == "before" else 0)):
            for layer in which.bert.encoder.layer:
                layer.chunk_size_feed_forward = size
        with autopack.enable(model, verify=False) as handle:
            for layer in model.bert.encoder.layer:
                layer.chunk_size_feed_forward = 4
            found, expected = (which(**inputs).loss for which in (model, stock))
            assert torch.equal(found, expected)
            assert list(handle.tally.left) == ["its layers take 4 tokens at a time, and its 41 are no multiple of that"]

    @pytest.mark.parametrize("pair", [("llama", "causal LM", "eager")], indirect=True)
    def test_where_attention_weights_are_wanted(self, pair):
        inputs = batch("causal LM", mask_of(PADDED))
        found = self._unchanged(*pair, inputs, "attention weights are wanted", output_attentions=True)
        assert found.attentions[0].shape[-2:] == (24, 24)

    @llamas
    def test_where_padding_is_labelled(self, pair):
        """Labels that are a copy of the tokens: stock learns to predict padding, so padding has to be computed."""
        inputs = batch("causal LM", mask_of(PADDED))
        inputs["labels"] = inputs["input_ids"].clone()
        self._unchanged(*pair, inputs, "padding is labelled")

    @pytest.mark.parametrize(
        "pair",
        [(m, "question answering") for m in ("bert", "llama", "qwen3_moe", "gpt2", "opt")],
        indirect=True,
    )
    def test_question_answering_which_compares_padding_too(self, pair):
        inputs = batch("question answering", mask_of(PADDED))
        self._unchanged(*pair, inputs, "compares all columns")

    @pytest.mark.parametrize("pair", [(m, "sequence classification") for m in ("bert", "roberta")], indirect=True)
    def test_left_padding_where_the_head_reads_the_first_column(self, pair):
        self._unchanged(*pair, batch("sequence classification", mask_of(PADDED, "left")), "the head reads is padding")

    @pytest.mark.parametrize("model_type", ["bert", "roberta", "xmod"])
    def test_left_padding_before_an_encoder_that_is_a_decoder(self, model_type):
        """Its head reads the first column all the same."""
        stock, model = twins(tiny.build(model_type, task="sequence-classification", is_decoder=True, num_labels=3))
        with autopack.enable(model):
            inputs = batch("sequence classification", mask_of(PADDED, "left"))
            self._unchanged(stock, model, inputs, "the head reads is padding")

    def test_right_padding_where_the_head_reads_the_last_column(self):
        """Without a padding token, a decoder's head takes the last column."""
        stock, model = twins(build("llama", "sequence classification"))
        stock.config.pad_token_id = model.config.pad_token_id = None
        with autopack.enable(model):
            inputs = batch("sequence classification", mask_of((5,), columns=9))
            self._unchanged(stock, model, inputs, "finds the last token of each")

    @pytest.mark.parametrize("pair", [("llama", "sequence classification")], indirect=True)
    def test_padding_that_the_head_takes_for_a_token(self, pair):
        inputs = batch("sequence classification", mask_of(PADDED))
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
        self._unchanged(*pair, batch("causal LM", mask_of(PADDED, "holes")), "windows count it")

    @pytest.mark.parametrize("pair", [("doge",)], indirect=True)
    def test_little_padding_where_a_row_costs_its_square(self, pair):
        stock, model = pair
        self._unchanged(*pair, batch("causal LM", mask_of((20, 24, 24, 22))), "scores all pairs")
        inputs = batch("causal LM", mask_of(PADDED))
        assert logit_error(model(**inputs).logits, stock(**inputs).logits, inputs["attention_mask"]) < FLOAT32
        assert tally_of(model).batches == 1

    @llamas
    def test_a_batch_without_padding(self, pair):
        stock, model = pair
        inputs = batch("causal LM", torch.ones(3, 8, dtype=torch.long))
        assert torch.equal(model(**inputs).logits, stock(**inputs).logits)
        assert str(tally_of(model)) == "no padded batch yet"

    def test_where_that_is_asked_for(self):
        stock, model = twins(build("llama"))
        inputs = batch("causal LM", mask_of(PADDED))
        with autopack.enable(model, unpad=False) as handle:
            assert torch.equal(model(**inputs).logits, stock(**inputs).logits)
            assert "unpad=False" in repr(handle)

    @llamas
    @pytest.mark.parametrize("use_cache", [True, False])
    def test_generation(self, pair, use_cache):
        stock, model = (which.eval() for which in pair)
        mask = mask_of((8, 4, 7), "left")
        inputs = batch("causal LM", mask)
        inputs.pop("labels")
        options = {"max_new_tokens": 4, "do_sample": False, "use_cache": use_cache, "eos_token_id": None}
        assert torch.equal(model.generate(**inputs, **options), stock.generate(**inputs, **options))
        assert tally_of(model).batches == 0

    @llamas
    def test_other_models_are_not_touched(self, pair):
        stock, _ = pair
        inputs = batch("causal LM", mask_of(PADDED))
        before = copy.deepcopy(stock)(**inputs).logits
        assert torch.equal(stock(**inputs).logits, before)


class TestFurtherIn:
    """What the top cannot unpad, its backbone may."""

    @llamas
    @torch.no_grad()
    def test_last_logits(self, pair):
        stock, model = pair
        inputs = batch("causal LM", mask_of(PADDED, "left"))
        inputs.pop("labels")
        expected, found = (which(**inputs, logits_to_keep=3).logits for which in pair)
        assert found.shape == (4, 3, stock.config.vocab_size)
        assert logit_error(found[:, -1], expected[:, -1], inputs["attention_mask"]) < FLOAT32
        assert tally_of(model).batches == 1

    @pytest.mark.parametrize("verify", [True, False])
    def test_a_forward_that_other_code_has_put_there(self, verify):
        """It may return what has no place in the batch; here, log-probabilities of all tokens but the first.

        No twin can be called, for nobody knows what `shifted` is; the check of the call compares it with stock.
        """
        pair = stock, model = twins(build("llama"))
        packs_at_once(model, verify=verify)
        inputs = batch("causal LM", mask_of(PADDED))
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
        assert tally_of(model).batches == 1
        assert model_gradient_error(model, stock) < GRADIENT
        autopack.disable(model)

    @llamas
    @torch.no_grad()
    def test_the_backbone_called_by_itself(self, pair):
        model = pair[1]
        mask = mask_of(PADDED)
        ids = batch("causal LM", mask)["input_ids"]
        expected, found = (which.model(input_ids=ids, attention_mask=mask)[0] for which in pair)
        assert logit_error(found, expected, mask) < FLOAT32
        assert tally_of(model).batches == 1

    @torch.no_grad()
    def test_a_backbone_with_a_pooler(self):
        stock, model = twins(build("bert", "backbone"))
        mask = mask_of(PADDED)
        ids = batch("masked LM", mask)["input_ids"]
        with autopack.enable(model):
            for options in ({}, {"return_dict": False}):
                expected, found = (which(input_ids=ids, attention_mask=mask, **options) for which in (stock, model))
                assert logit_error(found[0], expected[0], mask) < FLOAT32
                assert found[1].shape == expected[1].shape
                assert (found[1] - expected[1]).abs().max() < FLOAT32
            assert tally_of(model).batches == 2


def test_a_second_enable_may_not_ask_for_something_else():
    model = build("llama")
    with autopack.enable(model, unpad=False):
        assert autopack.enable(model) is handle_of(model)
        for options in ({"share": False}, {"verify": "strict"}):
            with pytest.raises(ValueError, match="the model is enabled with"):
                autopack.enable(model, **options)


def test_a_mask_of_any_dtype():
    stock, model = twins(build("llama"))
    inputs = batch("causal LM", mask_of(PADDED))
    expected = stock(**inputs).loss
    with autopack.enable(model):
        for dtype in (torch.bool, torch.int32, torch.float32):
            given_mask = inputs["attention_mask"].to(dtype)
            assert loss_error(model(**{**inputs, "attention_mask": given_mask}).loss, expected) < FLOAT32
        assert tally_of(model).batches == 3


@pytest.mark.parametrize("model_type", ["big_bird", "bert"])
@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
def test_a_head_that_searches_a_row_for_answers_gets_the_padded_form(model_type, left):
    """BigBird's makes token types of the columns up to the first separator, Splinter's looks for the question."""
    model = tiny.build(model_type, task="question-answering", dtype=torch.float64).eval()
    stock = copy.deepcopy(model)
    lengths, ids = torch.tensor([3, 6, 4]), tiny.tokens(model.config, 3, 6)
    columns = torch.arange(6)
    mask = (columns >= 6 - lengths[:, None] if left else columns < lengths[:, None]).long()
    with autopack.enable(model, verify=False):
        found, expected = (each(input_ids=ids * mask, attention_mask=mask) for each in (model, stock))
    for name in ("start_logits", "end_logits"):
        assert ((found[name] - expected[name]) * mask).abs().max() < 1e-9


@pytest.mark.parametrize("model_type", ["big_bird", "splinter", "bert"])
def test_an_audit_of_such_heads_finds_padded_batches_without_labels_exact(model_type):
    model = tiny.build(model_type, task="question-answering")
    with autopack.enable(model, verify=False):
        assert autopack.audit(model, modes=("right-padded, no labels", "left-padded")).exact


def test_a_pooler_of_an_encoder_that_is_configured_as_a_decoder_reads_the_first_column():
    model = BigBirdModel(tiny.config("big_bird", is_decoder=True)).train()
    stock = copy.deepcopy(model)
    ids, mask = tiny.tokens(model.config, 2, 4), torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    with autopack.enable(model, verify=False):
        found, expected = (each(input_ids=ids, attention_mask=mask).pooler_output for each in (model, stock))
    assert (found - expected).abs().max() < 1e-6


def test_one_token_in_all_is_not_taken_for_a_bias_of_one_column():
    model = tiny.build("mpt")
    stock = copy.deepcopy(model)
    batch = {"input_ids": torch.tensor([[9, 0, 0, 0]]), "attention_mask": torch.tensor([[1, 0, 0, 0]])}
    with autopack.enable(model, verify=False):
        assert (model(**batch).logits - stock(**batch).logits)[:, 0].abs().max() < 1e-5
