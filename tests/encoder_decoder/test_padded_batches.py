"""Encoder-decoders on padded batches: run as packed rows inside, or left as they came, with the
same outputs."""

import pytest
import torch

import autopack
from tests.encoder_decoder.pairs import (
    SOURCES,
    TARGETS,
    Pairs,
    alone,
    build,
    check,
    covered,
    pad,
    result,
)

pytestmark = covered


@torch.no_grad()
def test_outputs_have_the_shape_of_the_batch():
    pairs, model = Pairs.draw(), build("t5")
    autopack.enable(model, verify=False)
    batch = pairs.padded()
    output, as_tuple = model(**batch, output_hidden_states=True), model(**batch, return_dict=False)
    of_sources, of_targets = ((len(lengths), max(lengths)) for lengths in (SOURCES, TARGETS))
    encoded = output.encoder_last_hidden_state
    assert {state.shape[:2] for state in (encoded, *output.encoder_hidden_states)} == {of_sources}
    assert {state.shape[:2] for state in (output.logits, *output.decoder_hidden_states)} == {
        of_targets
    }
    assert not encoded[0, SOURCES[0] :].any()
    assert isinstance(as_tuple, tuple)
    torch.testing.assert_close(as_tuple[1], output.logits)


def _with_decoder_tokens(model, batch):
    """Tokens that a collator made."""
    return {"decoder_input_ids": model.prepare_decoder_input_ids_from_labels(batch["labels"])}


def _masked(_, batch):
    return {"decoder_attention_mask": (batch["labels"] != -100).long()}


def _on_the_left(_, batch):
    def rolled(name):
        rows = zip(batch[name], SOURCES, strict=True)
        return torch.stack([row.roll(max(SOURCES) - n) for row, n in rows])

    return {name: rolled(name) for name in ("input_ids", "attention_mask")}


@pytest.mark.parametrize(
    ("model_type", "change"),
    [
        ("t5", _with_decoder_tokens),
        ("mbart", _with_decoder_tokens),
        ("t5", _masked),
        ("t5", _on_the_left),
    ],
)
def test_padded_batches_of_other_forms(model_type, change):
    pairs, model = Pairs.draw(), build(model_type)
    expected, batch = alone(model, pairs), pairs.padded()
    handle = autopack.enable(model, verify=False)
    found = model(**{**batch, **change(model, batch)})
    check(result(model, pairs, "padded", found), expected)
    assert "1 padded batch packed inside" in repr(handle)


def _flipped(batch):
    return {**batch, **{name: batch[name].flip(1) for name in ("input_ids", "attention_mask")}}


@pytest.mark.parametrize(
    ("model_type", "change", "reason"),
    [
        ("t5", lambda batch: {**batch, "use_cache": True}, "a cache is wanted"),
        ("t5", lambda batch: {**batch, "output_attentions": True}, "attention weights are wanted"),
        ("t5", lambda batch: {**batch, "labels": None}, "evaluation without labels"),
        ("bart", _flipped, "counts columns by itself"),
    ],
)
def test_padded_batches_that_stay_as_they_came(model_type, change, reason):
    pairs, model = Pairs.draw(), build(model_type)
    batch = change({**pairs.padded(), "decoder_input_ids": pad(pairs.targets, 0)})
    before = model(**batch).logits
    handle = autopack.enable(model, verify=False)
    assert torch.equal(model(**batch).logits, before)
    assert reason in repr(handle)
