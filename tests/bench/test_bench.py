"""`autopack bench`: what is said of noise, that all arms run the same documents, its report, and what it refuses."""

import json
import math
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autopack import tiny
from autopack.bench.batches import ARMS, BASELINE
from autopack.bench.compare import TOLERANCES, Comparison, RaceSettings, compare
from autopack.bench.contest import Outcome
from autopack.bench.race import Entrant, Spread, race, verdict
from autopack.bench.report import report_of
from autopack.cli import main
from tests.support.refusals import refused

QUICK = ["--size", "tiny", "--max-length", "40", "--batch-size", "3", "--batches", "2", "--rounds", "6"]
MEASURED = st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=40)
NAMES = [arm.name for arm in ARMS]


def bench(*arguments):
    return main(["bench", *arguments])


# What is said of noise


@given(MEASURED)
def test_an_interval_is_shown_with_no_more_digits_than_it_has_and_judged_as_it_is_shown(values):
    spread = Spread.of(values)
    assert spread.low <= spread.median <= spread.high
    assert {spread.low, spread.high} <= set(values)
    assert spread.count == len(values)
    shown, close = spread.rounded, 1e-6 * abs(spread.median)
    assert shown.low <= spread.low + close
    assert shown.high >= spread.high - close
    assert spread.unit >= (spread.high - spread.low) / 50 * (1 - 1e-9), "of half the interval, 25 units at most"
    assert spread.unit >= spread.median / 1000
    wanted = "faster" if shown.low > 1 else "slower" if shown.high < 1 else "too noisy to tell"
    assert verdict(spread) == (wanted if len(values) >= 6 else "too few rounds")


@pytest.mark.parametrize(
    ("values", "shown", "said"),
    [
        ([2.31, 2.374, 2.42], "2.37 (2.31..2.42)", "faster"),
        ([1.18, 5.93, 9.9], "6 (1..10)", "too noisy to tell"),
        ([0.7, 0.72, 0.74], "0.720 (0.700..0.740)", "slower"),
        ([1.0012, 1.0015, 1.002], "1.00 (1.00..1.01)", "too noisy to tell"),
        ([5.0, 5.0, 5.0], "5.00 (5.00..5.00)", "faster"),
        ([12340.0, 12500.0, 13900.0], "12,500 (12,300..13,900)", "faster"),
    ],
)
def test_digits_and_verdicts(values, shown, said):
    spread = Spread.of(values * 2)  # the least and the greatest twice: the interval is theirs
    assert (str(spread), verdict(spread)) == (shown, said)
    assert verdict(Spread.of(values)) == "too few rounds"


@pytest.mark.parametrize("count", [6, 9, 15, 40])
def test_from_six_values_on_the_interval_holds_the_true_median_in_95_of_100_cases(count):
    drawn = np.random.default_rng(count).lognormal(0, 1, (4000, count))
    spreads = [Spread.of(values.tolist()) for values in drawn]
    assert np.mean([spread.low <= 1 <= spread.high for spread in spreads]) > 0.94
    if count > 10:
        assert all(spread.low > min(values) for spread, values in zip(spreads, drawn, strict=True))


# The loop


def test_every_round_begins_with_another_arm_in_its_own_state_and_a_failed_one_leaves():
    seen = []

    @contextmanager
    def state(name):
        seen.append(f"+{name}")
        yield
        seen.append(f"-{name}")

    def fail_late():
        if seen.count("+b") == 2:
            raise MemoryError

    def attempt():
        try:
            return Entrant(fail_late, lambda: state("b"), lambda: seen.append("ready"))()
        except MemoryError:
            return None

    rounds = []
    arms = {"a": Entrant(lambda: seen.append("a")), "b": attempt}
    laps = race(arms, 3, report=lambda number, _: rounds.append(number))
    assert seen == ["a", "+b", "ready", "-b", "+b", "ready", "a", "a"]
    assert {name: len(of) for name, of in laps.items()} == {"a": 3}
    assert rounds == [1, 2, 3]


@pytest.mark.parametrize(("until", "wanted"), [(0.0, 2), (math.inf, 5)])
def test_rounds_go_on_until_the_time_is_over_and_at_least_so_many(until, wanted):
    waits = []
    laps = race({"a": Entrant(int, wait=lambda: waits.append(1))}, 5, until=until, least=2)["a"]
    assert len(laps) == wanted
    assert len(waits) == 2 * wanted, "before a lap and after it"
    assert all(lap["wall"] >= 0 for lap in laps)


# The arms


# The command


def test_every_arm_is_timed_and_written(tmp_path, capsys):
    file = tmp_path / "bench.json"
    assert bench("llama", *QUICK, "--json", str(file)) == 0
    printed = capsys.readouterr().out
    found = json.loads(file.read_text())
    assert list(found["arms"]) == NAMES
    assert (found["rounds"], found["model"]["type"], found["model"]["device"]) == (6, "llama", "cpu")
    assert found["tokens"] == sum(map(sum, found["documents"]))
    assert [len(batch) for batch in found["documents"]] == [3, 3]
    assert found["columns"]["as drawn"] >= found["columns"]["grouped"] >= found["tokens"]
    for name, arm in found["arms"].items():
        assert (arm["failed"], arm["same loss"]) == (None, True), (name, arm)
        assert len(arm["seconds"]) == 6
        assert min(arm["seconds"]) > 0
        assert arm["peak bytes"] > 4 * found["model"]["parameters"]
        speed, ratio = arm["tokens per second"], arm["speed of padded"]
        assert speed["median"] == pytest.approx(np.median(found["tokens"] / np.array(arm["seconds"])))
        assert ratio["low"] <= ratio["median"] <= ratio["high"]
        assert arm["verdict"] in ("what the others are compared with", "faster", "slower", "too noisy to tell")
        assert name in printed
    assert found["arms"]["padded"]["speed of padded"]["median"] == 1
    assert max(map(len, printed.splitlines())) <= 80


def test_lengths_are_read_as_estimate_reads_them_and_cut(tmp_path, capsys):
    file, lengths = tmp_path / "bench.json", tmp_path / "lengths.npy"
    np.save(lengths, np.array([7, 11, 7, 90, 11, 7]))
    assert bench("llama", *QUICK, "--lengths", str(lengths), "--forward", "--json", str(file)) == 0
    found = json.loads(file.read_text())
    assert sorted(length for batch in found["documents"] for length in batch) == [7, 7, 7, 11, 11, 40]
    assert f"{lengths}: 6 documents, 1 cut to 40 tokens" in " ".join(capsys.readouterr().out.split())


def test_a_saved_model_is_timed_and_its_positions_are_minded(tmp_path, capsys):
    folder, lengths = tmp_path / "model", tmp_path / "lengths.json"
    tiny.build("gpt2", max_position_embeddings=64).save_pretrained(folder)
    lengths.write_text(json.dumps([20, 65, 30, 10, 5, 12]))
    known = [str(folder), "--lengths", str(lengths), *"--batch-size 3 --batches 2 --rounds 1 --forward".split()]
    assert bench(*known) == 2
    said = capsys.readouterr().err
    assert "the longest document has 65 tokens, and GPT2LMHeadModel takes 64; --max-length 64 cuts" in said
    assert bench(*known, "--max-length", "64") == 0
    assert "fewer than 6 rounds cannot tell a difference from noise" in " ".join(capsys.readouterr().out.split())


# What an arm does to the others


def one_by_one(most):
    """The name of an attention implementation that has memory for so many columns at a time."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    def attend(module, query, *args, **kwargs):
        if query.shape[0] * query.shape[2] > most:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 7.00 GiB\nand so on")
        return sdpa_attention_forward(module, query, *args, **kwargs)

    AttentionInterface.register("one_by_one", attend)
    AttentionMaskInterface.register("one_by_one", sdpa_mask)
    return "one_by_one"


def test_arms_without_memory_say_so_and_the_others_go_on():
    model = tiny.build("llama", attn_implementation=one_by_one(most=30))
    result = compare(model, np.array([30, 12, 14, 9]), RaceSettings(batch_size=4, rounds=3, batches=1))
    result.model |= {"name": "a llama", "lengths": "some"}
    outcomes = {outcome.arm.name: outcome for outcome in result.outcomes}
    for name in NAMES[:3]:
        assert (outcomes[name].failed, outcomes[name].timed) == ("out of memory", False)
    for name in NAMES[3:]:
        assert (outcomes[name].failed, len(outcomes[name].seconds)) == (None, 3)
        assert (outcomes[name].ratio, outcomes[name].says) == (None, "nothing to compare with")
    rows = [line for line in report_of(result).text(80).splitlines() if line.startswith(tuple(NAMES))]
    assert [line.endswith("out of memory") for line in rows] == [True, True, True, False, False]
    assert json.dumps(result.as_dict())


def bare_result(name="a llama"):
    """A result of a machine and a model of which only what has to be is known."""
    outcomes = []
    for arm in ARMS:
        first = outcomes[0] if outcomes else None
        outcomes.append(Outcome(arm, 7, first, TOLERANCES["float32"], 4.0, seconds=[1.0, 1.1, 1.2]))
    where = {"device": "A CPU", "cores": 2, "threads": 1, "load at start": 3.0, "load at end": 3.0}
    where |= {"torch": "2", "transformers": "5"}
    model = {"dtype": "float32", "name": name, "lengths": "some", "parameters": 1e6, "attention": "sdpa"}
    return Comparison(RaceSettings(), where, model, [[3, 4]], {"as drawn": 8, "grouped": 8}, outcomes)


def test_an_arm_with_another_loss_is_wrong(capsys):
    result = bare_result()
    outcomes = result.outcomes
    outcomes[-1].loss = 4.4
    outcomes[2].loss = 4.4  # stock's rows are known to leak
    assert [outcome.arm.name for outcome in result.wrong] == ["enabled, packed rows"]
    said = " ".join(report_of(result).text(80).split())
    assert 'WRONG: "enabled, packed rows" has a loss of 4.4000, off padded\'s 4.0000 by 10%' in said
    assert "A CPU, 2 cores, threads: 1, load 3.0 before and 3.0 after" in said
    outcomes[-1].loss = float("nan")
    assert result.wrong == [outcomes[-1]]


def test_models_without_a_loss_over_tokens_are_refused():
    for task, model_type in (("sequence-classification", "bert"), ("seq2seq", "t5")):
        with refused("not-timed", match="causal or masked language model"):
            compare(tiny.build(model_type, task=task), np.array([3, 4]), RaceSettings())


@pytest.mark.exhaustive
def test_the_time_decides_how_many_rounds_there_are():
    model = tiny.build("llama")
    rounds = []
    settings = RaceSettings(batch_size=2, seconds=3)
    result = compare(model, np.full(64, 8), settings, progress=rounds.append)
    assert result.rounds >= 6
    assert result.outcomes[0].arm == BASELINE
    assert rounds == [*range(1, result.rounds + 1)]


def test_sizes_hold_for_other_types_too():
    from autopack.bench.subjects import build, longest_document

    def small(model_type):
        return build(model_type, "small", "causal-lm", 3000, attn=None, dtype=torch.float32, device="cpu", seed=0)

    for model in map(small, ("llama", "gpt2", "mamba")):
        assert (model.config.hidden_size, model.config.num_hidden_layers) == (128, 2)
        assert model.num_parameters() > 500_000
        assert longest_document(model) in (3008, None)
    assert small("mistral").config.sliding_window == 4096, "the type's own, and not that of tiny models"


def test_nothing_is_written_where_nothing_was_asked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert bench("llama", *QUICK, "--forward") == 0
    assert list(Path().iterdir()) == []
