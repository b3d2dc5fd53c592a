"""The figures of arXiv 2407.09105 ("Enhancing Training Efficiency Using Packing with Flash Attention"), tables of ours
beside them, and what has to hold."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from autopack.bench.subjects import DISTRIBUTIONS, draw
from benchmarks.paper_arms import ARMS, FIXED, FIXED_POSID, MINI_BATCH, OFFLINE, PADDING, SORTED, Piece
from benchmarks.paper_training import shape_of

DEVICES = 8
"""GPUs of the paper, which wait for each other in every step."""
COUNTED = 20_000
"""Documents that are counted: as many as the paper has; in a trial a tenth."""
TOLERANCES = {"float32": 5e-4, "float64": 5e-4, "bfloat16": 5e-3}
"""Largest difference of a loss that counts as the same: three digits, and in bfloat16 what the paper's own figures for
padding and MiniBatchPacking differ by (Table 2: 0.000 to 0.004)."""


class Figures(NamedTuple):
    """A row of the paper: tokens per second and GPU, peak memory in MB, validation loss."""

    speed: float
    peak: float
    loss: float


TABLE_2 = {
    "Mistral-7B": {
        PADDING: Figures(742, 30625, 1.129),
        FIXED: Figures(2986, 30783, 1.306),
        OFFLINE: Figures(3010, 30783, 1.284),
        MINI_BATCH: Figures(1408, 24549, 1.127),
    },
    "Llama-2-7B": {
        PADDING: Figures(771, 29234, 1.266),
        FIXED: Figures(3091, 29433, 1.579),
        MINI_BATCH: Figures(1455, 23854, 1.262),
    },
    "Granite-8B-code": {PADDING: Figures(693, 36277, 1.169), MINI_BATCH: Figures(1358, 27538, 1.169)},
}
"""Table 2: FLAN_20k, 8 x A100-80GB with FSDP, one epoch, at most 4096 tokens, mini-batches of 4 per GPU."""
TABLE_4 = ((35, 1.294, 1.221), (281, 1.252, 1.170))
"""Table 4: Mistral-7B, FLAN_20k: steps, and the validation loss of FixedLengthPacking and FixedLengthPacking+PosID."""

Range = tuple[float, float]
Ratios = dict[str, tuple[Range, Range, Range | None]]
ORCAMATH: Ratios = {MINI_BATCH: ((1.36, 1.40), (0.94, 0.95), None)}
"""Section 4, OrcaMath_20k, over the models: tokens per second and peak memory of MiniBatchPacking over padding's."""


def published(data: str) -> Ratios:
    """By arm, the smallest and largest of the paper's models: speed and memory over padding's, loss less padding's."""
    if data != "flan":
        return ORCAMATH if data == "orcamath" else {}
    found: Ratios = {}
    for arm in ARMS:
        pairs = [(rows[arm], rows[PADDING]) for rows in TABLE_2.values() if arm in rows]
        if pairs:
            speed = [row.speed / base.speed for row, base in pairs]
            peak = [row.peak / base.peak for row, base in pairs]
            loss = [row.loss - base.loss for row, base in pairs]
            found[arm] = ((min(speed), max(speed)), (min(peak), max(peak)), (min(loss), max(loss)))
    return found


def range_of(bounds: Range | None, form: str, between: str = "..", none: str = "-") -> str:
    """Return a range in words, which is one number where its ends look alike."""
    return none if bounds is None else between.join(dict.fromkeys(format(bound, form) for bound in bounds))


def columns_of(arm: str, pieces: list[Piece]) -> int:
    """Return the columns that a step of an arm computes, as if rows of FixedLength were all full."""
    lengths = [piece.length for piece in pieces]
    return len(lengths) * max(lengths) if arm in (PADDING, SORTED) else sum(lengths)


def waits(name: str, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return by arm columns per real token, and those of the largest of `DEVICES` mini-batches over their mean."""
    shape, count = shape_of(options), COUNTED // 10 if options.trial else COUNTED
    lengths = draw(DISTRIBUTIONS[name], count, shape.max_length, shape.seed, options.scale)
    found = {}
    for arm, way in ARMS.items():
        columns = np.array([columns_of(arm, pieces) for pieces in way.choose(lengths, shape, 0)])
        steps = columns[: len(columns) // DEVICES * DEVICES].reshape(-1, DEVICES)
        waited = float(steps.max(axis=1).sum() / steps.mean(axis=1).sum())
        found[arm] = {"columns": float(columns.sum() / lengths.sum()), "largest over mean": waited}
    return found


def in_step(data: dict[str, Any], arm: str) -> float:
    """Return an arm's speed over padding's where `DEVICES` devices wait for the largest mini-batch of each step."""
    waited = data["waits"]
    return data["arms"][arm]["speed"][1] * waited[PADDING]["largest over mean"] / waited[arm]["largest over mean"]


def speed_of(data: dict[str, Any], arm: str) -> dict[str, Any]:
    """Return real tokens per second of an arm, and its speed over padding's: least, median and greatest of rounds."""
    ratios, cpu = ([of[PADDING][key] / of[arm][key] for of in data["rounds"]] for key in ("wall", "cpu"))
    return {
        "tokens per second": data["timed tokens"] / statistics.median(of[arm]["wall"] for of in data["rounds"]),
        "speed": [min(ratios), statistics.median(ratios), max(ratios)],
        "cpu": statistics.median(cpu),
    }


def describe(result: dict[str, Any]) -> Iterator[str]:
    """Yield the whole result in lines."""
    for name, data in result["data"].items():
        yield from (*table(name, data, result["settings"]), "")
    yield from (
        "x: over padding's; +: less padding's. Paper: arXiv 2407.09105v6, smallest to largest of its models: FLAN of",
        "Table 2 (Mistral-7B, Llama-2-7B, Granite-8B-code), OrcaMath of section 4. Tokens are real ones, not padding.",
        "Peak memory holds parameters and the optimizer's states too. Training losses are those of the last tenth of",
        "the steps, over each arm's own targets; validation is document by document, by a stock model. At equal steps,",
        "arms that fill their rows have seen several times the tokens of padding. In step: the speed where",
        f"{DEVICES} devices wait for the largest of {DEVICES} mini-batches, counted over {COUNTED:,} documents.",
        "",
        *(f"{'PASS' if passed else 'FAIL'}  {text}" for passed, text in result["checks"]),
        "",
        f"It took {result['seconds'] / 60:.0f} minutes.",
    )


def table(name: str, data: dict[str, Any], settings: Mapping[str, Any]) -> Iterator[str]:
    """The lines of one data set: speed and memory, then losses."""
    arms, paper = data["arms"], published(name)
    base, head = arms[PADDING], f"{'x':>6}{'paper':>12}"
    yield (
        f"{name}: {data['origin']}\n"
        f"{data['documents']} documents, {data['tokens']} tokens, {data['held out']} held out; "
        f"mini-batches of {settings['batch_size']}, rows of {settings['max_length']}; "
        f"Llama {settings['model']}, {settings['dtype']}, {settings['device']}"
    )
    yield ""
    yield f"{'':<22}{'steps':>6}{'padding':>9}{'tokens/s':>10}{head}{'peak MiB':>10}{head}"
    for arm, found in arms.items():
        speed, peak, _ = paper.get(arm, (None, None, None))
        ratios = [found[key] / base[key] for key in ("tokens per second", "peak bytes")]
        yield (
            f"{arm:<22}{found['steps']:>6}{found['padding']:>9.1%}"
            f"{found['tokens per second']:>10.0f}{ratios[0]:>6.2f}{range_of(speed, '.2f'):>12}"
            f"{found['peak bytes'] / 2**20:>10.1f}{ratios[1]:>6.2f}{range_of(peak, '.2f'):>12}"
        )
    yield from ("", f"{'':<22}{'x':>6}{'least':>7}{'most':>7}{'cpu':>7}{'columns':>9}{'waits':>7}{'in step':>9}")
    for arm, found in arms.items():
        least, median, most = found["speed"]
        line = f"{arm:<22}{median:>6.2f}{least:>7.2f}{most:>7.2f}{found['cpu']:>7.2f}"
        if wait := data["waits"].get(arm):
            line += f"{wait['columns']:>9.2f}{wait['largest over mean']:>7.2f}{in_step(data, arm):>9.2f}"
        yield line
    yield from ("", f"{'':<22}{'after one epoch':^48}{'after ' + str(base['common']['steps']) + ' steps':^27}")
    yield f"{'':<22}{'train':>9}{'validation':>12}{'+':>9}{'paper':>18}{'train':>9}{'validation':>12}{'+':>9}"
    for arm, found in arms.items():
        cells = {
            when: f"{found[when]['train']:>9.4f}{found[when]['validation']:>12.4f}"
            f"{found[when]['validation'] - base[when]['validation']:>+9.3f}"
            for when in ("epoch", "common")
        }
        loss = paper.get(arm, (None, None, None))[2]
        yield f"{arm:<22}{cells['epoch']}{range_of(loss, '+.3f'):>18}{cells['common']}"


def checks(result: dict[str, Any]) -> list[tuple[bool, str]]:
    """Return what has to hold, and whether it does."""
    more = step_by_step(result) if result["settings"]["full"] else no_worse(result)
    return [*equal_losses(result), *more]


def step_by_step(result: dict[str, Any]) -> Iterator[tuple[bool, str]]:
    """Yield whether MiniBatchPacking's loss is padding's in every single step."""
    tolerance = TOLERANCES[result["settings"]["dtype"]]
    for name, data in result["data"].items():
        losses = [np.array(data["arms"][arm]["losses"]) for arm in (PADDING, MINI_BATCH)]
        most = float(np.abs(losses[0] - losses[1]).max())
        what = f"{name}: in each of {len(losses[0])} steps the loss of {MINI_BATCH} is padding's within {tolerance:.0e}"
        yield most <= tolerance, f"{what}: {most:.1e} at most"


def equal_losses(result: dict[str, Any]) -> Iterator[tuple[bool, str]]:
    """Whether losses of MiniBatchPacking are padding's."""
    tolerance = TOLERANCES[result["settings"]["dtype"]]
    for name, data, when in _asked(result, PADDING):
        padding, mini_batch = (data["arms"][arm][when] for arm in (PADDING, MINI_BATCH))
        errors = {kind: abs(mini_batch[kind] - padding[kind]) for kind in ("train", "validation")}
        said = ", ".join(f"{kind} {error:.1e}" for kind, error in errors.items())
        what = f"{name}, {padding['steps']} steps: losses of {MINI_BATCH} are padding's within {tolerance:.0e}"
        yield max(errors.values()) <= tolerance, f"{what}: {said}"


def no_worse(result: dict[str, Any]) -> Iterator[tuple[bool, str]]:
    """Whether positions make the losses of FixedLengthPacking no worse."""
    paper = " and ".join(f"{posid - fixed:+.3f} ({steps} steps)" for steps, fixed, posid in TABLE_4)
    for name, data, when in _asked(result, FIXED):
        fixed, posid = (data["arms"][arm][when] for arm in (FIXED, FIXED_POSID))
        less = posid["validation"] - fixed["validation"]
        what = f"{name}, {fixed['steps']} steps: {FIXED_POSID} validates no worse than {FIXED}"
        yield less <= 0, f"{what}: {less:+.3f} (paper, Table 4: {paper})"


def _asked(result: dict[str, Any], arm: str) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Data sets and when their losses are compared: an epoch of an arm is often the common number of steps."""
    for name, data in result["data"].items():
        found = {data["arms"][arm][when]["steps"]: when for when in ("common", "epoch")}
        yield from ((name, data, when) for when in reversed(found.values()))
