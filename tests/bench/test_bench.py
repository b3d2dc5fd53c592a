"""`autopack bench`: what is said of noise, that all arms run the same documents, its report, and
what it refuses."""

import json
import math
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autopack import tiny
from autopack.bench.compare import ARMS, BASELINE, Comparison, compare
from autopack.bench.race import (
    Entrant,
    Outcome,
    Spread,
    race,
    verdict,
)
from autopack.cli import main
from tests.support.refusals import refused

QUICK = "--size tiny --max-length 40 --batch-size 3 --seconds 1".split()
MEASURED = st.lists(st.floats(1e-3, 1e6), min_size=6, max_size=40)
NAMES = [arm.name for arm in ARMS]


def bench(*arguments):
    return main(["bench", *arguments])


# What is said of noise


@given(MEASURED)
def test_an_interval_is_of_measured_values(values):
    spread = Spread.of(values)
    assert spread.low <= spread.median <= spread.high
    assert {spread.low, spread.high} <= set(values)


@pytest.mark.parametrize(
    ("values", "shown", "noisy"),
    [
        ([2.31, 2.374, 2.42], "2.37 (2.31..2.42)", False),
        ([0.98, 1.3, 1.4], "1.30 (0.98..1.40)", True),
        ([1.0012, 1.0015, 1.002], "1.00 (1.00..1.00)", True),
        ([23.41, 24.0, 25.06], "24.0 (23.4..25.1)", False),
        ([12340.0, 12500.0, 13900.0], "12,500 (12,340..13,900)", False),
    ],
)
def test_digits_and_verdicts(values, shown, noisy):
    spread = Spread.of(values * 2)  # the least and the greatest twice: the interval is theirs
    assert (str(spread), verdict(spread)) == (shown, "too noisy to tell" if noisy else shown)


@pytest.mark.parametrize("count", [6, 40])
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


# The command


def found(capsys, *arguments):
    """What a comparison gives as JSON."""
    assert bench(*arguments, "--json") == 0
    return json.loads(capsys.readouterr().out)


def test_every_arm_is_timed_and_written(capsys):
    data = found(capsys, "llama", *QUICK, "--max-length", "400")
    about, documents = data["about"], data["documents"]
    assert (about["name"], about["device"]) == ("llama, tiny, random", "cpu")
    assert about["source"].startswith("drawn like flan's, ")
    assert about["source"].endswith(" cut to 400 tokens")
    assert len(documents) >= 2
    assert {len(batch) for batch in documents} == {3}
    columns = sum(3 * max(each) for each in documents)
    assert 0 < data["padding"] == pytest.approx(1 - sum(map(sum, documents)) / columns)
    assert list(data["arms"]) == NAMES
    for name, arm in data["arms"].items():
        assert (arm["failed"], arm["same_loss"]) == (None, True), (name, arm)
        assert arm["tokens"] == sum(map(sum, documents))
        assert len(arm["seconds"]) >= 6
        assert min(arm["seconds"]) > 0
        assert arm["peak_bytes"] > 4 * about["parameters"]
        speed, ratio = arm["tokens_per_second"], arm["speed_of_padded"]
        assert speed["median"] == pytest.approx(np.median(arm["tokens"] / np.array(arm["seconds"])))
        assert ratio["low"] <= ratio["median"] <= ratio["high"]
    assert data["arms"]["padded"]["speed_of_padded"]["median"] == 1


def test_lengths_are_read_as_estimate_reads_them_and_cut(tmp_path, capsys):
    lengths = tmp_path / "lengths.npy"
    np.save(lengths, np.array([7, 11, 7, 90, 11, 7]))
    data = found(capsys, "llama", *QUICK, "--lengths", str(lengths), "--forward")
    assert sorted(np.concatenate(data["documents"])) == [7, 7, 7, 11, 11, 40]
    assert data["about"]["source"] == f"{lengths}: 6 documents, 1 cut to 40 tokens"


def test_a_saved_model_is_timed_and_its_positions_are_minded(tmp_path, capsys):
    folder, lengths = tmp_path / "model", tmp_path / "lengths.json"
    tiny.build("gpt2", max_position_embeddings=64).save_pretrained(folder)
    lengths.write_text(json.dumps([20, 65, 30, 10, 5, 12]))
    assert (
        bench(
            str(folder), "--lengths", str(lengths), *"--batch-size 3 --seconds 1 --forward".split()
        )
        == 0
    )
    printed = capsys.readouterr().out
    assert "6 documents, 1 cut to 64 tokens" in " ".join(printed.split())
    assert all(f"\n{name}  " in printed for name in NAMES)
    assert max(map(len, printed.splitlines())) <= 100


# What an arm does to the others


def one_by_one(most):
    """The name of an attention implementation that has memory for so many columns at a time."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    def attend(module, query, *args, **kwargs):
        if query.shape[0] * query.shape[2] > most:
            raise torch.cuda.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 7.00 GiB\nand so on"
            )
        return sdpa_attention_forward(module, query, *args, **kwargs)

    AttentionInterface.register("one_by_one", attend)
    AttentionMaskInterface.register("one_by_one", sdpa_mask)
    return "one_by_one"


def test_arms_without_memory_say_so_and_the_others_go_on():
    model = tiny.build("llama", attn_implementation=one_by_one(most=30))
    result = compare(
        model, np.array([30, 12, 14, 9]), batch_size=4, seconds=0, name="a llama", source="some"
    )
    outcomes = {outcome.arm.name: outcome for outcome in result.outcomes}
    for name in NAMES[:1]:
        assert (outcomes[name].failed, outcomes[name].speed) == ("out of memory", None)
    for name in NAMES[1:]:
        assert (outcomes[name].failed, len(outcomes[name].seconds)) == (None, 6)
        assert outcomes[name].over(result.outcomes[0]) is None
    rows = [line for line in str(result).splitlines() if line.startswith(tuple(NAMES))]
    assert [line.endswith("out of memory") for line in rows] == [True, False, False]
    assert json.dumps(result.as_dict(), default=str)


def bare_result(name="a llama"):
    """A result of a machine and a model of which only what has to be is known."""
    outcomes = [Outcome(arm, 7, 4.0, True, seconds=[1.0, 1.1, 1.2]) for arm in ARMS]
    about = {
        "name": name,
        "dtype": "float32",
        "source": "some",
        "parameters": 1e6,
        "attention": "sdpa",
    }
    about |= {"work": "steps", "device": "A CPU", "threads": 1, "torch": "2", "transformers": "5"}
    return Comparison(about, [[3, 4]], 0.125, outcomes)


def test_an_arm_with_another_loss_is_wrong():
    result = bare_result()
    assert "has padded's loss on the same documents: 4.0000, within 0.0001 of it" in " ".join(
        str(result).split()
    )
    result.outcomes[-1].loss, result.outcomes[-1].same_loss = 4.4, False
    assert [outcome.arm.name for outcome in result.wrong] == ["enabled, packed rows"]
    said = " ".join(str(result).split())
    assert (
        '"enabled, packed rows" is WRONG; please report it: its loss is 4.4000, and padded\'s 4.0000.'
        in said
    )
    assert "has padded's loss" not in said
    assert "A CPU, threads: 1; torch 2, transformers 5" in said


@pytest.mark.parametrize("loss", [4.4, float("nan")])
def test_losses_that_differ_are_found(loss, monkeypatch):
    """Even one that is no number; in the last arm, an enabled one."""
    losses = iter([4.0] * (len(ARMS) - 1) + [loss])
    monkeypatch.setattr("autopack.bench.compare._loss", lambda model, calls: next(losses))
    result = compare(
        tiny.build("llama"), np.full(4, 8), batch_size=2, seconds=0, name="a llama", source="some"
    )
    assert result.wrong == [result.outcomes[-1]]


def test_models_without_a_loss_over_tokens_are_refused():
    for task, model_type in (("sequence-classification", "bert"), ("seq2seq", "t5")):
        with refused("not-timed", match="causal or masked language model"):
            compare(tiny.build(model_type, task=task), np.array([3, 4]))


@pytest.mark.exhaustive
def test_the_time_decides_how_much_is_timed():
    few, many = (
        compare(tiny.build("llama"), np.full(64, 8), batch_size=2, seconds=seconds)
        for seconds in (0, 20)
    )
    assert (len(few.documents), few.rounds) == (2, 6)
    assert len(many.documents) > 2
    assert many.rounds >= 6
    assert many.outcomes[0].arm == BASELINE


def test_sizes_hold_for_other_types_too():
    from autopack.bench.subjects import build, longest_document

    def small(model_type):
        return build(model_type, "small", "causal-lm", 3000, attn=None, dtype=torch.float32)

    for model in map(small, ("llama", "gpt2", "mamba")):
        assert (model.config.hidden_size, model.config.num_hidden_layers) == (128, 2)
        assert model.num_parameters() > 500_000
        assert longest_document(model) in (3008, None)
    assert small("mistral").config.sliding_window == 4096, (
        "the type's own, and not that of tiny models"
    )
