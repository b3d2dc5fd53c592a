"""Documents that begin alike, for plans: a group shares a row, which computes its beginning once.

An enabled model finds common beginnings of a row's documents by itself (`autopack.calls.prefixes`).
Here such documents are only put together, and a row holds as many as fit if the beginning counts
once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from autopack.layout import LEAST_SHARED
from autopack.packing.checks import IDS, wrong_numbers
from autopack.packing.lengths import Pieces, numbers, zeros
from autopack.packing.strategies import next_fit

ALONE = -1
"""Group number of documents without a group."""


class Grouped(NamedTuple):
    """Documents of a plan by group: (documents,) int64 both.

    `groups` are the numbers of their groups, and `prefixes` the tokens that all of a group begin
    with in common.
    """

    groups: np.ndarray
    prefixes: np.ndarray


class Units(NamedTuple):
    """Documents that go into a row as a whole, one or several that begin alike.

    `planned` are the units for planning: numbered, as long as the room that they take. `members`
    are the pieces of all units, unit by unit, and `bounds` where each unit begins and ends in
    those.
    """

    planned: Pieces
    members: Pieces
    bounds: np.ndarray


def units_of(pieces: Pieces, grouped: Grouped, max_length: int) -> Units:
    """Return the units of these documents: groups, and parts of groups that are too long for a
    row."""
    groups = grouped.groups[pieces.documents]
    groups = np.where(groups == ALONE, ALONE - 1 - np.arange(len(groups)), groups)  # a group for each
    order = np.argsort(groups, kind="stable")
    starts = np.flatnonzero(np.append(True, np.diff(groups[order]) != 0))
    sizes = np.diff(starts, append=len(order))
    lengths = pieces.lengths[order]
    prefixes = np.minimum.reduceat(np.minimum(grouped.prefixes[pieces.documents][order], lengths), starts)
    rooms = np.add.reduceat(lengths, starts) - (sizes - 1) * prefixes
    begins = starts
    for number in np.flatnonzero(rooms > max_length).tolist():
        rests = lengths[starts[number] : starts[number] + sizes[number]] - prefixes[number]
        # Documents that are nothing but the prefix take no room, and one of them may fill a row with it.
        parts = next_fit(np.maximum(rests, 1), max(1, max_length - int(prefixes[number])), len(rests))
        begins = np.union1d(begins, starts[number] + parts[:-1])
    # In the order in which they come, which some strategies keep.
    turn = np.argsort(np.minimum.reduceat(order, begins), kind="stable")
    members, bounds = pieces.take(order).rows(np.append(begins, len(order)), turn)
    shared = np.repeat(np.repeat(prefixes, sizes)[begins[turn]], np.diff(bounds))
    shared[bounds[:-1]] = 0
    squares = members.lengths * members.lengths - shared * shared
    rooms, pairs = (np.add.reduceat(each, bounds[:-1]) for each in (members.lengths - shared, squares))
    planned = Pieces(np.arange(len(begins)), zeros(len(begins)), rooms, pairs)
    return Units(planned, members._replace(squares=squares, shared=shared), bounds)


def together(lengths: np.ndarray, grouped: Grouped | None, overflow: str, align: int) -> Pieces:
    """Return documents of several sequences as pieces, as long as the room that each takes in a
    row.

    `lengths` are (documents, sequences), and documents stay whole. `shared` is the common beginning
    of a document's sequences; `squares` leave it out. Raises if documents cannot be kept whole.
    """
    if overflow in ("truncate", "split"):
        raise ValueError(f"{overflow=} cuts documents, and lengths {lengths.shape} are of several sequences each")
    if align > 1:
        raise ValueError(f"align={align}: wanted lengths of one sequence per document, found {lengths.shape}")
    rooms, squares, shared = lengths.sum(axis=1), (lengths * lengths).sum(axis=1), None
    if grouped is not None:
        more = lengths.shape[1] - 1
        shared = more * grouped.prefixes
        rooms, squares = rooms - shared, squares - more * grouped.prefixes**2
    return Pieces(np.arange(len(rooms)), zeros(len(rooms)), rooms, squares, shared)


def check_groups(overflow: str, align: int, max_documents: int | None) -> None:
    """Raise `ValueError` for options with which groups of documents cannot be planned."""
    if overflow == "split":
        raise ValueError(f"{overflow=} cuts documents, whose parts begin with nothing in common: leave groups= out")
    if align > 1:
        raise ValueError(f"align={align}: what documents begin with cannot be computed once in parts of ranks")
    if max_documents is not None:
        raise ValueError("max_documents= is not kept for groups=, which go into a row together: leave one out")


def groups_of(documents: Any, by: str | bool) -> dict[str, np.ndarray]:
    """Return the `groups` and `prefixes` of documents that `autopack.packing.plan` takes; {} if
    `by` is False.

    `documents` are `autopack.packing.documents.Documents`. `by` names a column, in which equal
    values make a group, or is True for groups of the same first tokens.
    """
    if by is False:
        return {}
    groups = _by_first_tokens(documents) if by is True else documents.numbered(by)
    return {"groups": groups, "prefixes": _common_beginnings(documents, groups)}


def _first_tokens(documents: Any, chosen: np.ndarray, count: int) -> np.ndarray:
    """Return so many first tokens of these documents, (documents, tokens)."""
    ids = documents.values(chosen, zeros(len(chosen)), np.full(len(chosen), count), (IDS,))[IDS]
    return ids.reshape(-1, count)


def _by_first_tokens(documents: Any) -> np.ndarray:
    """Return groups of documents with the same first tokens, as many as a model shares:
    (documents,) int64."""
    long = np.flatnonzero(documents.lengths >= LEAST_SHARED)
    groups = np.full(len(documents.lengths), ALONE)
    if len(long):
        ids = _first_tokens(documents, long, LEAST_SHARED)
        groups[long] = np.unique(ids, axis=0, return_inverse=True)[1].reshape(-1)
    return groups


def _common_beginnings(documents: Any, groups: np.ndarray) -> np.ndarray:
    """Return the length of each group's common beginning, (documents,) int64; 0 if it is too
    short."""
    lengths = documents.lengths
    found = np.zeros(len(lengths), np.int64)
    order = np.argsort(groups, kind="stable")
    order = order[groups[order] != ALONE]
    bounds = np.append(np.flatnonzero(np.diff(groups[order], prepend=ALONE)), len(order))
    for group in np.flatnonzero(np.diff(bounds) > 1).tolist():
        members = order[bounds[group] : bounds[group + 1]]
        shortest = int(lengths[members].min())
        ids = _first_tokens(documents, members, shortest)
        same = np.append((ids == ids[0]).all(axis=0), False)
        found[members] = same.argmin() if same.argmin() >= LEAST_SHARED else 0
    return found


def read_groups(groups: Any, prefixes: Any, lengths: np.ndarray) -> Grouped | None:
    """Return the groups of documents of these lengths; None if none were given.

    `lengths` are (documents,) or (documents, sequences). Raises `InvalidPacking` unless there is an
    int for each document, and a beginning of it; `ValueError` for groups of documents that are
    several sequences.
    """
    if groups is None and prefixes is None:
        return None
    if groups is None and lengths.ndim == 1:
        raise ValueError("prefixes= says what documents of one group begin with: pass groups=, too")
    if groups is not None and lengths.ndim > 1:
        raise ValueError(f"groups= is for documents of one sequence each; found lengths of shape {lengths.shape}")
    numbered_groups = np.arange(len(lengths)) if groups is None else _ints("groups", groups, len(lengths), ALONE)
    found = np.zeros(len(lengths), np.int64) if prefixes is None else _ints("prefixes", prefixes, len(lengths), 0)
    shortest = lengths if lengths.ndim == 1 else lengths.min(axis=1)
    if (over := found > shortest).any():
        index = int(over.argmax())
        raise wrong_numbers(
            f"prefixes[{index}] is {found[index]}, over the {shortest[index]} tokens of its "
            "document; pass what documents begin with in common"
        )
    return Grouped(numbered_groups, found)


def _ints(name: str, given: Any, count: int, least: int) -> np.ndarray:
    try:
        found = numbers(given[:] if hasattr(given, "__getitem__") else list(given))
    except ValueError as error:
        raise wrong_numbers(f"{name}: wanted an int per document; {str(error).partition(';')[0]}") from error
    if found.shape != (count,) or found.dtype.kind != "i":
        raise wrong_numbers(f"{name}: wanted {count} ints, one per document; found {found.dtype} of {found.shape}")
    if count and found.min() < least:
        index = int((found < least).argmax())
        raise wrong_numbers(f"{name}[{index}] is {found[index]}: wanted an int of at least {least}")
    return found
