"""What it costs to pack 10^12 tokens in 10^9 documents: measured at three sizes, fitted, and simulated shard by shard.

    python -m benchmarks.web_scale --json benchmarks/results/web_scale.json          some twelve minutes on two cores
    python -m benchmarks.web_scale --trial                                           a first look in a minute

* **plan**: `autopack.packing.plan` of all documents at once: seconds, the largest resident memory of its process, the
  file that `Plan.save` writes, and the time and memory of a process that loads it.
* **shard plans**: shards planned by themselves (`plan="shard"`): seconds of each, and how much more they pad.
* **write**: `pack_shards(plan="shard")` of one shard from a dataset on disk to a parquet file, as a job of an array
  does it: seconds and the largest resident memory, pages of the mapped dataset included.
* **list**: `shard_files` of a folder, which looks into every file.
* **whole** (--whole): the lengths of all 10^9 documents, drawn and planned shard by shard in one process. No tokens.

Each size is a process of its own; seconds are the least of --rounds. Lengths are lognormal (--mean, --sigma).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from autopack.bench.race import Entrant, race
from autopack.bench.subjects import Lengths, draw
from benchmarks import interleave, web_laws

SIZES: dict[str, tuple[int, ...]] = {
    "plan": (1_000_000, 4_000_000, 16_000_000),
    "shard plans": (2_000, 20_000, 200_000),
    "write": (1 << 23, 1 << 24, 1 << 25),
    "list": (100, 400, 1600),
}
TRIAL: dict[str, tuple[int, ...]] = {
    "plan": (2_000, 8_000, 32_000),
    "shard plans": (200, 800, 3200),
    "write": (1 << 16, 1 << 17, 1 << 18),
    "list": (2, 4, 8),
}
"""Documents of the plan, documents of a shard, tokens of a shard, files."""
VOCABULARY = 50_000


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = interleave.parser(__doc__, rounds=3, threads=None)
    parser.add_argument("--mean", type=float, default=1000, help="tokens of a document (1000)")
    parser.add_argument("--sigma", type=float, default=1.0, help="of the logarithm of their lengths (1)")
    parser.add_argument("--max-length", type=int, default=8192, help="of a row (8192)")
    parser.add_argument("--whole", type=int, help="documents that are simulated (10^9; a trial 100,000; 0: none)")
    parser.add_argument("--trial", action="store_true", help="sizes that say nothing, in a minute")
    parser.add_argument("--part", nargs=2, metavar=("KIND", "SIZE"), help=argparse.SUPPRESS)
    about = "documents over which the padding of shards is counted (4,000,000; a trial a hundredth)"
    parser.add_argument("--planned", type=int, help=about)
    options = parser.parse_args(arguments)
    if options.whole is None:
        options.whole = 100_000 if options.trial else web_laws.DOCUMENTS
    if options.planned is None:
        options.planned = 40_000 if options.trial else 4_000_000
    return options


def lengths_of(count: int, options: argparse.Namespace, seed: Sequence[int] = (0,)) -> np.ndarray:
    """So many lengths, at least 1, (count,) int64."""
    lengths = Lengths(options.mean, options.sigma)
    return draw(lengths, count, np.iinfo(np.int32).max, [options.seed, *seed], shortest=1)


def planned(lengths: np.ndarray, options: argparse.Namespace) -> Any:
    """The plan of documents, the longer ones cut."""
    import autopack

    return autopack.packing.plan(lengths, options.max_length, overflow="split")


def best(function: Callable[[], Any], rounds: int) -> tuple[float, Any]:
    """The least seconds of so many calls, and what the last one returned."""
    found: list[Any] = [None]

    def clear() -> None:
        found[0] = None  # not two at a time

    def run() -> None:
        found[0] = function()

    return min(lap["wall"] for lap in race({"": Entrant(run, ready=clear)}, rounds)[""]), found[0]


# Parts, each measured in a process of its own


def measure_plan(size: int, options: argparse.Namespace) -> dict[str, Any]:
    """One plan of so many documents, and its file."""
    lengths = lengths_of(size, options)
    seconds, made = best(lambda: planned(lengths, options), options.rounds)
    found = {
        "documents": size,
        "seconds": seconds,
        "peak": interleave.resident(),
        "rows": len(made),
        "padding": 1 - made.fill,
    }
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "plan"
        found["save"], _ = best(partial(made.save, file), 1)
        found["file"] = file.stat().st_size
        del made
        loaded = part("load", file, options)
    return found | {"load": loaded["seconds"], "load peak": loaded["peak"]}


def measure_load(file: str, options: argparse.Namespace) -> dict[str, Any]:
    """Reading a plan."""
    import autopack

    seconds, _ = best(lambda: autopack.packing.Plan.load(file), options.rounds)
    return {"seconds": seconds, "peak": interleave.resident()}


def measure_shard_plans(size: int, options: argparse.Namespace) -> dict[str, Any]:
    """Plans of shards of so many documents: the mean seconds of one, and the padding of all."""
    count = max(1, options.planned // size)
    found = simulate(size, count, options)
    return {
        "documents": size,
        "shards": count,
        "seconds": found["seconds"] / count,
        "padding": found["padding"],
        "rows": found["rows"],
    }


def simulate(size: int, count: int, options: argparse.Namespace, report: bool = False) -> dict[str, Any]:
    """Draws and plans so many shards of so many documents, one after the other; seconds are those of planning."""
    rows = tokens = 0
    seconds = 0.0
    for shard in range(count):
        lengths = lengths_of(size, options, (1, shard))
        taken, made = best(partial(planned, lengths, options), 1)
        seconds += taken
        rows += len(made)
        tokens += int(lengths.sum())
        if report and shard % 3000 == 0:
            print(f"{shard:,} of {count:,} shards, {seconds:.0f} s of planning", file=sys.stderr, flush=True)
    padding = 1 - tokens / (rows * options.max_length)
    found = {"documents": size * count, "shards": count, "tokens": tokens, "rows": rows, "padding": padding}
    return found | {"seconds": seconds, "peak": interleave.resident()}


def measure_whole(count: int, options: argparse.Namespace) -> dict[str, Any]:
    """All documents, shard by shard."""
    size = round(web_laws.SHARD / options.mean)
    size = min(size, count)
    return simulate(size, max(1, round(count / size)), options, report=True)


def measure_write(size: int, options: argparse.Namespace) -> dict[str, Any]:
    """A job that writes one shard of about so many tokens, from disk to disk."""
    with tempfile.TemporaryDirectory() as folder:
        documents = part("make", f"{size}:{folder}/corpus", options)["documents"]
        written = part("pack", folder, options)
    return {"tokens": written["tokens"], "documents": documents, **{k: written[k] for k in ("seconds", "peak", "file")}}


def make_corpus(what: str, options: argparse.Namespace) -> dict[str, Any]:
    """A dataset on disk, of random tokens."""
    import datasets
    import pyarrow as pa

    size, _, path = what.partition(":")
    lengths = lengths_of(max(1, round(int(size) / options.mean)), options)
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    values = np.random.default_rng(options.seed).integers(0, VOCABULARY, bounds[-1], np.int32)
    tokens = pa.LargeListArray.from_arrays(bounds, pa.array(values))
    datasets.disable_progress_bars()
    datasets.Dataset(pa.table({"input_ids": tokens})).save_to_disk(path)
    return {"documents": len(lengths)}


def pack_corpus(folder: str, options: argparse.Namespace) -> dict[str, Any]:
    """What a job of an array does."""
    import datasets

    import autopack

    names = iter(range(options.rounds))
    corpus = f"{folder}/corpus"

    def job() -> Any:
        path = f"{folder}/rows{next(names)}"
        dataset = datasets.load_from_disk(corpus)
        return autopack.packing.pack_shards(
            dataset, options.max_length, path, plan="shard", num_shards=1, shard=0, overflow="split"
        )

    seconds, written = best(job, options.rounds)
    size = Path(written.files[0]).stat().st_size
    return {"tokens": written.tokens, "seconds": seconds, "peak": interleave.resident(), "file": size}


def measure_list(size: int, options: argparse.Namespace) -> dict[str, Any]:
    """`shard_files` of so many small files."""
    import datasets

    import autopack

    dataset = datasets.Dataset.from_dict({"input_ids": [[1, 2, 3]] * size})
    with tempfile.TemporaryDirectory() as folder:
        autopack.packing.pack_shards(dataset, 4, folder, num_shards=size)
        seconds, files = best(lambda: autopack.packing.shard_files(folder), options.rounds)
    assert len(files) == size
    return {"files": size, "seconds": seconds}


PARTS: dict[str, Callable[[Any, argparse.Namespace], dict[str, Any]]] = {
    "plan": measure_plan,
    "shard plans": measure_shard_plans,
    "write": measure_write,
    "list": measure_list,
    "whole": measure_whole,
    "load": measure_load,
    "make": make_corpus,
    "pack": pack_corpus,
}


def part(kind: str, size: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Return a part, of a process where freed memory goes back to the system."""
    keep = ("mean", "sigma", "max_length", "rounds", "seed", "planned")
    return interleave.elsewhere("benchmarks.web_scale", kind, size, options=options, keep=keep)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, fit, print and write."""
    options = parse(arguments)
    if options.part is not None:
        kind, size = options.part
        print(json.dumps(PARTS[kind](int(size) if size.isdecimal() else size, options)))
        return
    where = interleave.origin()
    measured: dict[str, list[dict[str, Any]]] = {}
    for kind, sizes in (TRIAL if options.trial else SIZES).items():
        measured[kind] = []
        for size in sizes:
            measured[kind].append(part(kind, size, options))
            print(f"{kind}: {measured[kind][-1]}", flush=True)
    whole = part("whole", options.whole, options) if options.whole else None
    found: dict[str, Any] = {"measured": measured, "laws": web_laws.laws(measured), "whole": whole}
    result = interleave.result_of("web_scale", options, where, **found)
    print()
    interleave.write(options.json, result, web_laws.describe(result))


if __name__ == "__main__":
    main()
