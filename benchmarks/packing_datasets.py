"""What it takes to pack a dataset on disk: `autopack.pack` against TRL's `pack_dataset`.

    python -m benchmarks.packing_datasets
    python -m benchmarks.packing_datasets --json benchmarks/results/packing_datasets.json

An arrow dataset of token lists (`input_ids` and `labels`, int32), documents like FLAN's, is packed from disk to disk.
Arms, interleaved in one process, each writing anew every time:

* `autopack`: `autopack.pack(dataset, max_length)`: best-fit decreasing over all documents, with `position_ids`.
* `trl`: `trl.pack_dataset(dataset, max_length, strategy="bfd")`: best-fit decreasing of every 1000 documents.
* `autopack, cached`: the call that finds its file.

Before anything is timed, the rows of arms that are compared are shown to hold the same documents, each of them once.
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

import numpy as np

from autopack.bench.subjects import DISTRIBUTIONS, draw
from benchmarks import interleave

LONGEST, VOCABULARY = 4096, 32000
GOAL = 1.0
PEERS = {
    "autopack": "trl",
    "autopack, cached": "trl",
}
"""What each arm is compared with."""
ANEW = {"load_from_cache_file": False}


def build(folder: str, documents: int, seed: int) -> Any:
    """A dataset of random tokens on disk."""
    import datasets
    import pyarrow as pa

    offsets = np.cumsum([0, *draw(DISTRIBUTIONS["flan"], documents, LONGEST, seed)])
    values = pa.array(np.random.default_rng(seed).integers(0, VOCABULARY, offsets[-1], np.int32))
    lists = pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), values)
    datasets.Dataset(pa.table({"input_ids": lists, "labels": lists})).save_to_disk(folder)
    return datasets.load_from_disk(folder)


def facts(dataset: Any, max_length: int) -> dict[str, Any]:
    """Rows, fill, and what has to be the same in arms that are compared: tokens, a sum over every token's value, and
    the documents."""
    import pyarrow.compute as pc

    tables = [batch for batch in dataset.data.to_batches() if batch.num_rows]
    ids = [table.column("input_ids").flatten() for table in tables]
    tokens = sum(len(values) for values in ids)
    same = {"tokens": tokens, "sum": sum(pc.sum(values).as_py() for values in ids)}
    lengths = np.concatenate([table.column("seq_lengths").flatten().to_numpy() for table in tables])
    same |= {"documents": len(lengths), "lengths": np.bincount(lengths).tolist()}
    return {
        "rows": len(dataset),
        "fill": tokens / (len(dataset) * max_length),
        "same": same,
    }


def main() -> None:
    """Measure, print and write."""
    parser = interleave.parser(__doc__, rounds=3, threads=None)
    parser.add_argument("--documents", type=int, default=200_000)
    parser.add_argument("--max-length", type=int, default=4096)
    parser.add_argument("--folder", help="where to put the dataset, which takes 2 GB (a temporary folder)")
    options = parser.parse_args()
    where = interleave.origin()
    import datasets
    import trl

    import autopack

    datasets.disable_progress_bars()
    where |= {name: module.__version__ for name, module in (("datasets", datasets), ("trl", trl))}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        dataset = build(os.path.join(folder, "documents"), options.documents, options.seed)
        max_length = options.max_length
        autopack.pack(dataset, max_length)  # the file that the cached arm finds

        def packed() -> Any:
            datasets.disable_caching()
            try:
                return autopack.pack(dataset, max_length)
            finally:
                datasets.enable_caching()

        arms = {
            "autopack": packed,
            "trl": lambda: trl.pack_dataset(dataset, max_length, strategy="bfd", map_kwargs=ANEW),
        }
        found = {name: facts(arm(), max_length) for name, arm in arms.items()}
        same = {name: found[name].pop("same") for name in arms}
        for name in arms:
            assert same[name] == same[PEERS.get(name, name)], f"the rows of {name} hold other documents than TRL's"
        arms["autopack, cached"] = lambda: autopack.pack(dataset, max_length)
        times = interleave.interleave(arms, options.rounds)
    ratios = {name: interleave.speeds(times, peer)[name] for name, peer in PEERS.items()}
    goals = {"autopack": ratios["autopack"]["median"] >= GOAL}
    lines = [
        f"datasets {where['datasets']}, trl {where['trl']}",
        "",
        f"{options.documents:,} documents, {same['trl']['tokens']:,} tokens, rows of {max_length:,}, from disk to disk",
        f"{'':<28}{'median':>9}{'min':>9}{'cpu':>9}{'rows':>9}{'fill':>8}{'x trl':>8}{'min':>8}{'cpu':>8}",
    ]
    for name, timed in times.items():
        rows, ratio = found.get(name, found["autopack"]), ratios.get(name)
        compared = "" if ratio is None else interleave.cells(ratio, ">8.2f")
        lines.append(f"{name:<28}{interleave.cells(timed, '>9.2f')}{rows['rows']:>9,}{rows['fill']:>8.4f}{compared}")
    lines.append("")
    for name, reached in goals.items():
        lines.append(f"goal: {name} at least {GOAL} x {PEERS[name]}: {'reached' if reached else 'NOT reached'}")
    measured: dict[str, Any] = {"times": times, "ratios": ratios, "rows": found}
    result = interleave.result_of(
        "packing_datasets", options, where, **measured, goal={"wanted": GOAL, "reached": goals}
    )
    interleave.write(options.json, result, lines)


if __name__ == "__main__":
    main()
