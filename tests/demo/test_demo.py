"""The demo: its corpus, its two ways of stacking the same documents, the small training, and its table."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import autopack
from autopack.demo import corpus
from autopack.demo.batches import END_OF_TEXT_ID, draw_batches, lengths_of, pad, token_counts, tokenize, train_tokenizer
from autopack.demo.corpus import collect_documents
from autopack.demo.table import verdict, write_table
from autopack.demo.training import LlamaComparison, Settings, compare
from tests.support.refusals import refused

TREE = Path(__file__).parents[2]
SMALL = Settings(steps=4, batch_size=6, longest=96, vocabulary=512, hidden=64, layers=2)


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return collect_documents()


@pytest.fixture(scope="module")
def examples(texts):
    return tokenize(texts[:600], train_tokenizer(texts[:600], 512), longest=96)


@pytest.fixture(scope="module")
def result() -> LlamaComparison:
    return compare(SMALL)


def demo(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "autopack", "demo", *arguments]
    variables = {**os.environ, **environment}
    return subprocess.run(command, cwd=TREE, env=variables, capture_output=True, text=True, timeout=600)


@pytest.mark.exhaustive
def test_corpus_is_the_same_every_time(texts):
    assert collect_documents() == texts


def test_corpus_has_distinct_documents_of_skewed_lengths(texts):
    lengths = sorted(map(len, texts))
    median = lengths[len(lengths) // 2]
    assert len(set(texts)) == len(texts) >= corpus.MINIMUM_DOCUMENTS
    assert lengths[0] >= corpus.MINIMUM_CHARACTERS
    assert sum(lengths) / len(lengths) > 1.5 * median
    assert lengths[-1] > 10 * median


def test_corpus_parses_files_and_never_runs_them(tmp_path):
    functions = [f"def f{n}():\n    '''{'What the function does, in words. ' * 3}{n}'''\n" for n in range(200)]
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
        "corpus-too-small", match=rf"wants at least 128 texts, but found 0 under {tmp_path}.*Run the demo with"
    ):
        collect_documents(tmp_path)


def test_sections_of_the_reference_alone_would_be_enough():
    sections = [text for text in corpus._reference_sections() if len(text) >= corpus.MINIMUM_CHARACTERS]
    assert len(set(sections)) >= corpus.MINIMUM_DOCUMENTS


def test_tokenizer_loses_nothing(texts):
    tokenizer = train_tokenizer(texts[:600], 512)
    for text in [*texts[600:620], "Zażółć gęślą jaźń, 漢字 \t\n 🙂"]:
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_examples_end_with_the_end_of_text_or_are_cut(examples):
    ends = [len(e["input_ids"]) == 96 or e["input_ids"][-1] == END_OF_TEXT_ID for e in examples]
    assert all(ends)
    assert any(len(e["input_ids"]) == 96 for e in examples)


def test_batches_take_every_example_once_per_epoch_and_depend_on_the_seed(examples):
    few = [{"input_ids": [n]} for n in range(12)]
    batches = draw_batches(few, size=4, steps=6, seed=1)
    drawn = [example["input_ids"][0] for batch in batches for example in batch]
    assert sorted(drawn[:12]) == sorted(drawn[12:]) == list(range(12))
    assert drawn[:12] != drawn[12:]
    assert batches == draw_batches(few, size=4, steps=6, seed=1)
    assert batches != draw_batches(few, size=4, steps=6, seed=2)


def test_both_ways_of_stacking_hold_the_same_tokens_and_targets(examples):
    collate = autopack.PackingCollator()
    for batch in draw_batches(examples, size=7, steps=5, seed=0):
        padded, packed = pad(batch), collate(batch)
        real = padded["attention_mask"].bool()
        assert padded["input_ids"][real].tolist() == packed["input_ids"].flatten().tolist()
        assert packed["input_ids"].shape[0] == 1
        shifted_padded, shifted_packed = padded["labels"][:, 1:], packed["labels"][:, 1:]
        assert shifted_padded[shifted_padded != -100].tolist() == shifted_packed[shifted_packed != -100].tolist()
        counted = token_counts(lengths_of([batch]))
        assert counted == (packed["input_ids"].numel(), padded["input_ids"].numel())


def test_losses_agree_and_only_the_stock_row_leaks(result):
    assert len(result.losses["padded"]) == len(result.losses["packed"]) == SMALL.steps
    assert result.losses_equal
    assert result.losses["padded"][-1] < result.losses["padded"][0]
    assert result.leak.exact
    assert not result.stock_leak.exact
    assert result.stock_leak.influence_of_others > 1e-3
    assert result.succeeded


@pytest.mark.exhaustive
def test_same_seed_gives_the_same_training(result):
    again = compare(SMALL)
    assert again.losses["padded"] == pytest.approx(result.losses["padded"], rel=1e-6)
    assert compare(replace(SMALL, seed=1)).losses["padded"] != pytest.approx(result.losses["padded"], rel=1e-6)


def test_table_says_what_was_measured(result):
    table = write_table(result)
    assert f"{result.texts:,} documents" in table
    assert f"{result.padded_tokens:,}" in table
    assert f"{result.real_tokens:,}" in table
    assert f"{1 - result.real_tokens / result.padded_tokens:.1%}" in table
    assert f"{result.losses['padded'][0]:.6f}" in table
    assert "largest relative difference in 4 steps" in table
    assert "equal within float32 rounding" in table
    assert "NOT equal" not in table
    assert "LEAKS" in table
    assert f"{result.speedup('packed'):.2f}x" in table
    assert table.endswith(verdict(result))
    assert max(map(len, table.splitlines())) <= 110


def test_losses_that_differ_and_leaks_are_failures(result):
    losses = [*result.losses["packed"][:-1], result.losses["packed"][-1] * (1 + 1e-4)]
    different = replace(result, losses={**result.losses, "packed": losses})
    assert not different.succeeded
    assert "NOT equal within float32 rounding" in write_table(different)
    assert verdict(different).startswith("FAILED: the losses")
    leaking = replace(result, leak=result.stock_leak)
    assert not leaking.succeeded
    assert verdict(leaking).startswith("FAILED: documents")


def test_losses_that_are_not_numbers_are_failures(result):
    losses = {**result.losses, "packed": [float("nan")] * SMALL.steps}
    assert not replace(result, losses=losses).succeeded


@pytest.mark.exhaustive
def test_command_prints_the_table():
    finished = demo("--steps", "1", "--threads", "1")
    assert finished.returncode == 0, finished.stderr
    assert "equal within float32 rounding" in finished.stdout
    assert "1 CPU threads" in finished.stdout
    assert "1/1" in finished.stderr
