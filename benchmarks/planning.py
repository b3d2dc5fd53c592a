"""What it costs to choose which documents share a row, and to write the rows, and how good the rows
are.

    python -m benchmarks.planning                                  about fifteen minutes on two cores
    python -m benchmarks.planning --many 100000 --tokens-of 20000 --whole 10000 --rounds 1     a first look
    python -m benchmarks.planning --json benchmarks/results/planning.json

Lengths like those of FLAN_20k: lognormal, of mean 471 before they are clipped at 4096, which is the
max_length. One thread. The races:

* `plan`: `autopack.packing.plan` of `--many` lengths, by best fit and for eight ranks by cost
  (squares of lengths). Said beside: the share of columns that hold tokens, the slowest rank of
  steps over the mean, and what is resident in a process that does nothing else, `before` of Python,
  numpy and the lengths.
* `TRL` and `TRL, one batch`: `trl.pack_dataset(strategy="bfd")` packs tokens and not only lengths;
  it gets tokens of one byte, in memory, so that little of its time is theirs. By default it packs
  every 1000 documents by themselves. In one batch it makes the rows of best-fit decreasing, and
  then their number must be ours; that takes it long.
* `from disk to disk`: `autopack.pack(dataset, max_length)` against TRL's `pack_dataset`, int32
  tokens and labels, each writing anew every time. The rows of both are shown to hold the same
  documents.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
from functools import partial
from typing import Any

import numpy as np

from autopack.bench.subjects import DISTRIBUTIONS, draw
from benchmarks import interleave

CAPACITY, RANKS, BATCH = 4096, 8, 1000


def flan_like(count: int, seed: int) -> np.ndarray:
    """Return lengths, (count,) int64."""
    return draw(DISTRIBUTIONS["flan"], count, CAPACITY, seed, shortest=1)


def planned(lengths: np.ndarray, ranks: int = 1) -> Any:
    """Return the plan of lengths by best fit, that of several ranks balanced by cost."""
    import autopack

    options = {"ranks": ranks, "cost": autopack.packing.CostModel(0, 1)} if ranks > 1 else {}
    return autopack.packing.plan(lengths, CAPACITY, **options)


def imbalance(costs: np.ndarray, ranks: int) -> np.ndarray:
    """Return the time of each complete step's slowest rank over the mean: (steps,) float64 of at
    least 1.

    Rows `s * ranks` to `(s + 1) * ranks` are step s, as in a plan made for so many ranks.
    """
    steps = np.asarray(costs)[: len(costs) // ranks * ranks].reshape(-1, ranks)
    return steps.max(axis=1) / steps.mean(axis=1)


def peak(count: int, seed: int, ranks: int) -> tuple[float, float]:
    """Return the MiB that are resident in this process at most, before a plan is made and after
    that."""
    import autopack.packing.plans  # noqa: F401

    lengths = flan_like(count, seed)
    before = interleave.resident()
    planned(lengths, ranks)
    return before / 2**20, interleave.resident() / 2**20


def of_plan(options: argparse.Namespace) -> interleave.Race:
    """Return the race of plans alone."""
    import autopack

    lengths = flan_like(options.many, options.seed)
    cost, facts = autopack.packing.CostModel(0, 1), {"lengths": len(lengths)}
    for ranks in (1, RANKS):
        made = planned(lengths, ranks)
        assert np.array_equal(np.sort(made.documents), np.arange(len(lengths)))
        # in a process of its own, where freed memory goes back to the system
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            before, after = pool.apply(peak, (options.many, options.seed, ranks))
        slowest = imbalance(made.costs(cost), ranks).mean()
        facts[f"{ranks} ranks:"] = (
            f"fill {made.fill:.6f}, imbalance {slowest:.4f}, {after:.0f} MiB ({before:.0f} before)"
        )
    arms = {
        "best fit": partial(planned, lengths),
        f"{RANKS} ranks": partial(planned, lengths, RANKS),
    }
    return interleave.Race(arms, "best fit", warm=0, facts=facts)


def of_trl(options: argparse.Namespace, *, whole: bool) -> interleave.Race:
    """Return the race against TRL's packing of the same documents."""
    import datasets
    import pyarrow as pa
    import torch
    from trl import pack_dataset

    lengths = flan_like(options.whole if whole else options.tokens_of, options.seed)
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    values = np.resize(np.arange(128, dtype=np.int8), bounds[-1])
    tokens = pa.LargeListArray.from_arrays(bounds, pa.array(values))
    dataset = datasets.Dataset(pa.table({"input_ids": tokens}))
    kept = {
        "keep_in_memory": True,
        "load_from_cache_file": False,
        "batch_size": len(lengths) if whole else BATCH,
    }

    def trl() -> Any:
        return torch.tensor(len(pack_dataset(dataset, CAPACITY, strategy="bfd", map_kwargs=kept)))

    arms = {"plan": lambda: torch.tensor(len(planned(lengths))), "trl": trl}
    wrong = () if whole else ("trl",)  # it makes more rows
    return interleave.Race(
        arms, "plan", {"trl": 30.0}, wrong=wrong, tolerance=0.0, facts={"lengths": len(lengths)}
    )


def of_datasets(options: argparse.Namespace) -> interleave.Race:
    """Return the race of packing a dataset from disk to disk."""
    import datasets
    import pyarrow as pa
    import torch
    import trl

    import autopack

    datasets.disable_progress_bars()
    folder = tempfile.mkdtemp(dir=options.folder or None)
    offsets = np.cumsum([0, *flan_like(options.tokens_of, options.seed)])
    values = pa.array(
        np.random.default_rng(options.seed).integers(0, 32_000, offsets[-1], np.int32)
    )
    lists = pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), values)
    datasets.Dataset(pa.table({"input_ids": lists, "labels": lists})).save_to_disk(folder)
    dataset = datasets.load_from_disk(folder)
    datasets.disable_caching()

    def held(rows: Any) -> Any:
        """Return how many documents of each length there are."""
        lengths = [
            batch.column("seq_lengths").flatten().to_numpy() for batch in rows.data.to_batches()
        ]
        return torch.from_numpy(np.bincount(np.concatenate(lengths), minlength=CAPACITY + 1))

    anew = {"load_from_cache_file": False}
    arms = {
        "autopack": lambda: held(autopack.pack(dataset, CAPACITY)),
        "trl": lambda: held(trl.pack_dataset(dataset, CAPACITY, strategy="bfd", map_kwargs=anew)),
    }
    return interleave.Race(
        arms, "autopack", {"trl": 1.0}, tolerance=0.0, facts={"documents": options.tokens_of}
    )


if __name__ == "__main__":
    races = {
        "plan": of_plan,
        "TRL": partial(of_trl, whole=False),
        "TRL, one batch": partial(of_trl, whole=True),
        "from disk to disk": of_datasets,
    }
    numbers = {"many": 10_000_000, "tokens_of": 200_000, "whole": 100_000, "folder": ""}
    interleave.main("planning", __doc__, races, 3, packages=("trl", "datasets"), **numbers)
