"""Packed batches in models, padded inside or all of one shape, and what `for_model` takes from a
model."""

import pickle
import types

import peft
import pytest
import torch
import transformers

import autopack
from autopack import PackingCollator
from tests.engine import Call, Result, check, ids
from tests.subjects import build
from tests.support.refusals import refused

LENGTHS = (7, 12, 2, 9, 4, 8)
DOCUMENTS = ids(lengths=LENGTHS)[0].split(LENGTHS)
MASKED = ("bert", "roberta", "fnet")
SHAPE = {"max_length": 24, "rows": 3}


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    "options", [{}, SHAPE, SHAPE | {"declare": ("attention_mask", "cu_seq_lens")}], ids=len
)
@pytest.mark.parametrize(
    "model_type",
    [*"llama gpt2 bloom mamba lfm2 qwen2_moe xlnet cpmant xlm bart whisper".split(), *MASKED],
)
def test_batches_of_for_model_are_their_documents(model_type, options):
    """Padded inside a row or not; losses shift labels, or compare each with the logits of its own
    column."""
    task = "masked-lm" if model_type in MASKED else "causal-lm"
    dtype = torch.float32 if model_type == "xlnet" else torch.float64  # whose encodings are float32
    model, stock = (build(model_type, task, dtype=dtype) for _ in range(2))
    collator = PackingCollator.for_model(model, **options)
    batch = collator([{"input_ids": document, "labels": document} for document in DOCUMENTS])
    autopack.enable(model)
    output = model(**batch)
    real = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
    found = Result.of(model, output.logits[real].split(LENGTHS), output.loss)
    check(found, Call(lengths=LENGTHS, shifts=collator.labels != "unshifted").alone(stock))


TINY = {
    "vocab_size": 50,
    "hidden_size": 24,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 3,
}


def test_for_model_reads_the_head_and_lets_options_win():
    bert = transformers.BertConfig(**TINY)
    assert PackingCollator.for_model(bert) == PackingCollator()
    for head in (transformers.BertForMaskedLM, transformers.BertForTokenClassification):
        model = head(bert)
        assert PackingCollator.for_model(model) == PackingCollator(labels="unshifted")
        assert PackingCollator.for_model(torch.nn.DataParallel(model)).labels == "unshifted"
    lora = peft.get_peft_model(head(bert), peft.LoraConfig(target_modules=["query"]))
    assert PackingCollator.for_model(lora).labels == "unshifted"
    assert (
        PackingCollator.for_model(transformers.BertForSequenceClassification(bert)).labels
        == "given"
    )
    assert PackingCollator.for_model(transformers.AltCLIPConfig()) == PackingCollator(
        first_position=2
    )
    assert PackingCollator.for_model(build("llama"), max_length=8) == PackingCollator(max_length=8)
    roberta = transformers.RobertaConfig(**TINY)
    wanted = PackingCollator(first_position=7, labels="none")
    assert PackingCollator.for_model(roberta, first_position=7, labels="none") == wanted
    roberta.pad_token_id = None
    with pytest.raises(ValueError, match=r"roberta: wanted config\.pad_token_id"):
        PackingCollator.for_model(roberta)
    with refused("which-model"):
        PackingCollator.for_model(torch.nn.Linear(1, 1))


class Users(torch.nn.Module):
    """A module of the user's around a model."""

    def __init__(self, model):
        super().__init__()
        self.net = model


@pytest.mark.parametrize("wrap", [lambda m: m, Users, lambda m: types.SimpleNamespace(model=m)])
@pytest.mark.parametrize(
    ("order", "said"),
    [("made, called", 1), ("made, enabled, called", 0), ("enabled, made, called", 0)],
)
def test_for_model_warns_of_a_model_that_is_not_enabled_when_batches_are_made(
    wrap, order, said, caplog
):
    held = wrap(build("llama"))
    for step in order.split(", "):
        if step == "made":
            collator = PackingCollator.for_model(held)
            assert pickle.loads(pickle.dumps(collator)) == collator
            assert not caplog.messages
        elif step == "enabled":
            autopack.enable(held)
        else:
            for _ in range(3):
                collator([{"input_ids": [5, 6, 7]}] * 2)
    assert ["that is not enabled" in line for line in caplog.messages if "for_model" in line] == [
        True
    ] * said
    autopack.disable(held)
