"""Check that a trainer's data reach its model with their documents told apart.

A `transformers.Trainer` drops the columns that the forward of its model does not name, before its
collator sees an example. From packed rows it drops the columns that declare documents. Then every
row is one document, without a warning.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from autopack.errors import AutopackError, InvalidPacking
from autopack.inspection.media import PICTURES
from autopack.inspection.randomness import generators_restored
from autopack.integrations.trainers import (
    adapter_of,
    collator_of,
    datasets_of,
    derives_from,
    drops_columns,
    found_columns,
    iterables_of,
    trainers_among,
)
from autopack.layout import COMPLETION_KEYS, LABEL_KEYS, declarations
from autopack.layout.packed import PackedLayout, real_documents
from autopack.runtime.model import EnabledModel

logger = logging.getLogger(__name__)
BOUNDARIES = ("seq_lengths", "position_ids", "seq_idx")
"""Columns of packed rows that declare where documents begin."""
_KEPT = (*BOUNDARIES, "loss_weights", "document_weight")
_ROWS = 8
"""Number of rows of a data set that are searched for one of several documents."""


class KeptColumns(list[str]):
    """The columns that a trainer keeps, `added` ones at the end; `before` is the replaced value."""

    before: list[str] | None
    added: tuple[str, ...]


def keep_columns(trainer: Any) -> tuple[str, ...]:
    """Have a trainer keep the columns that `PackingCollator` reads; return those that were added.

    What is added already is returned again.
    """
    before, collator = getattr(trainer, "_signature_columns", None), collator_of(trainer)
    if isinstance(before, KeptColumns):
        return before.added
    if not (drops_columns(trainer) and _packs(collator)):
        return ()
    known = found_columns(trainer)
    there = {name for dataset in datasets_of(trainer) for name in _columns(dataset)}
    added = tuple(name for name in (*_KEPT, *_read_by(collator)) if name in there - {*known})
    columns = KeptColumns([*known, *added])
    columns.before, columns.added = before, added
    trainer._signature_columns = columns if added else before
    return added


def give_columns_back(trainer: Any) -> None:
    """Undo `keep_columns` on a trainer, in place."""
    columns = getattr(trainer, "_signature_columns", None)
    if isinstance(columns, KeptColumns):
        trainer._signature_columns = columns.before


def what_is_lost(trainer: Any) -> str | None:
    """Return, in words, how a trainer loses the boundaries of documents, or None.

    The columns of a row of several documents have to reach the collator, and the batch that the
    collator makes of it has to declare as many documents.
    """
    with generators_restored(nn.Module()):  # data sets and collators may draw
        lost = (_lost(trainer, dataset) for dataset in datasets_of(trainer))
        return next(filter(None, lost), None)


def say_what_is_cut(trainer: Any, said: set[Any]) -> str | None:
    """Return why a trainer's rows lose documents, or None; log it once, and add it to `said`."""
    adapter = adapter_of(trainer)
    why = None if adapter is None else adapter.why_documents_are_lost(trainer)
    if why is not None and why not in said:
        said.add(why)
        logger.warning("%s", why)
    return why


def check_step(
    model: EnabledModel, holders: list[Any], name: str, layout: PackedLayout | None, is_fed: bool
) -> None:
    """Raise `InvalidPacking` if the trainer among `holders` takes the documents of a row for one.

    `holders` hold the methods that run around the call, the innermost first, `layout` the documents
    of the call. `name` is the name of the model's class. With `is_fed` the call is one of those
    that the trainer's data feed, which are looked at in its first one.
    """
    # others have nothing to do with this call
    trainer, adapter = next(trainers_among(holders), (None, None))
    if adapter is None:
        return
    kind = type(trainer).__name__
    if adapter.adds_up_rows and layout is not None and real_documents(layout).sum() > layout.rows:
        raise InvalidPacking(
            f"{type(collator_of(trainer)).__name__} made rows of several documents, and {kind} "
            "adds up the log-probabilities of a row as those of one sequence. Leave the collator "
            f"to {kind}: {name} runs its padded batches without the padding.",
            code="trainer-loses-documents",
        )
    if is_fed and (model.fed_by is None or model.fed_by() is not trainer):
        lost = what_is_lost(trainer)
        if lost is not None:
            raise InvalidPacking(lost, code="trainer-loses-documents")
        say_what_is_cut(trainer, model.logged)
        model.fed_by = weakref.ref(trainer)


def _packs(collator: Any) -> bool:
    """Return True for a `PackingCollator`."""
    return derives_from(collator, "PackingCollator", "autopack.packing.collator")


def _read_by(collator: Any) -> tuple[str, ...]:
    """Return columns from which a `PackingCollator` makes targets and pixels; () for others."""
    if not _packs(collator):
        return ()
    return COMPLETION_KEYS if collator.image_processor is None else (*COMPLETION_KEYS, *PICTURES)


def _columns(dataset: Any) -> list[str]:
    """Return the known columns of a data set; of packed streams, the columns of `autopack.pack`."""
    names = getattr(dataset, "column_names", None)
    functions = [getattr(each, "function", None) for each in iterables_of(dataset)]
    if names is None and any(
        derives_from(each, "Packing", "autopack.packing.dataset") for each in functions
    ):
        names = ["input_ids", "labels", *BOUNDARIES[:2]]
    return list(names or ())


def _samples(dataset: Any) -> list[Mapping[str, Any]]:
    """Return some rows of a data set, and a made-up row of two documents with its columns.

    Nothing is drawn from a stream. The whole data set is sampled, since rows of a plan begin with
    long documents.
    """
    try:
        places = range(0, len(dataset), max(1, len(dataset) // _ROWS))
        found = [row for row in map(dataset.__getitem__, places) if isinstance(row, Mapping)]
    except Exception:
        # What its rows are got by, if there are any, nobody knows; whoever loads them will say what
        # is wrong.
        found = []
    names = _columns(dataset)
    made = {"input_ids": [1, 1, 1, 1], "labels": [1, 1, 1, 1], "seq_lengths": [2, 2]}
    made |= {"position_ids": [0, 1, 0, 1], "seq_idx": [0, 0, 1, 1]}
    return [*found, {name: made[name] for name in names if name in made}]


def _documents(row: Mapping[str, Any]) -> int:
    """Return the number of documents that a row's columns declare; 1 if they declare none."""
    names = ("input_ids", "attention_mask", "position_ids", "seq_idx")
    try:
        if row.get("seq_lengths") is not None:
            return len(row["seq_lengths"])
        batch = {
            name: torch.as_tensor(row[name]).reshape(1, -1)
            for name in names
            if row.get(name) is not None
        }
    except (TypeError, ValueError):  # of another form than a row of tokens has
        return 1
    return (_declared(batch) if "input_ids" in batch else None) or 1


def _collated(collator: Any, row: dict[str, Any]) -> Mapping[str, Any] | None:
    """Return the collator's batch of one row, or None if it makes no batch of tokens."""
    try:
        batch = collator([row])
    except Exception:
        # What it needs besides, nobody knows; it will say so itself.
        return None
    tokens = batch.get("input_ids") if isinstance(batch, Mapping) else None
    return batch if isinstance(tokens, torch.Tensor) and tokens.dim() == 2 else None


def _lost(trainer: Any, dataset: Any) -> str | None:
    """Return, in words, how one data set loses the boundaries of documents, or None."""
    collator, name = collator_of(trainer), type(trainer).__name__
    names = _columns(dataset)
    if names and not {*BOUNDARIES, *_read_by(collator)}.intersection(names):
        return None
    samples = _samples(dataset)
    names = names or list(samples[0])
    columns = found_columns(trainer) if drops_columns(trainer) else names
    dropped = [column for column in names if column not in columns]
    ways = (
        "Call autopack.enable(trainer), which has it keep them, or set remove_unused_columns=False"
    )
    row = next((row for row in samples if _documents(row) > 1), {})
    documents = _documents(row)
    kept = {column: value for column, value in row.items() if column in columns}
    # What never comes to the collator is lost, whatever the collator makes of the rest.
    if _documents(kept) < documents:
        lost = ", ".join(column for column in dropped if column in BOUNDARIES)
        return (
            f"{name} drops {lost} of its packed rows, which its model does not name, so a row of "
            f"{documents} documents comes as one. {ways}, with "
            "data_collator=autopack.PackingCollator()."
        )
    has_labels = not {*LABEL_KEYS}.isdisjoint(names)
    read = [
        each
        for each in dropped
        if each in _read_by(collator) and not (has_labels and each in COMPLETION_KEYS)
    ]
    if read:
        return (
            f"{name} drops {', '.join(read)} of its data, and its collator makes targets or "
            f"pixels of them. {ways}."
        )
    batch = _collated(collator, kept) if kept else None
    if batch is not None and (_declared(batch) or documents) < documents:
        return (
            f"{type(collator).__name__} makes one document of a row of {documents}. Give {name} "
            f"data_collator=autopack.PackingCollator(), which keeps them apart."
        )
    return None


def _declared(batch: Mapping[str, Any]) -> int | None:
    """Return the number of documents that a batch declares, or None if it is malformed."""
    tokens = batch["input_ids"]
    try:
        layout = declarations.read(batch, (tokens.shape[0], tokens.shape[1]), tokens.device).layout
    except AutopackError:
        return None  # the call will say so itself
    return len(tokens) if layout is None else int(real_documents(layout).sum())
