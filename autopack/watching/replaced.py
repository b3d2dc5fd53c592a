"""Replace the tokens of some documents of a call: what all others get has to stay the same, to the
last bits.

The call runs as it came and with other tokens in some documents, in the same shapes and with the
same random numbers. So nothing but these tokens can make a difference. After 2 log2(D) checks any
two of D documents have been on different sides.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from autopack.auditing.cases import tokens_named
from autopack.auditing.compare import UNDIVIDED, Arguments, Difference, Fields, how_far
from autopack.auditing.fields import Side, Sides, fields_of
from autopack.auditing.running import first_that_moves
from autopack.calls.call import Call
from autopack.inspection.randomness import Pinned
from autopack.watching.schedule import CannotTell, Runs, sides_of, unnoticed

_TOGETHER = 4
"""Runs of each rank that gathers parameters together with others."""
_FEWEST = 4
"""Least number of different tokens in a call from which other tokens are drawn."""


def replaced(
    call: Call,
    turn: int,
    both: bool = True,
    share: float | None = None,
    packs: bool = True,
) -> Difference:
    """Return the largest difference in documents' results when other documents are replaced.

    Half of the documents are replaced, another half in each `turn`; with `both` then the other half
    too. With a `share` every draw is the number below which that share of draws lie. Ranks that run
    together run equally often, whatever they have, also where a call does not pack. Raises
    `CannotTell`.
    """
    drawn = contextlib.nullcontext() if share is None else Pinned(share)
    # Experts may draw for the tokens that they get, and Reformer draws its hashes by itself.
    draws = call.module.training and (has_experts(call.module) or not call.model.is_checked_closely)
    # Documents that begin alike by the tokens that they are given share what they did in the call
    # as it came.
    condition = partial(unnoticed, call, share=call.prefixes is not None, checkpoints=True)
    for noise in (True, False):
        with condition(noise=noise) as runs, drawn:
            with runs.on_ranks(packs, own=_TOGETHER, count=_TOGETHER):
                worst, sides, touched, changed = _largest_move(call, runs, turn, both)
            if worst.excess <= 1 or runs.together:
                break
            if not (noise and draws):
                again = [partial(runs, arguments) for arguments in (call.arguments, changed)]
                return replace(
                    worst, module=first_that_moves(call.module, again, sides, touched) or ""
                )
    return worst


def _largest_move(
    call: Call,
    runs: Runs,
    turn: int,
    both: bool,
) -> tuple[Difference, Sides, np.ndarray, Arguments]:
    """Return (the largest difference, sides, mask of replaced documents, arguments with these).

    Raises `CannotTell`.
    """
    sides = sides_of(call)
    count = sides.count if call.part is None else len(call.part[0].lengths)
    if count < 2:
        raise CannotTell("it has one document")
    first = fields_of(runs(call.arguments))
    moved_before: Fields = {}
    moved: list[tuple[Difference, np.ndarray, Arguments]] = []
    for touched in halves_of(count, turn)[: 2 if both else 1]:
        arguments = with_other_tokens(call, sides, touched, turn)
        second = fields_of(runs(arguments))
        for name, value in first.items():
            if name in second and value.dim():
                found = _move_of(sides, moved_before, name, value, second[name], touched)
                moved += [] if found is None else [(found, touched, arguments)]
    reason = CannotTell("no part of its output can be divided among its documents")
    for worst, touched, arguments in sorted(moved, key=lambda each: -each[0].excess):
        try:
            return runs.widened(worst, first, call.arguments), sides, touched, arguments
        except CannotTell as of_one_field:
            reason = of_one_field
    raise reason


def _move_of(
    sides: Sides,
    moved_before: Fields,
    name: str,
    value: Tensor,
    other: Tensor,
    touched: np.ndarray,
) -> Difference | None:
    """Return a field's difference in untouched documents; None if it is indivisible and no leak.

    A number of an indivisible field leaks if it changes with both halves: the first one's changes
    are kept in `moved_before`.
    """

    def move_in(chosen: np.ndarray) -> Difference | None:
        one, two = (sides.part(name, each, chosen) for each in (value, other))
        return None if one is None or two is None else how_far(name, one, two)

    found = move_in(~touched)
    if found is None:
        # Of what nobody can divide no number may depend on both halves.
        now = value != other if value.shape == other.shape else torch.ones((), dtype=torch.bool)
        met = name in moved_before and bool((now & moved_before[name]).any())
        moved_before[name] = now
        return Difference(name + UNDIVIDED) if met else None
    each = ((n, move_in(np.arange(len(touched)) == n)) for n in np.flatnonzero(~touched))
    moved = (int(n) for n, of_one in each if of_one is not None and of_one.excess > 1)
    return replace(found, document=next(moved, 0)) if found.excess > 1 else found


def has_experts(model: nn.Module) -> bool:
    """Return True if a module of the model, by its name, sends tokens to experts."""
    return any(
        "experts" in module._modules or "Expert" in type(module).__name__
        for module in model.modules()
    )


def halves_of(count: int, turn: int) -> list[np.ndarray]:
    """Return two complementary masks of documents (D,): those to replace first, and the others.

    Every other turn tells neighbours apart, since those are the first to meet. The first document
    is in the set that comes first in two turns of three, since most code looks back.
    """
    bits = max(1, (count - 1).bit_length())
    bit = turn // 2 % bits if turn % 2 else 0
    second = (np.arange(count) >> bit & 1).astype(bool)
    halves = [~second, second]
    return halves[::-1] if turn % 3 == 2 else halves


def with_other_tokens(call: Call, sides: Sides, touched: np.ndarray, turn: int) -> Arguments:
    """Return arguments with other tokens in the documents `touched`; raise `CannotTell` if none.

    A rank's part of a row may have none of them. Tokens that the configuration names stay, and so
    do common beginnings of rows.
    """
    arguments = dict(call.arguments)
    generator = torch.Generator().manual_seed(turn)
    special = torch.tensor(sorted({call.ignored_label, *tokens_named(call.module.config)}))
    changed = False
    for side in sides.halves:
        names = [f"{side.prefix}input_ids", f"{side.prefix}inputs_embeds"]
        given = [name for name in names if arguments.get(name) is not None]
        # of labels it makes the decoder's tokens
        for name in given or (["labels"] if side.prefix else []):
            value = arguments.get(name)
            if isinstance(value, Tensor) and tuple(value.shape[:2]) == side.owner.shape:
                where = torch.from_numpy(
                    np.append(touched, False)[side.owner] & ~_common_beginnings(call, side)
                )
                where = where.to(value.device).reshape(*where.shape, *[1] * (value.dim() - 2))
                new = _redrawn(value, where, special.to(value.device), generator)
                changed = changed or not torch.equal(new, value)
                arguments[name] = new
    if not changed and call.part is None:
        raise CannotTell("it brings no tokens that could be replaced")
    return arguments


def _common_beginnings(call: Call, side: Side) -> np.ndarray:
    """Return a mask (R, C) of tokens in common beginnings, and of the token behind each."""
    shared = np.zeros(side.owner.shape, dtype=bool)
    if call.prefixes is not None and len(call.prefixes.columns) == len(side.real):
        columns = call.prefixes.columns
        several = np.bincount(columns)[columns] > 1
        several[1:] |= several[:-1]
        shared[side.owner >= 0] = several
    return shared


def _redrawn(value: Tensor, where: Tensor, special: Tensor, generator: torch.Generator) -> Tensor:
    """Return tokens or embeddings, redrawn at `where` from the same call; `special` tokens stay."""
    if value.is_floating_point():
        drawn = torch.randperm(value.shape[1], generator=generator)
        return torch.where(where, value[:, drawn.to(value.device)].flip(-1), value)
    ordinary = ~torch.isin(value, special)
    pool = torch.unique(value[ordinary]).cpu()
    if len(pool) < _FEWEST:
        pool = torch.arange(3, 200)[~torch.isin(torch.arange(3, 200), special.cpu())]
    drawn = pool[torch.randint(0, len(pool), tuple(value.shape), generator=generator)].to(value)
    return torch.where(where & ordinary, drawn, value)
