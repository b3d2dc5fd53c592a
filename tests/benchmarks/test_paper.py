"""The paper's comparison (`benchmarks.paper`): its arms hold what they say, and MiniBatchPacking trains as padding."""

import contextlib
import copy
import json
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
import torch

from autopack.bench.race import peak_memory
from autopack.bench.subjects import DISTRIBUTIONS, draw
from benchmarks import paper, paper_arms, paper_table, paper_training
from benchmarks.paper_arms import (
    ARMS,
    FIXED,
    FIXED_POSID,
    IGNORED,
    MINI_BATCH,
    MULTIPACK,
    OFFLINE,
    PADDING,
    Shape,
)
from tests.packing.batches import documents_in, loss_alone

SHAPE = Shape(batch_size=3, max_length=40)
STEPS = 6
EQUAL = 1e-6
"""Largest difference of losses in float64: transformers takes the loss of logits in float32, of about 4."""
LEAK = 1e-3
"""Least difference that the negative control must show."""


def options(*arguments, **changes):
    """Options of the command with few documents, in float64 unless changed."""
    found = paper.parse(["--documents", "20", "--scale", "16", "--max-length", "40", "--batch-size", "3", *arguments])
    vars(found).update({"dtype": "float64", **changes})
    return found


@pytest.fixture(scope="module")
def corpus():
    return paper_arms.load("flan", options())


def rows_of(call):
    """Tokens, labels and positions of each row of a call, without its padding."""
    ids = call["input_ids"]
    positions = call.get("position_ids", torch.arange(ids.shape[1]).expand_as(ids))
    real = call.get("attention_mask", torch.ones_like(ids)) != 0
    for row in range(len(ids)):
        yield tuple(values[row][real[row]] for values in (ids, call["labels"], positions))


# Arms


def chosen(arm, lengths, epoch=0):
    """The pieces of documents of each step."""
    return ARMS[arm].choose(lengths, SHAPE, epoch)


@pytest.mark.parametrize("arm", ARMS)
def test_an_epoch_has_every_token_once_and_calls_hold_the_documents(corpus, arm):
    for epoch in (0, 1):
        times = [np.zeros(length, int) for length in corpus.lengths]
        for document, offset, length in chain(*chosen(arm, corpus.lengths, epoch)):
            times[document][offset : offset + length] += 1
        assert all((count == 1).all() for count in times)
    steps = chosen(arm, corpus.lengths)
    calls = [ARMS[arm].collate(corpus.train, pieces, SHAPE) for pieces in steps]
    if arm in (FIXED, FIXED_POSID):  # cut, so only the text as a whole is the same
        order = [piece.document for pieces in steps for piece in pieces if piece.offset == 0]
        text = np.concatenate([corpus.train[i] for i in order])
        assert np.array_equal(torch.cat([ids for call in calls for ids, _, _ in rows_of(call)]).numpy(), text)
    else:
        found = sorted(document for call in calls for document in documents_in(call))
        assert found == sorted(document.tolist() for document in corpus.train)
    for pieces, call in zip(steps, calls, strict=True):
        assert sum(len(ids) for ids, _, _ in rows_of(call)) == sum(piece.length for piece in pieces)
        if "attention_mask" in call:
            assert (call["labels"][call["attention_mask"] == 0] == IGNORED).all()
        for ids, labels, positions in rows_of(call):
            assert torch.equal(labels == IGNORED, (positions == 0) & ARMS[arm].enabled), "where a document begins"
            assert torch.equal(labels[labels != IGNORED], ids[labels != IGNORED])
        assert arm == FIXED or paper_training.targets(call) == sum(piece.length - 1 for piece in pieces)


def test_rows_are_as_long_as_the_arm_says_and_others_in_the_next_epoch(corpus):
    for arm in (FIXED, FIXED_POSID):
        *full, last = (ARMS[arm].collate(corpus.train, pieces, SHAPE) for pieces in chosen(arm, corpus.lengths))
        assert {call["input_ids"].shape for call in full} == {(SHAPE.batch_size, SHAPE.max_length)}
        assert last["input_ids"].shape[1] <= SHAPE.max_length
    for arm in (OFFLINE, MULTIPACK):
        sizes = [sum(piece.length for piece in pieces) for pieces in chosen(arm, corpus.lengths)]
        assert max(sizes) <= SHAPE.batch_size * SHAPE.max_length
        assert len(sizes) < len(chosen(PADDING, corpus.lengths))
    first = chosen(MINI_BATCH, corpus.lengths)
    assert first != chosen(MINI_BATCH, corpus.lengths, 1)
    assert {len(pieces) for pieces in first[:-1]} == {SHAPE.batch_size}


# Training


def trained(arm, corpus, **changes):
    return paper_training.train(arm, corpus, options(**changes), STEPS, report=lambda _: None)


@pytest.fixture(scope="module")
def padding(corpus):
    return trained(ARMS[PADDING], corpus)


def test_mini_batch_packing_trains_as_padding_does(corpus, padding):
    found = trained(ARMS[MINI_BATCH], corpus)
    assert found.losses == pytest.approx(padding.losses, abs=EQUAL)
    assert found.validation == pytest.approx(padding.validation, abs=EQUAL)
    assert found.counts == padding.counts
    assert set(found.validation) == {STEPS, found.steps}
    assert (found.tokens, found.columns) == (padding.tokens, padding.tokens)
    assert padding.columns > padding.tokens
    assert 0 < found.peak < padding.peak


def test_packed_rows_of_a_model_that_is_not_enabled_do_not(corpus, padding):
    found = trained(replace(ARMS[MINI_BATCH], enabled=False), corpus)
    assert abs(found.losses[0] - padding.losses[0]) > LEAK
    assert abs(found.validation[STEPS] - padding.validation[STEPS]) > LEAK


def test_validation_is_the_mean_over_all_targets_of_documents_alone(corpus):
    model = paper_training.prepare(True, options(), corpus.vocabulary)
    stock = paper_training.build(options(), corpus.vocabulary).eval()
    wanted = loss_alone(stock, [document.tolist() for document in corpus.validation]).item()
    assert paper_training.evaluate(model, corpus, options()) == pytest.approx(wanted, abs=EQUAL)


def test_training_loss_is_that_of_the_last_tenth_over_targets():
    found = paper_training.Trained(20, losses=[9.0] * 18 + [1.0, 2.0], counts=[1] * 18 + [1, 3])
    assert found.train_loss(20) == 1.75
    assert found.train_loss(5) == 9.0


def test_peak_memory_is_of_what_stays_and_the_most_that_a_step_adds():
    kept = torch.zeros(1000)

    def step():
        first = torch.ones(250_000)
        del first
        torch.ones(500_000).add_(1)

    assert peak_memory(step, [kept], "cpu") == pytest.approx(4000 + 2_000_000, rel=0.01)


# Documents


def test_the_grammar_is_of_its_seed_and_lengths_are_kept():
    lengths = draw(DISTRIBUTIONS["flan"], 50, 40, 0, scale=16)
    first, again, other = (paper_arms.write_grammar(lengths, seed) for seed in (0, 0, 1))
    assert all(map(np.array_equal, first, again))
    assert not all(map(np.array_equal, first, other))
    assert [len(document) for document in first] == lengths.tolist()
    assert all(document[-1] == paper_arms.END and document[:-1].all() for document in first)
    assert max(document.max() for document in first) <= paper_arms.SYMBOLS


@pytest.mark.parametrize(("name", "ratio"), [("flan", 2.0), ("orcamath", 1.45)])
def test_lengths_are_like_those_of_the_paper(name, ratio):
    lengths = draw(DISTRIBUTIONS[name], 20_000, 4096, 0)
    assert lengths.mean() == pytest.approx(DISTRIBUTIONS[name].mean, rel=0.03)
    batches = lengths.reshape(-1, 4)
    assert 4 * batches.max(axis=1).sum() / lengths.sum() == pytest.approx(ratio, rel=0.1)


# Options


def test_the_model_of_1b():
    chosen = paper.parse(["--device", "cuda", "--model", "1b"])
    chosen.device = "meta"
    with torch.device("meta"):
        model = paper_training.build(chosen, 49)
    assert model.num_parameters() == 1_235_814_400
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.config.max_position_embeddings == 4 * 4096
    with pytest.raises(ValueError, match="128256 tokens, and the documents 200000"):
        paper_training.build(chosen, 200_000)


# The command


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """What the command wrote, begun by a call that had no time and ended by another one."""
    path = tmp_path_factory.mktemp("paper") / "paper.json"
    few = "--data flan --documents 8 --scale 16 --max-length 40 --batch-size 3 --steps 2 --timed 4 --rounds 1".split()
    return command(path, [*few, "--threads", "1"])


def command(path, arguments):
    with pytest.raises(SystemExit) as ended:
        paper.main([*arguments, "--json", str(path), "--minutes", "0"])
    assert ended.value.code == paper.UNFINISHED
    assert json.loads(path.read_text())["data"]["flan"]["trained"] == {}
    with contextlib.suppress(SystemExit):  # so few documents need not validate better
        paper.main([*arguments, "--json", str(path)])
    return json.loads(path.read_text())


def test_a_run_prints_every_arm_and_every_check(result):
    text = "\n".join(paper_table.describe(result))
    assert all(text.count(f"\n{arm:<22}") == 3 for arm in ARMS)
    assert len(max(text.split("\n"), key=len)) <= 160
    equal = [passed for passed, line in result["checks"] if MINI_BATCH in line]
    assert equal == [True, True]
    assert text.count("PASS") + text.count("FAIL") == len(result["checks"])


def test_what_does_not_hold_fails(result):
    changed = copy.deepcopy(result)
    arms = changed["data"]["flan"]["arms"]
    arms[MINI_BATCH]["common"]["train"] += 6e-4
    arms[FIXED_POSID]["epoch"]["validation"] = arms[FIXED]["epoch"]["validation"] + 0.1
    arms[FIXED_POSID]["common"]["validation"] = arms[FIXED]["common"]["validation"]
    changed["checks"] = paper_table.checks(changed)
    failed = [line for passed, line in changed["checks"] if not passed and line.startswith("flan")]
    assert len(failed) == 2
    assert "losses of MiniBatch + PosID are padding's within 5e-04: train 6.0e-04" in failed[0]
    assert "validates no worse than FixedLength: +0.100" in failed[1]
    assert f"FAIL  {failed[0]}" in [*paper_table.describe(changed)]


def test_ratios_stand_beside_those_of_the_paper(result):
    data = copy.deepcopy(result["data"]["flan"])
    data["arms"][PADDING] |= {"tokens per second": 1000.0, "peak bytes": 100 * 2**20}
    data["arms"][MINI_BATCH] |= {"tokens per second": 1900.0, "peak bytes": 80 * 2**20}
    lines = paper_table.table("flan", data, result["settings"])
    line = next(line for line in lines if line.startswith(MINI_BATCH))
    assert line.split()[-6:] == ["1900", "1.90", "1.89..1.96", "80.0", "0.80", "0.76..0.82"]
