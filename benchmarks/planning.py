"""What it costs to choose which documents share a row, and how good the rows are.

    python -m benchmarks.planning                                  about ten minutes on two cores
    python -m benchmarks.planning --lengths 100000 --many 0 --huge 0 --trl 50000 --trl-whole 10000 --rounds 1
    python -m benchmarks.planning --llamafactory llamafactory-….whl --json benchmarks/results/planning.json

The second is a first look. The third has arms of LLaMA-Factory, as `pip download llamafactory --no-deps` gets it.

Lengths like those of FLAN_20k: lognormal, of mean 471 before they are clipped at 4096, which is the max_length. One
thread.

* **Strategies**: `autopack.packing.plan` with each strategy, and those of `benchmarks/strategies.py`; fill is the
  share of columns that hold tokens.
* **Many lengths**: lengths that hardly repeat: 200,000, lognormal of mean 25,000 and uniform, up to 2**20, in rows of
  2**20.
* **Memory**: best fit of as many lengths, of ten and of a hundred times as many, and the largest resident memory of a
  process that does nothing else. `before` is that of Python, numpy, and of drawing the lengths.
* **Balance**: eight ranks, cost `CostModel(0, 1)` (squares of lengths alone): the slowest rank of a step over the mean.
* **TRL**: `trl.pack_dataset(strategy="bfd")` packs tokens and not only lengths. It gets tokens of one byte, in memory,
  so that little of its time is theirs; `plan, tokens moved` also puts the tokens in the order of the plan, by numpy.
  By default TRL packs every 1000 documents by themselves. In one batch it makes the rows of best-fit decreasing, and
  then their number must be ours; that takes it long, so it gets fewer lengths. Arms are compared on the same lengths.
* **LLaMA-Factory**: its `greedy_knapsack` of lists of lengths, 1000 at a time, as it packs by default, and in one batch
  for fewer lengths, of which it takes one after the other out of a list.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from autopack.bench.subjects import DISTRIBUTIONS, draw
from autopack.packing.balance import arrange
from benchmarks import interleave, peers, strategies

CAPACITY, RANKS = 4096, 8
ARMS = {
    "best_fit": {},
    "best_fit, 8 ranks": {"strategy": "best_fit", "ranks": RANKS},
    "sequential": {},
    "sorted": {},
    "random": {},
    "fixed_length": {},
}


def flan_like(count: int, seed: int) -> np.ndarray:
    """Lengths, (count,) int64."""
    return draw(DISTRIBUTIONS["flan"], count, CAPACITY, seed, shortest=1)


def planned(lengths: np.ndarray, arm: str) -> Any:
    """The plan of one arm, those of several ranks balanced by cost."""
    import autopack

    options = {"strategy": arm, **ARMS[arm]}
    if arm == "best_fit, 8 ranks":
        options["cost"] = autopack.packing.CostModel(0, 1)
    return strategies.plan_by(lengths=lengths, max_length=CAPACITY, **options)


def measure_strategies(lengths: np.ndarray, rounds: int) -> dict[str, dict[str, Any]]:
    """Times and quality of every strategy."""
    found = {}
    for arm in ARMS:
        made = planned(lengths, arm)
        assert made.tokens_per_row.max() <= CAPACITY
        assert made.lengths.sum() == lengths.sum()
        if arm != "fixed_length":
            assert np.array_equal(np.sort(made.documents), np.arange(len(lengths)))
        found[arm] = {"rows": len(made), "fill": made.fill, "padding": made.padding}
    times = interleave.interleave({arm: lambda arm=arm: planned(lengths, arm) for arm in ARMS}, rounds)
    return {arm: {**found[arm], **times[arm]} for arm in ARMS}


def measure_many_lengths(rounds: int, seed: int) -> dict[str, dict[str, Any]]:
    """Lengths of which each is hardly there twice."""
    import autopack

    generator, most = np.random.default_rng(seed), 1 << 20
    spread = {
        "lognormal to 2**20": np.clip(generator.lognormal(9, 1.5, 200_000).astype(np.int64), 1, most),
        "uniform to 2**20": generator.integers(1, most + 1, 200_000),
    }
    arms: dict[str, Any] = {
        f"best_fit, {what}": lambda what=what: autopack.packing.plan(spread[what], most) for what in spread
    }
    return interleave.interleave(arms, rounds)


def measure_peak(arm: str, count: int, seed: int) -> dict[str, Any]:
    """Return time and memory of one plan, in this process, which should be a fresh one."""
    import autopack.packing.plans  # noqa: F401

    lengths = flan_like(count, seed)
    before, made = interleave.resident(), []
    times = interleave.interleave({arm: lambda: made.append(planned(lengths, arm))}, 1, None)[arm]
    return {
        "count": count,
        "arm": arm,
        "seconds": times["min"],
        "cpu": times["cpu median"],
        "before": before / 2**20,
        "peak": interleave.resident() / 2**20,
        "fill": made[0].fill,
    }


def measure_peaks(counts: list[int], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return `measure_peak` of processes of their own, where freed memory goes back to the system."""
    found = []
    for count in counts:
        for arm in ("best_fit", "best_fit, 8 ranks") if count < 10**8 else ("best_fit",):
            found.append(interleave.elsewhere("benchmarks.planning", arm, count, options=options, keep=("seed",)))
            print(f"{arm}, {count:,} lengths: {found[-1]['seconds']:.2f} s, {found[-1]['peak']:.0f} MiB", flush=True)
    return found


def imbalance(costs: np.ndarray, ranks: int) -> np.ndarray:
    """Return the time of each complete step's slowest rank over the mean: (steps,) float64 of at least 1.

    Rows `s * ranks` to `(s + 1) * ranks` are step s, as in a plan made for so many ranks.
    """
    steps = np.asarray(costs)[: len(costs) // ranks * ranks].reshape(-1, ranks)
    return steps.max(axis=1) / steps.mean(axis=1)


def measure_balance(lengths: np.ndarray) -> dict[str, dict[str, Any]]:
    """The slowest of eight ranks against the mean, by the squares of lengths, with steps by cost and without."""
    import autopack

    cost, found = autopack.packing.CostModel(0, 1), {}
    for name in ("best_fit", "random"):
        for by_cost in (False, True):
            made = strategies.plan_by(name, lengths, CAPACITY, ranks=RANKS)
            made = made.select(arrange(made.costs(cost), RANKS, 0)) if by_cost else made
            # Without a cost the rows of best fit stand in the order in which they were opened, longest documents first.
            # In random order they are what a shuffling loader makes of any packed data set.
            rows = np.arange(len(made)) if by_cost else np.random.default_rng(0).permutation(len(made))
            costs = made.costs(cost)[rows]
            steps = costs[: len(costs) // RANKS * RANKS].reshape(-1, RANKS)
            found[f"{name}, {'by cost' if by_cost else 'shuffled'}"] = {
                "slowest over mean, all steps": float(steps.max(axis=1).sum() / steps.mean(axis=1).sum()),
                "worst step": float(imbalance(costs, RANKS).max()),
            }
    return found


def measure_trl(count: int, whole: bool, rounds: int, seed: int) -> dict[str, Any]:
    """TRL's packing and ours of the same documents."""
    import datasets
    import pyarrow as pa
    from trl import pack_dataset

    datasets.disable_progress_bars()
    lengths = flan_like(count, seed)
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    values = np.resize(np.arange(128, dtype=np.int8), bounds[-1])
    tokens = pa.LargeListArray.from_arrays(bounds, pa.array(values))
    dataset = datasets.Dataset(pa.table({"input_ids": tokens}))
    options = {"keep_in_memory": True, "load_from_cache_file": False}
    options |= {"batch_size": count} if whole else {}
    made: dict[str, int] = {}

    def trl() -> None:
        made["trl"] = len(pack_dataset(dataset, CAPACITY, strategy="bfd", map_kwargs=options))

    def ours() -> None:
        made["plan"] = len(planned(lengths, "best_fit"))

    def ours_with_tokens() -> None:
        plan = planned(lengths, "best_fit")
        moved = np.empty_like(values)
        ends = np.cumsum(plan.lengths)
        for first in range(0, len(ends), 2**9):  # indices of a few hundred thousand tokens at a time
            part = slice(first, first + 2**9)
            begin = ends[first] - plan.lengths[first]
            shift = bounds[plan.documents[part]] - ends[part] + plan.lengths[part]
            columns = np.arange(begin, ends[part][-1]) + np.repeat(shift, plan.lengths[part])
            moved[begin : ends[part][-1]] = values[columns]
        made["plan, tokens moved"] = len(plan)

    arms = {"trl": trl, "plan": ours, "plan, tokens moved": ours_with_tokens}
    times = interleave.interleave(arms, rounds)
    assert made["trl"] == made["plan"] if whole else made["trl"] >= made["plan"]
    ideal = lengths.sum() / CAPACITY
    return {
        "lengths": count,
        "batch": count if whole else 1000,
        "fill": {name: float(ideal / rows) for name, rows in made.items()},
        "times": times,
        "ratios": interleave.speeds(times, "trl"),
    }


def measure_llamafactory(knapsack: peers.Knapsack, count: int, size: int, rounds: int, seed: int) -> dict[str, Any]:
    """LLaMA-Factory's packing, `size` at a time, and ours of the same lengths, each as it takes them."""
    lengths = flan_like(count, seed)
    batches = [lengths[at : at + size].tolist() for at in range(0, count, size)]
    made: dict[str, int] = {}
    arms = {
        "llamafactory": lambda: made.update(llamafactory=peers.packed(knapsack, batches, CAPACITY)),
        "plan": lambda: made.update(plan=len(planned(lengths, "best_fit"))),
    }
    times = interleave.interleave(arms, rounds)
    fill = {name: float(lengths.sum() / CAPACITY / rows) for name, rows in made.items()}
    assert fill["plan"] >= fill["llamafactory"]
    return {
        "lengths": count,
        "batch": size,
        "fill": fill,
        "times": times,
        "ratios": interleave.speeds(times, "llamafactory"),
    }


def main() -> None:
    parser = interleave.parser(__doc__, rounds=3, threads=None)
    parser.add_argument("--lengths", type=int, default=1_000_000)
    parser.add_argument("--many", type=int, default=10_000_000, help="lengths for time and memory; 0: leave out")
    parser.add_argument("--huge", type=int, default=100_000_000, help="the same, once, by best fit; 0: leave out")
    parser.add_argument("--llamafactory", type=Path, help="its wheel, unless it is installed")
    parser.add_argument("--trl", type=int, default=1_000_000, help="lengths for TRL as it is; 0: leave out")
    parser.add_argument("--trl-whole", type=int, default=100_000, help="lengths for TRL in one batch; 0: leave out")
    parser.add_argument("--part", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part is not None:
        arm, count = options.part
        print(json.dumps(measure_peak(arm, int(count), options.seed)))
        return
    where = interleave.begin(options)
    greedy = peers.llamafactory(options.llamafactory)
    options.llamafactory = None if options.llamafactory is None else options.llamafactory.name
    lengths, rounds, seed = flan_like(options.lengths, options.seed), options.rounds, options.seed
    counts = [n for n in (options.lengths, options.many) if n]
    of_greedy = [(n, peers.BATCH) for n in counts] + [(n, n) for n in (options.trl_whole,) if n]
    found: dict[str, Any] = {
        "strategies": measure_strategies(lengths, rounds),
        "many lengths": measure_many_lengths(rounds, seed),
        "memory": measure_peaks([n for n in (*counts, options.huge) if n], options),
        "balance": measure_balance(lengths),
        "trl": [
            measure_trl(count, whole, rounds, seed)
            for count, whole in ((options.trl, False), (options.trl_whole, True))
            if count
        ],
        "llamafactory": [
            {"peer": f"LLaMA-Factory {greedy[1]}, greedy_knapsack,"}
            | measure_llamafactory(greedy[0], count, size, rounds, seed)
            for count, size in (of_greedy if greedy else ())
        ],
    }
    result = interleave.result_of("planning", options, where, **found)
    interleave.write(options.json, result, describe(result))


def describe(result: dict[str, Any]) -> Iterator[str]:
    """Yield the result in a few lines."""
    count, lengths = result["settings"]["lengths"], DISTRIBUTIONS["flan"]
    times = f"{'median':>9}{'min':>9}{'cpu':>9}"
    yield f"{count:,} lengths, mean {lengths.mean} before clipping, max_length {CAPACITY}; seconds"
    yield f"{'strategy':<44}{times}{'rows':>10}{'fill':>10}"
    for arm, found in result["strategies"].items():
        yield f"{arm:<44}{interleave.cells(found, '>9.3f')}{found['rows']:>10,}{found['fill']:>10.6f}"
    yield from ("", f"{'Many lengths; seconds':<44}{times}")
    yield from (f"{arm:<44}{interleave.cells(found, '>9.3f')}" for arm, found in result["many lengths"].items())
    yield from ("", f"{'In a process of its own':<44}{'seconds':>9}{'cpu':>9}{'peak MiB':>10}{'of which before':>17}")
    for found in result["memory"]:
        name, memory = f"{found['arm']}, {found['count']:,} lengths", f"{found['peak']:>10.0f}{found['before']:>17.0f}"
        yield f"{name:<44}{found['seconds']:>9.2f}{found['cpu']:>9.2f}{memory}"
    ranks = f"{RANKS} ranks, cost = sum of squares: slowest rank over mean"
    yield from ("", f"{ranks:<60}{'all steps':>10}{'worst step':>12}")
    for arm, found in result["balance"].items():
        yield f"{arm:<60}{found['slowest over mean, all steps']:>10.4f}{found['worst step']:>12.4f}"
    for found in (*result["trl"], *result["llamafactory"]):
        peer = found.get("peer", "trl.pack_dataset(strategy='bfd')")
        batch = "one batch" if found["batch"] == found["lengths"] else f"batches of {found['batch']}"
        yield from ("", f"{peer} on {found['lengths']:,} documents in {batch}; ratios are to it")
        yield f"{'arm':<26}{times}{'fill':>10}{'ratio':>9}{'min':>9}{'cpu':>9}"
        for arm, of in found["times"].items():
            ratios = interleave.cells(found["ratios"][arm], ">9.1f") if arm in found["ratios"] else ""
            yield f"{arm:<26}{interleave.cells(of, '>9.3f')}{found['fill'][arm]:>10.6f}{ratios}"
    if not result["llamafactory"]:
        yield from ("", "LLaMA-Factory is not installed, and --llamafactory names none: its arms are absent.")
    yield from (
        "",
        "Goals: at most 1.5 s and a fill of at least 0.999 for a million by best fit; at most 10 s and 1 GiB for ten "
        "million; at most 1.05 over the mean; at least 30 x TRL; faster than LLaMA-Factory, with no less fill.",
    )


if __name__ == "__main__":
    main()
