"""Documents that begin alike, for plans: a group shares a row, which computes its beginning once.

An enabled model finds common beginnings of a row's documents by itself (`autopack.calls.prefixes`).
Here such documents are only put together, and a row holds as many as fit if the beginning counts
once.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from autopack.layout import LEAST_SHARED
from autopack.packing.checks import IDS, wrong_numbers
from autopack.packing.lengths import Pieces, check_each, ints, zeros
from autopack.packing.strategies import next_fit

ALONE = -1
"""Group number of documents without a group."""


def units_of(
    pieces: Pieces,
    groups: np.ndarray,
    prefixes: np.ndarray,
    max_length: int,
) -> tuple[Pieces, np.ndarray]:
    """Return the pieces ordered by units, and the bounds of units, (units + 1,).

    A unit goes into a row as a whole: a group, or a part of one that is too long for a row.
    `groups` and `prefixes` are of all documents.
    """
    groups = groups[pieces.documents]
    # a group for each
    groups = np.where(groups == ALONE, ALONE - 1 - np.arange(len(groups)), groups)
    order = np.argsort(groups, kind="stable")
    starts = np.flatnonzero(np.append(True, np.diff(groups[order]) != 0))
    sizes = np.diff(starts, append=len(order))
    lengths = pieces.lengths[order]
    prefixes = np.minimum.reduceat(np.minimum(prefixes[pieces.documents][order], lengths), starts)
    rooms = np.add.reduceat(lengths, starts) - (sizes - 1) * prefixes
    begins = starts
    for number in np.flatnonzero(rooms > max_length).tolist():
        rests = lengths[starts[number] : starts[number] + sizes[number]] - prefixes[number]
        # Documents that are nothing but the prefix take no room, and one of them may fill a row
        # with it.
        parts = next_fit(
            np.maximum(rests, 1), max(1, max_length - int(prefixes[number])), len(rests)
        )
        begins = np.union1d(begins, starts[number] + parts[:-1])
    # In the order in which they come, which some strategies keep.
    turn = np.argsort(np.minimum.reduceat(order, begins), kind="stable")
    members, bounds = pieces.take(order).rows(np.append(begins, len(order)), turn)
    shared = np.repeat(np.repeat(prefixes, sizes)[begins[turn]], np.diff(bounds))
    shared[bounds[:-1]] = 0
    return members._replace(shared=shared), bounds


def groups_of(documents: Any, by: str | bool) -> dict[str, np.ndarray]:
    """Return arguments `groups` and `prefixes` for `autopack.packing.plan`; {} if `by` is False.

    `documents` are `autopack.packing.documents.Documents`. `by` names a column, in which equal
    values make a group, or is True for groups of the same first tokens.
    """
    if by is False:
        return {}
    groups = _by_first_tokens(documents) if by is True else documents.numbered(by)
    return {"groups": groups, "prefixes": _common_beginnings(documents, groups)}


def _first_tokens(documents: Any, chosen: np.ndarray, count: int) -> np.ndarray:
    """Return the first `count` tokens of the chosen documents, (documents, count)."""
    ids = documents.values(chosen, zeros(len(chosen)), np.full(len(chosen), count), (IDS,))[IDS]
    return ids.reshape(-1, count)


def _by_first_tokens(documents: Any) -> np.ndarray:
    """Return group numbers, (documents,) int64, equal where the first `LEAST_SHARED` tokens are."""
    long = np.flatnonzero(documents.lengths >= LEAST_SHARED)
    groups = np.full(len(documents.lengths), ALONE)
    if len(long):
        ids = _first_tokens(documents, long, LEAST_SHARED)
        groups[long] = np.unique(ids, axis=0, return_inverse=True)[1].reshape(-1)
    return groups


def _common_beginnings(documents: Any, groups: np.ndarray) -> np.ndarray:
    """Return each document's length of its group's beginning, (documents,) int64; 0 if short."""
    lengths = documents.lengths
    found = np.zeros(len(lengths), np.int64)
    order = np.argsort(groups, kind="stable")
    for members in np.split(order, np.flatnonzero(np.diff(groups[order])) + 1):
        if len(members) < 2 or groups[members[0]] == ALONE:
            continue
        ids = _first_tokens(documents, members, int(lengths[members].min()))
        same = np.append((ids == ids[0]).all(axis=0), False)
        found[members] = same.argmin() if same.argmin() >= LEAST_SHARED else 0
    return found


def read_groups(groups: Any, prefixes: Any, lengths: np.ndarray) -> dict[str, np.ndarray]:
    """Return `groups` and `prefixes` as (documents,) int64, by name; {} if neither was given.

    Raises `InvalidPacking` unless there is an int for each document, and a beginning of it, and
    `ValueError` for prefixes without groups.
    """
    if groups is None and prefixes is None:
        return {}
    if groups is None:
        raise ValueError("prefixes= says what documents of one group begin with: pass groups=, too")
    found = {"groups": ints("groups", groups)}
    found["prefixes"] = zeros(len(lengths)) if prefixes is None else ints("prefixes", prefixes)
    for name, numbers in found.items():
        if len(numbers) != len(lengths):
            raise wrong_numbers(
                f"{name}: wanted {len(lengths)} ints, one per document; found {len(numbers)}",
            )
        least = ALONE if name == "groups" else 0
        check_each(name, numbers, numbers < least, f"wanted at least {least}")
        check_each(name, numbers, numbers > np.iinfo(np.int64).max, "wanted 64 bits")
    too_long = found["prefixes"] > lengths
    check_each("prefixes", found["prefixes"], too_long, "wanted at most the tokens of its document")
    return {name: numbers.astype(np.int64) for name, numbers in found.items()}
