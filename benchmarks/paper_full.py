"""`benchmarks.paper --full`: the paper's comparison on undivided lengths, in units that a later call goes on from.

Every arm trains for one epoch, and is timed step by step in rounds in which every arm runs once. A JSON file holds each
of these as soon as it is measured: whoever is interrupted, or has no more time, calls the same command again.

What several devices would wait for is counted, not measured: columns of mini-batches over as many documents as the
paper has, eight mini-batches at a time, of which the largest is waited for.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from autopack.bench.race import by_the_clock, race
from autopack.bench.subjects import DISTRIBUTIONS, draw
from benchmarks import paper_table
from benchmarks.paper_arms import ARMS, MINI_BATCH, PADDING, SORTED, Arm, Piece, Shape
from benchmarks.paper_data import END, Corpus, load
from benchmarks.paper_training import MODELS, build, on, prepare, shape_of, train, update

DEVICES = 8
"""GPUs of the paper, which wait for each other in every step."""
COUNTED = 20_000
"""Documents that are counted: as many as the paper has."""
PROBE = (4, 512)
"""Rows and columns of the step whose speed says how long the whole takes."""


def run(options: argparse.Namespace, where: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any] | None:
    """Measure what the JSON file does not have yet; None where `--minutes` are over before all is measured."""
    result = _begun(options.json, where, settings)
    end = time.monotonic() + 60 * options.minutes
    begun = time.monotonic()
    if "expected" not in result:
        result["expected"] = expected(options)
    found = result["expected"]
    print(
        f"{found['operations'] / 1e12:.1f} TFLOP; a step of {found['columns']} columns at "
        f"{found['operations per second'] / 1e9:.0f} GFLOP/s: about {found['seconds'] / 60:.0f} minutes for all",
        flush=True,
    )

    def keep() -> None:
        nonlocal begun
        result["seconds"] += time.monotonic() - begun
        begun = time.monotonic()
        _keep(options.json, result)

    whole = all(_measure(name, options, result, end, keep) for name in options.data)
    if not whole:
        keep()
        print(f"{options.minutes:g} minutes are over; the same command goes on from {options.json}", flush=True)
        return None
    for name, data in result["data"].items():
        data["arms"] = {arm: data["trained"][arm] | _speed(data, arm) for arm in ARMS}
        data["waits"] = waits(name, options) if name in DISTRIBUTIONS else {}
    result["checks"] = [*paper_table.equal_losses(result), *_step_by_step(result)]
    return result


def _begun(path: Path | None, where: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """What an earlier call has measured, or nothing yet; raises `ValueError` where that was something else."""
    plain = json.loads(json.dumps(settings))
    new: dict[str, Any] = {"benchmark": "paper, full", "origin": where, "settings": plain, "seconds": 0.0, "data": {}}
    if path is None or not path.exists():
        return new
    found = json.loads(path.read_text())
    names = ("torch", "transformers", "device", "cores", "threads")
    now = {"benchmark": new["benchmark"], **plain, **{name: where.get(name) for name in names}}
    then = {"benchmark": found.get("benchmark"), **found.get("settings", {})}
    then |= {name: found.get("origin", {}).get(name) for name in names}
    if other := sorted(name for name in {*now, *then} if now.get(name) != then.get(name)):
        name = other[0]
        said = f"its {name} is {then.get(name)!r}, wanted {now.get(name)!r}"
        raise ValueError(f"{path}: {said}; delete it, or name another file")
    return found


def _keep(path: Path | None, result: dict[str, Any]) -> None:
    """Write a result under its name when it is whole."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f".{path.name}.{os.getpid()}")
        beside.write_text(json.dumps(result, indent=1) + "\n")
        beside.replace(path)


def _measure(
    name: str, options: argparse.Namespace, result: dict[str, Any], end: float, keep: Callable[[], None]
) -> bool:
    """Train and time the arms on one data set, as far as time allows; whether all is there."""
    corpus, shape = load(name, options), shape_of(options)
    data = result["data"].setdefault(name, {"trained": {}, "rounds": []})
    data |= {"origin": corpus.origin, "documents": len(corpus.train), "tokens": int(corpus.lengths.sum())}
    data |= {"held out": len(corpus.validation), "timed tokens": int(corpus.lengths[: options.timed].sum())}
    common = options.steps or min(len(arm.choose(corpus.lengths, shape, 0)) for arm in ARMS.values())
    for arm, way in ARMS.items():
        if arm not in data["trained"]:
            if time.monotonic() >= end:
                return False
            print(f"{name}: {arm}", flush=True)
            data["trained"][arm] = train(way, corpus, options, common).summary(common)
            keep()
    if len(data["rounds"]) >= options.rounds:
        return True
    done = data["rounds"]

    def report(number: int, laps: dict[str, list[Any]]) -> None:
        done.append({arm: of[-1] for arm, of in laps.items()})
        keep()
        said = ", ".join(f"{arm} {sum(done[-1][arm]['wall']):.1f} s" for arm in ARMS)
        print(f"{name}, round {number} of {options.rounds}: {said}", flush=True)

    # What is timed are the steps of a run, which says so itself.
    race(_timed(corpus, options), options.rounds, begun=len(done), until=end, least=0, clock=_itself, report=report)
    return len(done) >= options.rounds


def _itself(run: Callable[[], Any]) -> Any:
    return run()


def _timed(corpus: Corpus, options: argparse.Namespace) -> dict[str, Callable[[], dict[str, Any]]]:
    """By arm, what runs an epoch of the first `--timed` documents and says what its steps took."""
    import torch

    lengths, shape = corpus.lengths[: options.timed], shape_of(options)
    models = {enabled: prepare(enabled, options, corpus.vocabulary) for enabled in (False, True)}
    optimizers = {enabled: torch.optim.AdamW(model.parameters(), lr=1e-5) for enabled, model in models.items()}
    runs = {}
    for name, arm in ARMS.items():
        steps = arm.choose(lengths, shape, 0)
        calls = [on(options.device, arm.collate(corpus.train, pieces, shape)) for pieces in steps]

        def run(calls: list[dict[str, Any]] = calls, enabled: bool = arm.enabled) -> dict[str, Any]:
            step = partial(update, models[enabled], optimizers[enabled])
            laps = [by_the_clock(lambda call=call: step(call).item()) for call in calls]
            columns = [call["input_ids"].numel() for call in calls]
            return {"wall": [lap["wall"] for lap in laps], "cpu": sum(lap["cpu"] for lap in laps), "columns": columns}

        least = min(calls, key=lambda call: call["input_ids"].numel())
        update(models[arm.enabled], optimizers[arm.enabled], least)  # the first call of an arm makes what stays
        runs[name] = run
    return runs


def _speed(data: dict[str, Any], arm: str) -> dict[str, Any]:
    """Real tokens per second of an arm, and its speed over padding's: median, least and greatest of the rounds."""
    sums = [sum(found[arm]["wall"]) for found in data["rounds"]]
    ratios = [sum(found[PADDING]["wall"]) / here for found, here in zip(data["rounds"], sums, strict=True)]
    cpu = [found[PADDING]["cpu"] / found[arm]["cpu"] for found in data["rounds"]]
    return {
        "tokens per second": data["timed tokens"] / statistics.median(sums),
        "speed": [min(ratios), statistics.median(ratios), max(ratios)],
        "cpu": statistics.median(cpu),
    }


def _step_by_step(result: dict[str, Any]) -> Iterator[tuple[bool, str]]:
    """Whether MiniBatchPacking's loss is padding's in every single step."""
    tolerance = paper_table.TOLERANCES[result["settings"]["dtype"]]
    for name, data in result["data"].items():
        losses = [np.array(data["arms"][arm]["losses"]) for arm in (PADDING, MINI_BATCH)]
        most = float(np.abs(losses[0] - losses[1]).max())
        what = f"{name}: in each of {len(losses[0])} steps the loss of {MINI_BATCH} is padding's within {tolerance:.0e}"
        yield most <= tolerance, f"{what}: {most:.1e} at most"


# What is counted


def columns_of(arm: str, pieces: list[Piece]) -> int:
    """Columns that a step of an arm computes, as if rows of FixedLength were all full."""
    lengths = [piece.length for piece in pieces]
    return len(lengths) * max(lengths) if arm in (PADDING, SORTED) else sum(lengths)


def waits(name: str, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """By arm, columns per real token, and those of the largest of `DEVICES` mini-batches over their mean."""
    shape, count = shape_of(options), COUNTED // 10 if options.trial else COUNTED
    lengths = draw(DISTRIBUTIONS[name], count, shape.max_length, shape.seed, options.scale)
    found = {}
    for arm, way in ARMS.items():
        columns = np.array([columns_of(arm, pieces) for pieces in way.choose(lengths, shape, 0)])
        steps = columns[: len(columns) // DEVICES * DEVICES].reshape(-1, DEVICES)
        waited = float(steps.max(axis=1).sum() / steps.mean(axis=1).sum())
        found[arm] = {"columns": float(columns.sum() / lengths.sum()), "largest over mean": waited}
    return found


def operations(arm: Arm, pieces: list[Piece], shape: Shape, model: dict[str, Any], vocabulary: int) -> float:
    """Floating point operations of a training step: two per weight and column and pair, thrice with gradients."""
    hidden, layers = model["hidden_size"], model["num_hidden_layers"]
    weights = layers * (4 * hidden**2 + 3 * hidden * model["intermediate_size"]) + vocabulary * hidden
    lengths = np.array([piece.length for piece in pieces])
    if arm.enabled:
        columns, pairs = lengths.sum(), (lengths**2).sum() / 2
    elif arm.choose is ARMS[PADDING].choose or arm.choose is ARMS[SORTED].choose:
        columns, pairs = len(lengths) * lengths.max(), len(lengths) * lengths.max() ** 2  # all of a mask is computed
    else:
        columns, pairs = lengths.sum(), lengths.sum() * shape.max_length / 2
    return 3 * (2 * float(columns) * weights + 4 * float(pairs) * hidden * layers)


def expected(options: argparse.Namespace) -> dict[str, float]:
    """How long all takes: operations of all steps, at the speed of a small step on a padded batch."""
    import torch

    model, shape, vocabulary = MODELS[options.model], shape_of(options), 49
    total = 0.0
    for name in options.data:
        lengths = load(name, options).lengths
        for arm in ARMS.values():
            steps = [operations(arm, step, shape, model, vocabulary) for step in arm.choose(lengths, shape, 0)]
            timed = arm.choose(lengths[: options.timed], shape, 0)
            total += sum(steps) * (1 + 1 / 12) + 2 * max(steps)  # a third of an eighth for validation, twice; memory
            total += options.rounds * sum(operations(arm, step, shape, model, vocabulary) for step in timed)
    size, length = PROBE
    probe = build(options, vocabulary)
    optimizer = torch.optim.AdamW(probe.parameters(), lr=1e-5)
    ids = torch.full((size, length), END + 1, device=options.device)
    call = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
    laps = race({"": lambda: update(probe, optimizer, call).item()}, 4)[""]
    step = operations(ARMS[PADDING], [Piece(0, 0, length)] * size, shape, model, vocabulary)
    speed = step / min(lap["wall"] for lap in laps[1:])
    return {"operations": total, "columns": size * length, "operations per second": speed, "seconds": total / speed}


# In words


def describe(result: dict[str, Any]) -> str:
    """The whole result as text."""
    found = result["expected"]
    lines = [
        paper_table.describe(result),
        "",
        "Speed over padding's: median of rounds (least, greatest), processor time; times what the largest of "
        f"{DEVICES} mini-batches",
        f"makes {DEVICES} devices in step wait for, counted over {COUNTED:,} documents (in a trial a tenth).",
    ]
    for name, data in result["data"].items():
        lines += ["", f"{name:<22}{'x':>6}{'least':>7}{'most':>7}{'cpu':>7}{'columns':>9}{'waits':>7}{'in step':>9}"]
        for arm, of in data["arms"].items():
            least, median, most = of["speed"]
            line = f"{arm:<22}{median:>6.2f}{least:>7.2f}{most:>7.2f}{of['cpu']:>7.2f}"
            if wait := data["waits"].get(arm):
                line += f"{wait['columns']:>9.2f}{wait['largest over mean']:>7.2f}{in_step(data, arm):>9.2f}"
            lines.append(line)
    took = f"It took {result['seconds'] / 60:.0f} minutes. Expected: {found['seconds'] / 60:.0f}, of "
    took += f"{found['operations'] / 1e12:.1f} TFLOP at {found['operations per second'] / 1e9:.0f} GFLOP/s, "
    took += f"which a step of {found['columns']} columns does."
    return "\n".join([*lines, "", took])


def in_step(data: dict[str, Any], arm: str) -> float:
    """An arm's speed over padding's where `DEVICES` devices wait for the largest mini-batch of each step."""
    waited = data["waits"]
    return data["arms"][arm]["speed"][1] * waited[PADDING]["largest over mean"] / waited[arm]["largest over mean"]
