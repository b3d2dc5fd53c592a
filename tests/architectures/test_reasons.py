"""Refusals that are laws of upstream's code: what they say of stock models is so."""

import pytest
import torch

import autopack
from autopack import tiny
from tests.support.refusals import refused


@torch.no_grad()
@pytest.mark.parametrize(
    ("model_type", "task"), [("big_bird", "masked-lm"), ("bigbird_pegasus", "seq2seq")]
)
def test_block_sparse_attention_depends_on_the_calls_before(model_type, task):
    model = tiny.build(
        model_type, task=task, attention_type="block_sparse", block_size=2, num_random_blocks=1
    ).eval()
    document = {"input_ids": tiny.tokens(model.config, 1, 40)}
    before, again = model(**document).logits, model(**document).logits
    assert torch.equal(before, again)
    model(input_ids=document["input_ids"][:, :5])
    assert not torch.allclose(model(**document).logits, before, atol=1e-3)
    with refused("cannot-be-packed"):
        autopack.enable(tiny.build(model_type, task=task, attention_type="block_sparse"))
    autopack.disable(
        autopack.enable(tiny.build(model_type, task=task, attention_type="original_full")).model
    )


@torch.no_grad()
def test_perceiver_has_logits_of_places_and_none_of_tokens():
    model = tiny.build("perceiver", task="masked-lm").eval()
    for tokens in (5, 9):
        ids = tiny.tokens(model.config, 1, tokens)
        assert (
            model(input_ids=ids).logits.shape[1] == model.config.max_position_embeddings != tokens
        )
        with pytest.raises(ValueError, match="batch_size"):
            model(input_ids=ids, labels=ids)
    with refused("cannot-be-packed"):
        autopack.enable(model)
