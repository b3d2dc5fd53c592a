"""Packed data sets: `pack` makes rows of the examples of a dataset, a stream or a list, ahead of
training."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from autopack.integrations.trainers import derives_from
from autopack.packing.checks import (
    Overflow,
    check_options,
    no_examples,
    reworded,
)
from autopack.packing.plans import Strategy
from autopack.version import __version__

if TYPE_CHECKING:
    from autopack.packing.rows import Packing, WrittenRows


def pack(
    dataset: Any,
    max_length: int,
    strategy: Strategy = "best_fit",
    *,
    seed: int = 0,
    overflow: Overflow = "error",
    max_documents: int | None = None,
    drop_columns: Collection[str] = (),
    first_position: int = 0,
    mask_first_label: bool = True,
    groups: str | bool = False,
    buffer_size: int = 4096,
    num_proc: int | None = None,
) -> Any:
    """Return packed rows of a tokenized dataset, each row of at most `max_length` tokens.

    A `datasets.Dataset` is planned as a whole and gives a `Dataset`: rows are written to a cache
    file beside the dataset's own (a temporary one for datasets in memory) and read from there, and
    the same dataset and arguments find that file again. An `IterableDataset` gives one in which
    every `buffer_size` examples are packed at a time, in the order of the stream, and rows of a
    buffer in random order; it resumes by `state_dict` at the same row. A `DatasetDict` or
    `IterableDatasetDict` gives one of the same splits; a list of mappings, a list of mappings.

    A row has these columns, lists all of them:

    * `input_ids` and all other columns with one value, or one list, per token. `attention_mask` is
      left out: padding that it marks at either end of an example is removed.
    * labels per token, under their own name, the first of every document -100: no token of the
      document predicts it. `PackingCollator` makes labels if rows have none.
    * `position_ids`, int32, which restart at `first_position` in every document, unless the
      examples have their own.
    * `seq_lengths`, int32, tokens of each document, by which `PackingCollator` and TRL tell
      documents apart.
    * columns with one value per document (a class, a source, a text): a list, in the order of the
      documents.

    Train on them with `PackingCollator` and an enabled model.

    Args:
        dataset: see above.
        max_length: the most tokens of a row.
        strategy, seed, overflow, max_documents: see `autopack.packing.plan`. A part of a document
            that was cut is a document of its own; everything cut off or left out is logged.
        drop_columns: columns to leave out.
        first_position: the first position of a document: 0, or `padding_idx + 1` for RoBERTa-like
            models.
        mask_first_label: `False` keeps the first label of every document, for losses that do not
            shift (masked language models, token classifiers).
        groups: `True` puts documents of the same first tokens into one row, or as few as hold them.
            The name of a column does so for documents of the same value in it, such as completions
            of one prompt; rows leave that column out. Common first tokens count once in
            `max_length`, since the model computes them once (`enable(model, share=...)`), so rows
            may have more tokens than that: collate them without a `max_length`.
        buffer_size: examples of a stream that are packed at a time, and so held in memory.
        num_proc: processes that write the rows of a `Dataset`.

    Raises:
        InvalidPacking: for examples that cannot be packed (no `input_ids`, columns that are neither
            per token nor per document, documents without tokens, documents over `max_length` with
            `overflow="error"`, labels of whole documents if a document is cut, packed rows, no
            example at all); for streams when the example is drawn.
        ValueError: for options that are out of range, unknown, or contradict each other.
        ImportError: if pyarrow is missing: `pip install "autopack[data]"`.
    """
    check_options(pack, locals())
    planned = {
        "strategy": strategy,
        "seed": seed,
        "overflow": overflow,
        "max_documents": max_documents,
    }
    columns = drop_columns, first_position, mask_first_label, groups
    try:
        from autopack.packing.rows import Packing
    except ImportError as error:
        raise ImportError('autopack.pack needs pyarrow: pip install "autopack[data]"') from error
    packing = Packing(max_length, planned, *columns)
    if not any(
        derives_from(dataset, name, "datasets") for name in ("DatasetDict", "IterableDatasetDict")
    ):
        return _pack(dataset, packing, buffer_size, num_proc)
    made = {}
    for name, split in dataset.items():
        with reworded(partial("split {!r}: {}".format, name)):
            made[name] = _pack(split, packing, buffer_size, num_proc)
    return type(dataset)(made)


def _pack(dataset: Any, packing: Packing, buffer_size: int, num_proc: int | None) -> Any:
    """Return the packed rows of one split, as a dataset of its kind or a list of mappings."""
    from autopack.packing.documents import Documents, columns_of

    if derives_from(dataset, "IterableDataset", "datasets"):
        names = dataset.column_names or [*next(iter(dataset.take(1)), {})]
        buffers = {"batched": True, "batch_size": buffer_size, "remove_columns": names}
        return dataset.with_format(None).map(packing, **buffers)
    if derives_from(dataset, "Dataset", "datasets"):
        rows = packing.rows(Documents.of_dataset(dataset, packing.drop_columns))
        return _write(dataset, packing, rows, num_proc)
    if not isinstance(dataset, (list, tuple)) or not all(
        isinstance(example, Mapping) for example in dataset
    ):
        raise no_examples(
            "wanted a Dataset, IterableDataset or DatasetDict of datasets, or a list of mappings, "
            f"found {type(dataset).__name__}; pass list(...) of other collections of examples"
        )
    made = packing.rows(packing.documents(columns_of(dataset))).lists()
    return [dict(zip(made, values, strict=True)) for values in zip(*made.values(), strict=True)]


def features_of(dataset: Any, rows: WrittenRows) -> Any:
    """Return the `datasets.Features` of packed rows, with classes, images and audio as they
    were."""
    import datasets

    features = datasets.Features.from_arrow_schema(rows.table(0, 1).schema)
    for name in (*rows.documents.per_token, *rows.documents.per_document):
        if name not in features:  # a mask of targets, which became labels
            continue
        of_token = getattr(dataset.features[name], "feature", None)
        kind = of_token if name in rows.documents.per_token else dataset.features[name]
        inner: Any = kind
        while hasattr(inner, "feature"):  # several images for each document
            inner = inner.feature
        if isinstance(inner, datasets.ClassLabel | datasets.Image | datasets.Audio):
            features[name] = datasets.Sequence(kind)
    return features


def _write(dataset: Any, packing: Packing, rows: WrittenRows, num_proc: int | None) -> Any:
    """Return the rows as a Dataset in a cache file, which is written unless it is there."""
    import datasets
    from datasets.fingerprint import Hasher, get_temporary_cache_files_directory

    fingerprint = Hasher.hash((__version__, dataset._fingerprint, repr(packing)))
    files = dataset.cache_files
    caches = datasets.is_caching_enabled()
    # Without caching, datasets would hold all rows in memory.
    folder = (
        os.path.dirname(files[0]["filename"])
        if files and caches
        else get_temporary_cache_files_directory()
    )
    path = os.path.join(folder, f"cache-{fingerprint}.arrow")
    return datasets.Dataset.from_dict({"row": np.arange(len(rows.plan))}).map(
        rows,
        batched=True,
        batch_size=rows.width,
        writer_batch_size=rows.width,
        remove_columns=["row"],
        features=features_of(dataset, rows),
        cache_file_name=path,
        load_from_cache_file=None if caches else False,
        new_fingerprint=fingerprint,
        num_proc=num_proc,
        desc="Packing",
    )
