"""Packed data sets: `pack` makes rows of the examples of a dataset, a stream or a list, ahead of
training, as arrow tables: the pieces of a plan, gathered from the tables of documents."""

from __future__ import annotations

import logging
import os
import re
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from autopack.inspection.media import PICTURES
from autopack.integrations.trainers import derives_from
from autopack.layout import COMPLETION_KEYS, IGNORED_LABEL, LABEL_KEYS
from autopack.packing.checks import (
    IDS,
    LENGTHS,
    POSITIONS,
    Overflow,
    bounds_of,
    check_options,
    labels_of,
    no_examples,
    nothing_left,
    numbered,
    reworded,
    unusable,
)
from autopack.packing.documents import (
    Documents,
    Values,
    columns_kept,
    columns_of,
    from_columns,
    refuse_tokens,
)
from autopack.packing.media import has_pictures
from autopack.packing.plans import Plan, Strategy, groups_of, plan
from autopack.version import __version__

logger = logging.getLogger(__name__)
BLOCK = 1 << 20
"""Tokens that are gathered and written at a time: a process holds no more of a dataset on disk."""


@dataclass
class PlannedRows:
    """Rows of a plan, made as arrow tables; `Dataset.map` calls it with numbers of rows.

    Raises `InvalidPacking` if the columns of the documents cannot be columns of such rows.
    """

    documents: Documents
    plan: Plan
    packing: Packing

    def __post_init__(self) -> None:
        documents, counts, key = self.documents, self.plan.counts, self.documents.label_key
        if not len(self.plan):
            raise nothing_left(counts)
        if counts.split and key in documents.per_document:
            raise unusable(
                f"{counts.split:,} documents are cut into pieces, and {key!r} is one per document; "
                "use overflow='truncate' or 'drop', or name it in drop_columns"
            )
        columns = *documents.per_document, *documents.pictures
        pictures = [name for name in columns if name in PICTURES]
        if pictures and (counts.split or counts.truncated):
            raise unusable(
                f"{counts.split + counts.truncated:,} documents are cut, and their {pictures[0]!r} "
                "are not; use overflow='drop', or name it in drop_columns"
            )

    def lists(self) -> dict[str, list[Any]]:
        """Return all rows as lists by column, with columns of the documents' pictures."""
        rows = self.table().to_pydict()
        for name, pictures in self.documents.pictures.items():
            rows[name] = [[pictures[number] for number in row] for row in self.plan]
        return rows

    def __call__(self, batch: Mapping[str, Any]) -> pa.Table:
        return self.table(int(batch["row"][0]), int(batch["row"][-1]) + 1)

    def table(self, first: int = 0, end: int | None = None) -> pa.Table:
        """Return the arrow table of rows `first` to `end`; by default, of all."""
        plan, documents = self.plan[first:end], self.documents
        tokens = bounds_of(plan.lengths)
        starts = tokens[:-1]
        values = documents.values(plan.documents, plan.offsets, plan.lengths)
        pieces = plan.documents, plan.lengths
        refuse_tokens(values[IDS] < 0, *pieces, IDS, "found a token id below 0")
        if documents.label_key is None and values.keys() & {*COMPLETION_KEYS}:
            values["labels"] = labels_of(values)  # trainers drop columns that they do not know
            values = {name: array for name, array in values.items() if name not in COMPLETION_KEYS}
        key = documents.label_key or "labels"
        if self.packing.mask_first_label and key in values:
            labels = values[key]
            if not (isinstance(labels, np.ndarray) and labels.dtype.kind == "i"):
                raise unusable(
                    f"column {key!r}: found {getattr(labels, 'dtype', '') or labels.type}, wanted "
                    "signed ints, of which -100 is no target; cast it, or pass mask_first_label="
                    "False"
                )
            values[key] = labels.copy()
            values[key][starts] = IGNORED_LABEL
        if POSITIONS in values:
            # A difference of small types wraps around: 255, 0 would go on by 1.
            breaks = np.diff(np.asarray(values[POSITIONS]).astype(np.int64), prepend=0) != 1
            breaks[starts] = False
            refuse_tokens(
                breaks,
                *pieces,
                POSITIONS,
                "found positions that restart; pack the documents themselves, or name the "
                "column in drop_columns",
            )
        else:
            positions = numbered(plan.lengths) + self.packing.first_position
            values[POSITIONS] = positions.astype(np.int32)
        columns = {name: _lists(tokens[plan.bounds], array) for name, array in values.items()}
        for name in documents.per_document:
            columns[name] = _lists(plan.bounds, documents.of_documents(name, plan.documents))
        columns[LENGTHS] = _lists(plan.bounds, plan.lengths.astype(np.int32))
        return pa.table(columns)

    @property
    def width(self) -> int:
        """Number of rows that are made at a time."""
        return max(1, BLOCK // self.plan.max_length)

    def tables(self) -> Iterator[pa.Table]:
        """Yield tables of all rows, about a million tokens at a time."""
        for first in range(0, len(self.plan), self.width):
            yield self.table(first, first + self.width)


def _lists(offsets: np.ndarray, values: Values) -> pa.Array:
    """Return an arrow array of lists: values cut at these offsets."""
    return pa.ListArray.from_arrays(offsets.astype(np.int32), values)


@dataclass
class Packing:
    """Options of `autopack.pack`, and the plans and rows by them; its `repr` shows all options.

    `planned` holds the options of `autopack.packing.plan`.
    """

    max_length: int
    planned: dict[str, Any]
    drop_columns: Collection[str]
    first_position: int
    mask_first_label: bool
    groups: str | bool = False
    warned: bool = field(default=False, repr=False)

    def __post_init__(self) -> None:
        check_options(Packing, vars(self))
        if not isinstance(self.groups, (str, bool)):
            raise ValueError(f"groups={self.groups!r}: wanted the name of a column, True or False")
        self.plan([1])  # checks the others
        self.max_length, self.first_position = int(self.max_length), int(self.first_position)
        self.drop_columns = sorted(self.drop_columns, key=str)

    def plan(self, lengths: Any, **changes: Any) -> Plan:
        """Return the plan of documents of these lengths; `changes` replace options.

        An error names the example.
        """
        with reworded(partial(re.sub, r"lengths\[", "example [")):
            return plan(lengths, self.max_length, **self.planned | changes)

    def plan_documents(self, documents: Documents, **changes: Any) -> Plan:
        """Return the plan of all documents with their groups; `changes` replace options.

        Removes the column that names groups from the documents, in place, unless it is labels.
        """
        grouped, name = groups_of(documents, self.groups), self.groups
        if name in documents.per_document and name not in LABEL_KEYS:
            documents.per_document.remove(str(name))
        return self.plan(documents.lengths, **grouped, **changes)

    def rows(self, documents: Documents) -> PlannedRows:
        """Plan all documents of a dataset, log the plan, and return its rows."""
        made = self.plan_documents(documents)
        logger.log(made.counts.level, "Packed: %r", made)
        return PlannedRows(documents, made, self)

    def documents(self, columns: Mapping[str, Sequence[Any]]) -> Documents:
        """Return the `Documents` of examples in memory, given as columns, with their pictures."""
        names = columns_kept([*columns], self.drop_columns)  # those that are no text, too
        pictures = {name: columns[name] for name in names if has_pictures(name, columns[name])}
        wanted = {*names, self.groups} - pictures.keys()
        table = from_columns({name: columns[name] for name in columns if name in wanted})
        return Documents(table, None, {*table.column_names} - {*names}, pictures)

    def __call__(self, batch: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
        """Return the packed rows of a buffer of a stream's examples, both in columns.

        `IterableDataset.map` calls it. The rows depend on the buffer alone, so that a resumed
        stream makes the same rows again.
        """
        count = len(next(iter(batch.values())))
        with reworded(
            partial("in a buffer of {} examples, counted from its start: {}".format, count)
        ):
            columns = {name: batch[name] for name in batch}
            for name, values in columns.items():
                if name not in self.drop_columns and all(value is None for value in values):
                    raise unusable(
                        f"column {name!r}: found no value; fill it, or name it in drop_columns"
                    )
            documents = self.documents(columns)
            seed = zlib.crc32(documents.lengths.tobytes(), int(self.planned["seed"]) & 0xFFFFFFFF)
            made = self.plan_documents(documents, seed=seed)
            if made.counts.level == logging.WARNING and not self.warned:
                logger.warning(
                    "Packed: %r; buffers that follow are packed alike, and nothing more is said",
                    made,
                )
                self.warned = True
            if not len(made):
                return {}
            if self.planned["strategy"] == "best_fit":  # a plan lists the longest documents first
                made = made.select(np.random.default_rng(seed).permutation(len(made)))
            return PlannedRows(documents, made, self).lists()


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
    options = dict(locals())
    check_options(pack, options)
    if any(derives_from(dataset, f"{kind}DatasetDict", "datasets") for kind in ("", "Iterable")):
        splits = {}
        for name, split in dataset.items():
            with reworded(partial("split {!r}: {}".format, name)):
                splits[name] = pack(**options | {"dataset": split})
        return type(dataset)(splits)
    planned = {
        "strategy": strategy,
        "seed": seed,
        "overflow": overflow,
        "max_documents": max_documents,
    }
    columns = drop_columns, first_position, mask_first_label, groups
    packing = Packing(max_length, planned, *columns)
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


def features_of(dataset: Any, rows: PlannedRows) -> Any:
    """Return the `datasets.Features` of packed rows, which keep classes, images and audio."""
    import datasets

    features = datasets.Features.from_arrow_schema(rows.table(0, 1).schema)
    # A mask of targets became labels.
    for name in features.keys() & {*rows.documents.per_token, *rows.documents.per_document}:
        kind = dataset.features[name]
        if name in rows.documents.per_token:
            kind = getattr(kind, "feature", None)
        inner: Any = kind
        while hasattr(inner, "feature"):  # several images for each document
            inner = inner.feature
        if isinstance(inner, datasets.ClassLabel | datasets.Image | datasets.Audio):
            features[name] = datasets.Sequence(kind)
    return features


def _write(dataset: Any, packing: Packing, rows: PlannedRows, num_proc: int | None) -> Any:
    """Return the rows as a `Dataset` in a cache file, which is written unless it exists."""
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
