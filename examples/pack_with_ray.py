"""Pack a corpus with Ray Data on two local workers, and see that the rows are those of one process.

    python examples/pack_with_ray.py

Runs offline in less than a minute on two CPU cores; the documents are made up. On a cluster,
`ray.init()` finds the workers, and `--path` is a folder that all of them reach."""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import datasets
import numpy as np
import ray

import autopack


def tokenize(batch: dict[str, np.ndarray]) -> dict[str, list]:
    """Made-up documents of a few to a few hundred tokens, the same ones whoever makes them."""
    ids, sources = [], []
    for number in batch["id"].tolist():
        random = np.random.default_rng(number)
        length = int(np.clip(random.lognormal(4.0, 1.0), 1, 1024))
        ids.append(random.integers(0, 32_000, length))
        sources.append(f"document {number}")
    return {"input_ids": ids, "source": sources}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--documents", type=int, default=10_000)
    parser.add_argument("--path", type=Path, help="where to write (a temporary folder)")
    options = parser.parse_args()

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    with tempfile.TemporaryDirectory() as temporary:
        path = options.path or Path(temporary) / "rows"
        corpus = ray.data.range(options.documents, override_num_blocks=8).map_batches(tokenize)

        written = autopack.packing.pack_shards(corpus, 1024, path, num_shards=8)  # the one line
        print(written)
        ray.shutdown()

        # One process, for comparison: it needs the whole corpus, and the same plan gives the same
        # rows.
        whole = datasets.Dataset.from_dict(tokenize({"id": np.arange(options.documents)}))
        alone = autopack.pack(whole, 1024)
        loaded = datasets.load_dataset(
            "parquet", data_files=autopack.packing.shard_files(path), split="train"
        )
        assert loaded[:] == alone[:]
        print(f"the same rows as one process gives: {len(loaded):,}")


if __name__ == "__main__":
    main()
