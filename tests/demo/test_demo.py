"""The demo: its corpus, both ways of stacking the same documents, the small training, and its
table."""

from dataclasses import replace

import pytest

from autopack import demo
from autopack.cli import main
from autopack.demo import (
    ENABLED,
    PADDED,
    STOCK,
    DemoSettings,
    collect_documents,
    compare,
    draw_batches,
    write_table,
)
from tests.support.refusals import refused

SMALL = DemoSettings(steps=4, batch_size=6, longest=96)


@pytest.fixture(scope="module")
def texts():
    return collect_documents()


@pytest.fixture(scope="module")
def result():
    return compare(SMALL)


def test_corpus_has_distinct_documents_of_skewed_lengths(texts):
    lengths = sorted(map(len, texts))
    median = lengths[len(lengths) // 2]
    assert len(set(texts)) == len(texts) >= demo.FEWEST
    assert lengths[0] >= demo.SHORTEST
    assert sum(lengths) / len(lengths) > 1.5 * median
    assert lengths[-1] > 10 * median


def test_corpus_parses_files_and_never_runs_them(tmp_path):
    functions = [
        f"def f{n}():\n    '''{'What the function does, in words. ' * 3}{n}'''\n"
        for n in range(200)
    ]
    (tmp_path / "documented.py").write_text("raise SystemExit('imported')\n" + "".join(functions))
    (tmp_path / "broken.py").write_text("def (:\n")
    (tmp_path / "undecodable.py").write_bytes(b"'''\xff\xfe" + b"x" * 100 + b"'''")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "skipped.py").write_text(f"'''{'left out ' * 20}'''")
    found = collect_documents(tmp_path)
    assert len(found) == 200
    assert all(text.startswith("What the function does") for text in found)


def test_corpus_that_is_too_small_says_what_to_do(tmp_path):
    with refused(
        "corpus-too-small",
        match=rf"wants at least 128 texts, but found 0 under {tmp_path}.*Run the demo with",
    ):
        collect_documents(tmp_path)


def test_batches_take_every_example_once_per_epoch_and_depend_on_the_seed():
    few = [{"input_ids": [n]} for n in range(12)]
    batches, again, other = (draw_batches(few, size=4, steps=6, seed=seed) for seed in (1, 1, 2))
    drawn = [example["input_ids"][0] for batch in batches for example in batch]
    assert sorted(drawn[:12]) == sorted(drawn[12:]) == list(range(12))
    assert drawn[:12] != drawn[12:]
    assert batches == again != other


def with_losses(result, losses, name=ENABLED):
    return replace(result, arms={**result.arms, name: replace(result.arms[name], losses=losses)})


def test_losses_agree_and_only_the_stock_row_leaks(result):
    padded = result.arms[PADDED].losses
    assert [len(arm.losses) for arm in result.arms.values()] == [SMALL.steps] * 3
    assert padded[-1] < padded[0]
    assert result.same(ENABLED)
    assert not result.same(STOCK)
    assert result.difference(STOCK) > 1e-3


def test_table_says_what_was_measured(result):
    table = write_table(result)
    padded, _, packed = result.arms.values()
    assert f"{len(result.lengths):,} documents" in table
    assert f"{padded.tokens:,}" in table
    assert f"{packed.tokens:,}" in table
    assert f"{result.speed(ENABLED):.2f}x" in table
    rows = [
        line
        for line in table.splitlines()
        if line.startswith(tuple(f"{name}  " for name in result.arms))
    ]
    assert [row.split()[-1] for row in rows] == ["equal", "LEAKS", "equal"]
    assert "FAILED" not in table
    assert max(map(len, table.splitlines())) <= 120


@pytest.mark.parametrize("last", [1 + 1e-4, float("nan")])
def test_losses_that_differ_are_failures(result, last):
    losses = result.arms[ENABLED].losses
    different = with_losses(result, [*losses[:-1], losses[-1] * last])
    assert not different.same(ENABLED)
    assert write_table(different).splitlines()[-1].startswith("FAILED: the losses")


@pytest.mark.parametrize("off", [1.0, 2.0])
def test_command_prints_the_table(off, result, monkeypatch, capsys):
    found = with_losses(result, [off * loss for loss in result.arms[PADDED].losses])
    monkeypatch.setattr(demo, "compare", lambda *given: found)
    assert main(["demo", "--steps", "1"]) == (0 if off == 1 else 1)
    assert capsys.readouterr().out == write_table(found) + "\n"
