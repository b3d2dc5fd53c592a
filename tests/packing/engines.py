"""Data of either engine that writes shards, and what is asked of the files."""

import os
from itertools import pairwise

import numpy as np

LENGTHS = [int(n) for n in np.random.default_rng(0).integers(1, 30, 60)]


def dataset_of(made, *cuts):
    import datasets

    chunks = [made[a:b] for a, b in pairwise([0, *cuts, len(made)])]
    return datasets.concatenate_datasets(
        [datasets.Dataset.from_list(chunk) for chunk in chunks if chunk]
    )


def blocks_of(ray):
    def blocks(made, *cuts):
        table = dataset_of(made).data.table
        return ray.data.from_arrow(
            [table.slice(a, b - a) for a, b in pairwise([0, *cuts, len(made)])]
        )

    return blocks


def load(files):
    """Shards, one after the other, as a dataset."""
    import datasets

    return datasets.load_dataset("parquet", data_files=list(files), split="train")


def visible(path):
    return sorted(name for name in os.listdir(path) if not name.startswith("."))
