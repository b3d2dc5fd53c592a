"""The paper's comparison (`benchmarks.paper`): its arms hold what they say, and what is checked of
them fails where it should."""

import copy
from itertools import chain

import numpy as np
import pytest
import torch

from autopack.bench.race import peak_memory
from autopack.bench.subjects import DISTRIBUTIONS, draw
from benchmarks import paper, paper_arms
from benchmarks.paper_arms import (
    ARMS,
    FIXED,
    FIXED_POSID,
    IGNORED,
    MINI_BATCH,
    Corpus,
    Shape,
)
from tests.packing.batches import documents_in, loss_alone

SHAPE = Shape(batch_size=3, max_length=40)
EQUAL = 1e-6
"""Largest difference of losses in float64: transformers takes the loss of logits in float32, of
about 4."""
FEW = "--documents 20 --scale 16 --max-length 40 --batch-size 3 --model tiny --timed 4 --rounds 1 --threads 1".split()


@pytest.fixture(scope="module")
def options():
    """Options of the command with few documents, in float64."""
    return paper.parse([*FEW, "--dtype", "float64", "--data", "flan"])


@pytest.fixture(scope="module")
def corpus(options):
    return Corpus.of("flan", options)


def rows_of(call):
    """Tokens, labels and positions of each row of a call, without its padding."""
    ids = call["input_ids"]
    positions = call.get("position_ids", torch.arange(ids.shape[1]).expand_as(ids))
    real = call.get("attention_mask", torch.ones_like(ids)) != 0
    for row in range(len(ids)):
        yield tuple(values[row][real[row]] for values in (ids, call["labels"], positions))


# Arms


def chosen(arm, lengths, shape=SHAPE):
    """The pieces of documents of each step."""
    return ARMS[arm].choose(lengths, shape)


@pytest.mark.parametrize("arm", ARMS)
def test_an_epoch_has_every_token_once_and_calls_hold_the_documents(corpus, arm):
    times = [np.zeros(length, int) for length in corpus.lengths]
    steps = chosen(arm, corpus.lengths)
    for document, offset, length in chain(*steps):
        times[document][offset : offset + length] += 1
    assert all((count == 1).all() for count in times)
    calls = [ARMS[arm].collate(corpus.train, pieces, SHAPE) for pieces in steps]
    if arm in (FIXED, FIXED_POSID):  # cut, so only the text as a whole is the same
        order = [piece.document for pieces in steps for piece in pieces if piece.offset == 0]
        text = np.concatenate([corpus.train[i] for i in order])
        assert np.array_equal(
            torch.cat([ids for call in calls for ids, _, _ in rows_of(call)]).numpy(), text
        )
    else:
        found = sorted(document for call in calls for document in documents_in(call))
        assert found == sorted(document.tolist() for document in corpus.train)
    for pieces, call in zip(steps, calls, strict=True):
        assert sum(len(ids) for ids, _, _ in rows_of(call)) == sum(piece.length for piece in pieces)
        if "attention_mask" in call:
            assert (call["labels"][call["attention_mask"] == 0] == IGNORED).all()
        for ids, labels, positions in rows_of(call):
            assert torch.equal(labels == IGNORED, (positions == 0) & ARMS[arm].enabled), (
                "where a document begins"
            )
            assert torch.equal(labels[labels != IGNORED], ids[labels != IGNORED])
        assert arm == FIXED or paper_arms.targets(call) == sum(piece.length - 1 for piece in pieces)


# Training


def test_validation_is_the_mean_over_all_targets_of_documents_alone(corpus, options):
    model = paper_arms.build(options, enabled=True)
    stock = paper_arms.build(options).eval()
    wanted = loss_alone(stock, [document.tolist() for document in corpus.validation]).item()
    assert paper.evaluate(model, corpus, options) == pytest.approx(wanted, abs=EQUAL)


def test_peak_memory_is_of_what_stays_and_the_most_that_a_step_adds():
    kept = torch.zeros(1000)

    def step():
        first = torch.ones(250_000)
        del first
        torch.ones(500_000).add_(1)

    assert peak_memory(step, [kept], "cpu") == pytest.approx(4000 + 2_000_000, rel=0.01)


# Documents


@pytest.mark.parametrize(("name", "ratio"), [("flan", 2.0), ("orcamath", 1.45)])
def test_lengths_are_like_those_of_the_paper(name, ratio):
    lengths = draw(DISTRIBUTIONS[name], 20_000, 4096, 0)
    assert lengths.mean() == pytest.approx(DISTRIBUTIONS[name].mean, rel=0.03)
    batches = lengths.reshape(-1, 4)
    assert 4 * batches.max(axis=1).sum() / lengths.sum() == pytest.approx(ratio, rel=0.1)


# The command


def test_the_model_of_1b():
    chosen = paper.parse("--device meta --model 1b --dtype bfloat16".split())
    with torch.device("meta"):
        model = paper_arms.build(chosen)
    assert model.num_parameters() == 1_235_814_400
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.config.max_position_embeddings == 4 * 4096


def test_a_run_prints_every_arm_and_every_check(options):
    result = paper.run(options, {})
    text = "\n".join(paper.describe(result))
    assert all(text.count(f"\n{arm:<22}") == 2 for arm in ARMS)
    assert [passed for passed, line in result["checks"] if MINI_BATCH in line] == [True]
    assert text.count("PASS") + text.count("FAIL") == len(result["checks"]) == 2
    changed = copy.deepcopy(result)
    arms = changed["data"]["flan"]["arms"]
    arms[MINI_BATCH]["losses"][1] += 6e-4
    arms[FIXED_POSID]["validation"] = arms[FIXED]["validation"] + 0.1
    changed["checks"] = list(paper.checks(changed))
    assert [passed for passed, _ in changed["checks"]] == [False, False]
    assert "6.0e-04 at most" in changed["checks"][0][1]
    assert "validates no worse than FixedLength: +0.100" in changed["checks"][1][1]
    assert f"FAIL  {changed['checks'][0][1]}" in [*paper.describe(changed)]
