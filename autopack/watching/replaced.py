"""Replace the tokens of some documents of a call: what all others get has to stay the same, to the last bits.

The call runs as it came and with other tokens in some documents, in the same shapes and with the same random numbers.
So nothing but these tokens can make a difference. After 2 log2(D) checks any two of D documents have been on
different sides.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import nn

from autopack.auditing.auditor import TOLERANCE
from autopack.auditing.cases import tokens_named
from autopack.auditing.fields import Fields
from autopack.calls.call import DROPPED, Call
from autopack.inspection.randomness import Pinned
from autopack.layout.host import host_values
from autopack.layout.pair import DECLARATIONS
from autopack.layout.ways import LAYOUT_KWARGS
from autopack.watching.conditions import Runs, not_sharing, unnoticed
from autopack.watching.origin import module_of
from autopack.watching.owners import CannotTell, Side, count_of, part_of, sides_of

_ROUNDINGS = 4.0
"""Roundings of a field's dtype, at its largest value, by which what nobody touched may move.

All but three of 256 types stay the same to the bit; two mixtures of experts and Reformer are within it.
"""
_TENTH = 0.1
"""Share of what an audit takes for rounding that is allowed as well: convolutions of some shapes round by their
neighbours (Winograd's way), and layers behind them make more of it."""
_DECLARES = {*DROPPED, *LAYOUT_KWARGS, *DECLARATIONS, "position_ids", "decoder_position_ids"}
_FEWEST = 4
"""Number of different tokens in a call from which those of its documents are drawn."""


@dataclass(frozen=True)
class Moved:
    """How far a field moved in documents that nobody touched."""

    name: str
    excess: float
    """Largest move, as a multiple of what is allowed."""
    relative: float = math.inf
    """Largest move, in standard deviations of the field."""
    tolerance: float = 0.0
    """What is allowed, in the same unit."""
    document: int = 0
    """First document that has moved."""
    half: int = 0
    """Number of the half of the documents that were replaced."""
    module: str = ""
    """Module in which it begins, if that is known."""


def replaced(call: Call, turn: int, both: bool, share: float | None = None) -> Moved:
    """Return the field that moved the farthest. Raises `CannotTell`.

    Half of the documents are replaced, another half in each `turn`; with `both` then the other half too. With a `share`
    every draw is the number below which that share of draws lie.
    """
    drawn = contextlib.nullcontext() if share is None else Pinned(share)
    with unnoticed(call.module, call.model, noise=True, checkpoints=True), _apart(call), drawn:
        found = _Replacing(call, turn, both)
        worst = found.worst()
        if worst.excess > 1:
            worst = found.beside_itself(worst)
    if worst.excess > 1 and call.module.training and (routes(call.module) or not call.model.is_checked_closely):
        # Experts may draw for the tokens that they get, and Reformer draws its hashes by itself.
        with unnoticed(call.module, call.model, checkpoints=True), _apart(call), drawn:
            found = _Replacing(call, turn, both)
            worst = found.worst()
    if worst.excess > 1:
        with unnoticed(call.module, call.model, noise=True, checkpoints=True), _apart(call), drawn:
            worst = replace(worst, module=found.origin(worst))
    return worst


def _apart(call: Call) -> contextlib.AbstractContextManager[None]:
    """Have documents that begin alike by the tokens that they are given share nothing, if none did before."""
    return contextlib.nullcontext() if call.prefixes is not None else not_sharing(call.model)


def replaced_together(call: Call, turn: int, packs: bool) -> Moved:
    """Do the same on a rank that gathers parameters together with others, in four runs. Raises `CannotTell`.

    A rank whose call cannot be checked, or does not pack, runs it four times as it came.
    """
    with unnoticed(call.module, call.model, noise=True, checkpoints=True), _apart(call):
        try:
            if not packs:
                raise CannotTell("the call packed nothing")
            changed = _changed(call, sides_of(call), turn, or_none=call.part is not None)
        except CannotTell:
            runs = Runs(call)
            for _ in range(4):
                runs(call.arguments)
            raise
        found = _Replacing(call, turn, both=True, changed=changed)
        return found.beside_itself(found.worst())


def _changed(
    call: Call, sides: list[Side], turn: int, or_none: bool = False
) -> list[tuple[np.ndarray, dict[str, Any]]]:
    """Return both halves of the documents, and the arguments with other tokens in them. Raises `CannotTell`.

    The part of a row on one rank may have no token of a half: `or_none`.
    """
    count = count_of(sides) if call.part is None else len(call.part[0].lengths)
    if count < 2:
        raise CannotTell("it has one document")
    return [(touched, with_other_tokens(call, sides, touched, turn, or_none)) for touched in halves_of(count, turn)]


class _Replacing:
    """Runs of a call as it came, and with other tokens in some documents."""

    def __init__(self, call: Call, turn: int, both: bool, changed: Any = None):
        self._call, self._sides = call, sides_of(call)
        self._changed = (changed or _changed(call, self._sides, turn))[: 2 if both else 1]
        self._runs = Runs(call)
        self._first = self._runs.fields(call.arguments)
        self._moved: list[Moved] = []
        nobodys: Fields = {}
        for half, (touched, arguments) in enumerate(self._changed):
            second = self._runs.fields(arguments)
            for name, value in self._first.items():
                if name in second and value.dim():
                    found = self._compared(name, value, second[name], touched, nobodys)
                    self._moved += [] if found is None else [replace(found, half=half)]

    def worst(self) -> Moved:
        """Return the field that moved the farthest. Raises `CannotTell`."""
        if not self._moved:
            raise CannotTell("no part of its output can be divided among its documents")
        return max(self._moved, key=lambda each: each.excess)

    def beside_itself(self, worst: Moved) -> Moved:
        """Return a move beside what its field moves if nothing is replaced, of which eight times as much is allowed.

        Atomic additions, and draws from a generator that nobody knows, differ from run to run.
        """
        second = self._runs.fields(self._call.arguments).get(worst.name)
        first = self._first.get(worst.name)
        if first is None or second is None:
            return worst
        allowed = max(1.0, 8 * how_far(worst.name, first, second).excess)
        if allowed == math.inf:
            raise CannotTell(f"{worst.name} is another one in each run")
        return replace(worst, excess=worst.excess / allowed, tolerance=worst.tolerance * allowed)

    def origin(self, worst: Moved) -> str:
        """Return the module in which a field begins to move; "" if that cannot be told."""
        touched, arguments = self._changed[worst.half]

        def moves(one: torch.Tensor, two: torch.Tensor) -> bool:
            return how_far("", one, two).excess > 1

        try:
            return module_of(self._call, self._runs, self._sides, touched, arguments, moves)
        except Exception:  # the leak is said in any case
            return ""

    def _compared(
        self, name: str, value: torch.Tensor, other: torch.Tensor, touched: np.ndarray, nobodys: Fields
    ) -> Moved | None:
        one, two = (part_of(self._sides, name, each, ~touched) for each in (value, other))
        if one is not None and two is not None:
            found = how_far(name, one, two)
            if found.excess > 1 and one.shape == two.shape:
                found = self._place(found, value, other, touched)
            return found
        # Of what nobody can divide no number may depend on both halves.
        gone = value != other if value.shape == other.shape else torch.ones((), dtype=torch.bool)
        before = nobodys.get(name)
        nobodys[name] = gone
        met = before is not None and bool((gone & before).any())
        return Moved(f"{name}, which is no document's,", math.inf) if met else None

    def _place(self, found: Moved, value: torch.Tensor, other: torch.Tensor, touched: np.ndarray) -> Moved:
        """Return the same with the first document that has moved."""
        for number in np.flatnonzero(~touched):
            chosen = np.arange(len(touched)) == number
            one, two = (part_of(self._sides, found.name, each, chosen) for each in (value, other))
            if one is not None and two is not None and how_far(found.name, one, two).excess > 1:
                return replace(found, document=int(number))
        return found


def routes(model: nn.Module) -> bool:
    """Return True if tokens choose experts."""
    return any("experts" in module._modules or "Expert" in type(module).__name__ for module in model.modules())


def halves_of(count: int, turn: int) -> list[np.ndarray]:
    """Return two complementary sets of documents, bool (D,): those that are replaced first, and the others.

    Every other turn tells neighbours apart, since those are the first to meet. The first document is in the set that
    comes first in two turns of three, since most code looks back.
    """
    bits = max(1, (count - 1).bit_length())
    bit = turn // 2 % bits if turn % 2 else 0
    second = (np.arange(count) >> bit & 1).astype(bool)
    halves = [~second, second]
    return halves[::-1] if turn % 3 == 2 else halves


def with_other_tokens(
    call: Call, sides: list[Side], touched: np.ndarray, turn: int, or_none: bool = False
) -> dict[str, Any]:
    """Return the arguments with other tokens in the documents that are touched. Raises `CannotTell`.

    Tokens that the configuration names stay, and so do beginnings that rows share. Token types and the like of a
    document are turned round.
    """
    arguments = dict(call.arguments)
    generator = torch.Generator().manual_seed(turn)
    special = torch.tensor(sorted({call.ignored_label, *tokens_named(call.module.config)}))
    tokens = set()
    for side in sides:
        for name in _names_of_tokens(call, side):
            value = arguments.get(name)
            if isinstance(value, torch.Tensor) and tuple(value.shape[:2]) == side.owner.shape:
                where = torch.from_numpy(np.append(touched, False)[side.owner] & ~_shared(call, side)).to(value.device)
                new = _others(value, where, side, special.to(value.device), generator)
                if not torch.equal(new, value):
                    arguments[name] = new
                    tokens.add(name)
    if not (tokens or or_none):
        raise CannotTell("it brings no tokens that could be replaced")
    for name, value in call.arguments.items():
        if not isinstance(value, torch.Tensor) or name in _DECLARES or "input" in name or "label" in name:
            continue
        owner = next((side.owner for side in sides if value.shape[:2] == side.owner.shape), None)
        if owner is not None:
            arguments[name] = _turned(value, owner, touched)
    return arguments


def _names_of_tokens(call: Call, side: Side) -> list[str]:
    names = [f"{side.prefix}input_ids", f"{side.prefix}inputs_embeds"]
    given = [name for name in names if call.arguments.get(name) is not None]
    return given or (["labels"] if side.prefix else [])  # of which it makes the decoder's tokens


def _shared(call: Call, side: Side) -> np.ndarray:
    """Return which tokens rows may share, bool (R, C): beginnings in common, with the first token that differs."""
    shared = np.zeros(side.owner.shape, dtype=bool)
    ids = call.arguments.get("input_ids")
    if call.prefixes is None or not isinstance(ids, torch.Tensor) or ids.shape[:2] != shared.shape:
        return shared
    flat, owner = host_values(ids).reshape(-1), side.owner.reshape(-1)
    places = [np.flatnonzero(owner == number) for number in range(owner.max() + 1)]
    order = sorted(range(len(places)), key=lambda number: flat[places[number]].tolist())
    for one, other in pairwise(order):
        length = min(len(places[one]), len(places[other]))
        differ = np.flatnonzero(flat[places[one][:length]] != flat[places[other][:length]])
        fork = int(differ[0]) + 1 if len(differ) else length + 1
        for number in (one, other):
            shared.reshape(-1)[places[number][:fork]] = True
    return shared


def _others(
    value: torch.Tensor, where: torch.Tensor, side: Side, special: torch.Tensor, generator: torch.Generator
) -> torch.Tensor:
    """Return tokens, or embeddings, with others of the same call where they are touched."""
    if value.is_floating_point():
        pool = value[torch.from_numpy(side.owner >= 0).to(value.device)]
        drawn = torch.randint(0, len(pool), (int(where.sum()),), generator=generator)
        new = value.clone()
        new[where] = pool[drawn.to(value.device)].flip(-1)
        return new
    ordinary = ~torch.isin(value, special)
    pool = torch.unique(value[ordinary]).cpu()
    if len(pool) < _FEWEST:
        pool = torch.arange(3, 200)[~torch.isin(torch.arange(3, 200), special.cpu())]
    drawn = pool[torch.randint(0, len(pool), tuple(value.shape), generator=generator)].to(value)
    while where.dim() < value.dim():
        where = where[..., None]
    return torch.where(where & ordinary, drawn, value)


def _turned(value: torch.Tensor, owner: np.ndarray, touched: np.ndarray) -> torch.Tensor:
    order = np.arange(owner.size)
    for number in np.flatnonzero(touched):
        places = np.flatnonzero(owner.reshape(-1) == number)
        order[places] = places[::-1]
    flat = value.reshape(-1, *value.shape[2:])
    return flat[torch.from_numpy(order).to(value.device)].reshape(value.shape)


def how_far(name: str, one: torch.Tensor, two: torch.Tensor) -> Moved:
    """Return how far the same part of a field is apart in two runs."""
    if one.shape != two.shape:
        return Moved(name, math.inf)
    differ = one != two
    if one.is_floating_point():
        differ &= ~(one.isnan() & two.isnan())
    if not bool(differ.any()):
        return Moved(name, 0.0, 0.0)
    if not one.is_floating_point():
        return Moved(name, math.inf, 1.0)
    wide = torch.promote_types(one.dtype, torch.float32)
    gaps = (one[differ].to(wide) - two[differ].to(wide)).abs().nan_to_num(math.inf)
    # What stands for minus infinity is no value.
    sane = one[one.abs() < torch.finfo(one.dtype).max / 2].to(wide)
    largest = float(sane.abs().max()) if sane.numel() else 0.0
    spread = float(sane.std()) if sane.numel() > 1 else 0.0
    scale = max(spread or largest, torch.finfo(torch.float64).tiny)
    relative = float(gaps.max()) / scale
    rounding = _ROUNDINGS * torch.finfo(one.dtype).eps * largest / scale
    tolerance = max(rounding, _TENTH * TOLERANCE.get(one.dtype, 0.0))
    return Moved(name, relative / max(tolerance, torch.finfo(torch.float64).tiny), relative, tolerance)
