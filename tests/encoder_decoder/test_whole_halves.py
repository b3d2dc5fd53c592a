"""Encoder-decoders of which one half runs on documents alone: whatever else such a call may
bring."""

import pytest
import torch

import autopack
from autopack.architectures import encoder_decoders, whole_model
from autopack.mixers import OneByOne
from tests.encoder_decoder.pairs import (
    WHOLE_HALVES,
    Pairs,
    alone,
    build,
    covered,
    hold,
    of_outputs,
    worst,
)
from tests.engine import LEAK

pytestmark = covered


ROUTER = encoder_decoders.NLLB_MOE.mixers["NllbMoeTop2Router"]


def as_it_is(way, call):
    """What the other architectures have: the row as it came."""
    return call.changed(lambda name, value: None if name == "padding_mask" else value)


@pytest.mark.parametrize("model_type", [*WHOLE_HALVES, "nllb-moe", "fsmt"])
def test_without_what_runs_alone_documents_see_each_other(model_type, monkeypatch):
    """The negative control; a proof sees it, too."""
    model = build(model_type)
    families = [getattr(encoder_decoders, name) for name in ("WHOLE_HALF", "FSMT", "NLLB_MOE")]
    ways = [
        way for family in (*families, whole_model.WHOLE_MODEL) for way in family.mixers.values()
    ]
    for kind in {type(way) for way in ways if isinstance(way, (OneByOne, type(ROUTER)))}:
        monkeypatch.setattr(kind, "run", as_it_is)
    own = type("Own", (type(model),), {})(model.config)
    # blocks of another row's length
    with pytest.raises((autopack.AutopackError, RuntimeError)), autopack.enable(own):
        own(**Pairs.for_model(model).one_row())


def test_tokens_with_global_attention_are_global_to_their_document():
    pairs, model = Pairs.draw(), build("led")
    marks = [
        torch.zeros_like(source).index_fill(0, torch.tensor([0, 3]), 1) for source in pairs.sources
    ]
    calls = zip(pairs.each(), marks, strict=True)
    expected = of_outputs(
        model,
        [model(**call, global_attention_mask=m[None], use_cache=False) for call, m in calls],
        pairs,
    )
    assert worst(alone(model, pairs).documents, expected.documents) > LEAK, "control"
    autopack.enable(model)
    hold(model, pairs, expected, "one_row", global_attention_mask=torch.cat(marks)[None])


def test_what_packed_rows_have_of_the_streams_of_ngrams():
    """Those of the first n-gram are the logits; the others have a form in which documents have no
    place."""
    pairs, model = Pairs.draw(), build("prophetnet")
    row, padded = pairs.one_row(), pairs.padded()
    wanted = model(**padded)
    autopack.enable(model)
    found = model(**row, output_hidden_states=True)
    assert found.logits_ngram is None
    assert found.decoder_ngram_hidden_states is None
    of_padded = model(**padded)
    assert torch.equal(of_padded.logits_ngram, wanted.logits_ngram)
    assert torch.equal(of_padded.loss, wanted.loss)
