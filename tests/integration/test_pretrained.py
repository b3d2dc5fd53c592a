"""Weights that were really trained, in three dtypes: padded and packed, encoding and training,
against each text alone.

Skipped where the weights are not installed (examples/pretrained/README.md). Whether two runs are
equal is asked of whole tensors: the norm of what differs, relative to the norm of what is expected.
"""

import copy
import email
from functools import cache
from pathlib import Path

import pytest
import torch

import autopack
from autopack.demo import LOSS_TOLERANCE, collect_documents
from examples.pretrained import language_model, sentences
from examples.pretrained.weights import MINILM, SMOLLM2, checked_folder, missing
from tests.conftest import LEAK
from tests.engine import counted, padded_batch

pytestmark = [pytest.mark.exhaustive, pytest.mark.usefixtures("nothing_left_behind")]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WAYS = ("padded", "packed")
NEAR = 1e-6
"""Of float32: a sum in another order. About 3e-7 is seen of states and logits, and a leak is
0.5."""
MARGIN = 1.2
"""Half precision rounds each sum in its own way. Against float64 a run may be off by as much as
stock is, alone or padded, and a fifth: errors are sums of many roundings, whose norm hardly varies
(within 5 % is seen)."""
BY_MODEL = {"minilm": MINILM, "smollm2": SMOLLM2}
TEXTS = {"minilm": (12, 48), "smollm2": (5, 16)}
"""How many, and after how many tokens they are cut: half precision of 134 million parameters is
slow on CPUs."""


@cache
def stock(name):
    """The model in float32, without dropout, and its tokenizer."""
    if absent := missing(BY_MODEL[name]):
        pytest.skip(f"no {' and no '.join(absent)}: {BY_MODEL[name].install}")
    if name == "smollm2":
        return language_model.load()
    from transformers import AutoModel, AutoTokenizer

    folder = checked_folder(MINILM)
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return AutoModel.from_pretrained(
        folder, dtype=torch.float32, **off
    ).eval(), AutoTokenizer.from_pretrained(folder)


@cache
def documents(name):
    """Tokens of docstrings of very different lengths, each (tokens,)."""
    count, longest = TEXTS[name]
    texts = sorted(
        collect_documents(Path(email.__file__).parent), key=lambda text: (len(text), text)
    )
    spread = [texts[len(texts) * place // count] for place in range(count)]
    _, tokenizer = stock(name)
    ends = [longest // (1, 4, 2, 3)[place % 4] for place in range(count)]  # in no order of length
    return [
        torch.tensor(tokenizer(text)["input_ids"][:end])
        for text, end in zip(spread, ends, strict=True)
    ]


def model_in(name, dtype):
    return copy.deepcopy(stock(name)[0]).to(dtype)


def outputs(way, model, texts, **more):
    """States, or logits, of each text: (tokens, width) each."""
    lengths = [len(text) for text in texts]
    if way == "alone":
        return [_of(model(input_ids=text[None], **more))[0] for text in texts]
    if way == "padded":
        if model.config.model_type == "llama":
            more["use_cache"] = False  # an evaluation that may want the cache keeps its padding
        found = _of(model(**padded_batch(texts), **more))
        return [row[:length] for row, length in zip(found, lengths, strict=True)]
    row = {"input_ids": torch.cat(texts)[None], "position_ids": counted(lengths)}
    return list(_of(model(**row, **more))[0].split(lengths))


def _of(output):
    return output.logits if "logits" in output else output.last_hidden_state


def relative(found, expected):
    """The norm of the difference, relative to the norm of what is expected."""
    off = sum(
        float((f.double() - e.double()).square().sum())
        for f, e in zip(found, expected, strict=True)
    )
    return (off / sum(float(e.double().square().sum()) for e in expected)) ** 0.5


@cache
@torch.no_grad()
def evaluated_by_stock(name, way, dtype):
    return outputs(way, model_in(name, dtype).eval(), documents(name))


@pytest.mark.parametrize("name", BY_MODEL)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_texts_get_what_they_get_alone_and_another_text_moves_no_other(name, dtype, way):
    """In float32 they are equal, and they are no further from float64 than stock, alone or padded.

    With another one the same shapes are computed, nothing is rounded otherwise, and others are
    equal to a bit."""
    model, texts = model_in(name, dtype).eval(), documents(name)
    with autopack.enable(model) as handle, torch.no_grad():
        found = outputs(way, model, texts)
        after = outputs(way, model, [*texts[:2], texts[2].flip(0), *texts[3:]])
        assert way == "packed" or handle.tally.padding > 0
    expected, padded = (evaluated_by_stock(name, each, dtype) for each in ("alone", "padded"))
    exact = evaluated_by_stock(name, "alone", torch.float64)
    if dtype == torch.float32:
        assert relative(found, expected) <= NEAR
    least = max(relative(expected, exact), relative(padded, exact))
    assert relative(found, exact) <= MARGIN * least
    assert relative(after[2:3], found[2:3]) > LEAK
    for place in (0, 1, *range(3, len(texts))):
        assert torch.equal(after[place], found[place])


@pytest.mark.parametrize("name", BY_MODEL)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_stock_leaks_in_the_packed_row(name, dtype):
    """Negative control: the comparison sees what a row does to its documents, in each dtype."""
    found = evaluated_by_stock(name, "packed", dtype)
    alone = evaluated_by_stock(name, "alone", dtype)
    assert relative(found[1:], alone[1:]) > LEAK


@pytest.fixture(scope="module", autouse=True)
def _forget():
    """Models and gradients of what stock does are kept between the tests of this file, and no
    longer."""
    yield
    for kept in (stock, documents, evaluated_by_stock):
        kept.cache_clear()


def test_the_demo_of_sentences():
    stock("minilm")
    result = sentences.compare_sentences(
        sentences.SentenceSettings(steps=2, batch_size=4, held_out=12, longest=64)
    )
    assert result.succeeded, result
    assert 0 < result.before["alone"].accuracy_at_1 <= 1
    assert result.losses["alone"][0] != result.losses["alone"][1]
    assert result.padded_tokens > result.real_tokens


def test_the_demo_of_a_language_model():
    stock("smollm2")
    result = language_model.compare_language_model(
        language_model.LanguageSettings(steps=2, batch_size=3, held_out=6, longest=48)
    )
    assert result.succeeded, result
    assert result.after["alone"] != pytest.approx(result.before["alone"], rel=LOSS_TOLERANCE)
    leaking = result.before[language_model.STOCK_ROW]
    assert leaking != pytest.approx(result.before["alone"], rel=LEAK)
