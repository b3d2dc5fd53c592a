"""Which padded batches are unpadded, at which entry, and which are left bit for bit as they
came."""

import pytest
import torch
from transformers import BigBirdModel

import autopack
from autopack import tiny
from tests.support.padded import (
    FLOAT32,
    PADDED,
    batch,
    build,
    logit_error,
    mask_of,
    tally_of,
    twins,
)

llamas = pytest.mark.parametrize("pair", [("llama",)], indirect=True, ids=["llama"])
CLASSES, ANSWERS = "sequence classification", "question answering"
BATCH, MASK = batch("causal LM", mask_of(PADDED)), mask_of(PADDED)
TOKENS = {name: BATCH[name] for name in ("input_ids", "attention_mask")}
OF_CLASSES = batch(CLASSES, MASK)
ROW_OF_PADDING = mask_of((5, 3, 4)) * torch.tensor([[1], [0], [1]])
HEAD_READS = "the head reads is padding"


def a_decoder(model_type):
    """An encoder that is configured as one; its head reads the first column all the same."""
    return tiny.build(model_type, task="sequence-classification", is_decoder=True, num_labels=3)


def without_padding_token(model_type):
    """A decoder's head takes the last column then."""
    model = build(model_type, CLASSES)
    model.config.pad_token_id = None
    return model


AS_IT_CAME = {
    "a cache is wanted": ("llama", BATCH, "a cache is wanted", {"use_cache": True}),
    "attention weights are wanted": (
        ("llama", "causal LM", "eager"), BATCH, "attention weights are wanted", {"output_attentions": True}
    ),
    # Stock learns to predict padding from labels that are a copy of the tokens.
    "padding is labelled": ("llama", BATCH | {"labels": BATCH["input_ids"]}, "padding is labelled"),
    **{
        f"answers of {name}": ((name, ANSWERS), batch(ANSWERS, MASK), "compares all columns")
        for name in ("bert", "llama", "qwen3_moe", "gpt2", "opt", "big_bird")
    },
    **{
        f"left padding of {name}": ((name, CLASSES), batch(CLASSES, mask_of(PADDED, "left")), HEAD_READS)
        for name in ("bert", "roberta")
    },
    **{
        f"left padding of {name} as a decoder": ((a_decoder, name), batch(CLASSES, mask_of(PADDED, "left")), HEAD_READS)
        for name in ("bert", "roberta", "xmod")
    },
    "the head reads the last column": (
        (without_padding_token, "llama"), batch(CLASSES, mask_of((5,), columns=9)), (
                                                                                        "finds the "
                                                                                        "last token of each"
                                                                                    )
    ),
    "padding that the head takes for a token": (
        ("llama", CLASSES),
        OF_CLASSES | {"input_ids": OF_CLASSES["input_ids"].masked_fill(MASK == 0, 7)},
        HEAD_READS,
    ),
    "a row of padding alone": ("llama", batch("causal LM", ROW_OF_PADDING), "nothing but padding"),
    "holes that windows count": ("mistral", batch("causal LM", mask_of(PADDED, "holes")), "windows count it"),
    "little padding where a row costs its square": (
        "deepseek_v32", batch("causal LM", mask_of((20, 24, 24, 22))), "scores all pairs"
    ),
    "no padding": ("llama", batch("causal LM", torch.ones(3, 8, dtype=torch.long)), (
                                                                                        "no padded "
                                                                                        "batch yet"
                                                                                    )),
    "nothing is to be unpadded": ("llama", BATCH, "unpad=False", {}, {"unpad": False}),
}  # fmt: skip


class TestLeftAsItCame:
    @pytest.mark.parametrize("case", AS_IT_CAME.values(), ids=[*AS_IT_CAME])
    def test_and_the_handle_says_why(self, case):
        of, inputs, reason, options, enabled = (*case, {}, {})[:5]
        make, *given = (build, of) if isinstance(of, str) else of
        stock, model = twins(make(*given) if callable(make) else build(make, *given))
        with autopack.enable(model, **enabled) as handle:
            assert torch.equal(model(**inputs, **options)[0], stock(**inputs, **options)[0])
            assert reason in repr(handle)
            assert handle.tally.batches == 0

    @llamas
    @torch.no_grad()
    def test_in_evaluation_without_labels(self, pair):
        stock, model = (which.eval() for which in pair)
        found = model(**TOKENS)
        assert torch.equal(found.logits, stock(**TOKENS).logits)
        assert found.past_key_values is not None
        assert "may want the cache" in repr(autopack.enable(model))
        model(**TOKENS, use_cache=False)
        model(**BATCH)
        assert tally_of(model).batches == 2


class TestFurtherIn:
    """What the top cannot unpad, its backbone may."""

    @llamas
    @torch.no_grad()
    def test_last_logits(self, pair):
        inputs = batch("causal LM", mask_of(PADDED, "left"))
        inputs.pop("labels")
        expected, found = (which(**inputs, logits_to_keep=3).logits for which in pair)
        assert found.shape == expected.shape
        assert logit_error(found[:, -1], expected[:, -1], inputs["attention_mask"]) < FLOAT32
        assert tally_of(pair[1]).batches == 1


@pytest.mark.parametrize(
    ("make", "mask", "of"),
    [
        # A pooler of an encoder that is configured as a decoder reads the first column.
        (
            lambda: BigBirdModel(tiny.config("big_bird", is_decoder=True)).train(),
            [[0, 1, 1, 1], [1, 1, 1, 1]],
            "pooler_output",
        ),
        # One token in all is not taken for a bias of one column.
        (lambda: tiny.build("mpt"), [[1, 0, 0, 0]], "logits"),
    ],
    ids=["a pooler of a decoder", "one token in all"],
)
def test_forms_that_are_easily_mistaken(make, mask, of):
    stock, model = twins(make())
    mask = torch.tensor(mask)
    inputs = {"input_ids": tiny.tokens(model.config, *mask.shape) * mask, "attention_mask": mask}
    with autopack.enable(model, verify=False):
        found, expected = (each(**inputs)[of] for each in (model, stock))
    assert logit_error(found, expected, mask) < FLOAT32
