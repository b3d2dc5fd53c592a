"""The influence of documents of a call on one another: what others get when some are replaced, and
gradients of inputs.

*Replaced*: the call runs as it came and with other tokens in some documents, in the same shapes and
with the same random numbers, so nothing but these tokens can make a difference. After 2 log2(D)
checks any two of D documents have been on different sides. *Gradients*: a document cannot always be
cut out of a call and run alone: only its model knows which images are its own, for one. But an
input without a part in a result gets no gradient by it. So the gradients of a call's embedded
tokens and media, by the results of some documents and by the results of all others, may not meet
at any number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel

from autopack.auditing.cases import tokens_named
from autopack.auditing.compare import (
    ADDED_UP,
    MET,
    UNDIVIDED,
    Arguments,
    Difference,
    Fields,
    how_far,
    largest,
)
from autopack.auditing.fields import Side, Sides, fields_of
from autopack.auditing.running import (
    first_that_moves,
    gradients_of,
    listening,
    trained,
    weighted_sum,
)
from autopack.calls.call import Call
from autopack.calls.encoder_decoder import PairCall
from autopack.inspection import media
from autopack.inspection.foreign import is_own
from autopack.inspection.randomness import Pinned
from autopack.inspection.source import class_of
from autopack.watching.schedule import CannotTell, Runs, sides_of, unnoticed

_TOGETHER = 4
"""Runs of each rank that gathers parameters together with others."""
_FEWEST = 4
"""Least number of different tokens in a call from which other tokens are drawn."""
_MOST = 20_000_000
"""Numbers of the parameters of third-party modules, above which their gradients are not compared.
"""
_LABELLED = ("labels", "num_items_in_batch")
_FOLLOWED = ("inputs_embeds", "decoder_inputs_embeds")


def replaced(
    call: Call, turn: int, both: bool = True, share: float | None = None, packs: bool = True
) -> Difference:
    """Return the largest difference in documents' results when other documents are replaced.

    Half of the documents are replaced, another half in each `turn`; with `both` then the other half
    too. With a `share` every draw is the number below which that share of draws lie. Ranks that run
    together run equally often, whatever they have, also where a call does not pack. Raises
    `CannotTell`.
    """
    drawn = nullcontext() if share is None else Pinned(share)
    # Experts may draw for the tokens that they get, and Reformer draws its hashes by itself.
    draws = call.module.training and (has_experts(call.module) or not call.model.is_checked_closely)
    # Documents that begin alike by the tokens that they are given share what they did in the call
    # as it came.
    kept: dict[str, bool] = {"share": call.prefixes is not None, "checkpoints": True}
    for noise in (True, False):
        with unnoticed(call, noise=noise, **kept) as runs, drawn:
            with runs.on_ranks(packs, _TOGETHER, _TOGETHER):
                worst, begins_in = _largest_move(call, runs, turn, both)
            if worst.excess <= 1 or runs.together:
                break
            if not (noise and draws):
                return replace(worst, module=begins_in() or "")
    return worst


def _largest_move(
    call: Call, runs: Runs, turn: int, both: bool
) -> tuple[Difference, Callable[[], str | None]]:
    """Return (the largest difference, a function that returns the module in which it begins).

    Raises `CannotTell`.
    """
    sides = sides_of(call)
    count = sides.count if call.part is None else len(call.part[0].lengths)
    if count < 2:
        raise CannotTell("it has one document")
    first, moved_before = fields_of(runs(call.arguments)), Fields()
    moved: list[tuple[Difference, np.ndarray, Arguments]] = []
    for touched in halves_of(count, turn)[: 1 + both]:
        arguments = with_other_tokens(call, sides, touched, turn)
        moves = _moves(sides, moved_before, first, fields_of(runs(arguments)), touched)
        moved += [(found, touched, arguments) for found in moves]
    reason = CannotTell("no part of its output can be divided among its documents")
    for worst, touched, arguments in sorted(moved, key=lambda each: -each[0].excess):
        again = [partial(runs, given) for given in (call.arguments, arguments)]
        begins_in = partial(first_that_moves, call.module, again, sides, touched)
        try:
            return runs.widened(worst, first, call.arguments), begins_in
        except CannotTell as of_one_field:
            reason = of_one_field
    raise reason


def _moves(
    sides: Sides, moved_before: Fields, first: Fields, second: Fields, touched: np.ndarray
) -> Iterator[Difference]:
    """Yield each field's difference in untouched documents; of an indivisible one only a leak.

    A number of an indivisible field leaks if it changes with both halves: the first one's changes
    are kept in `moved_before`.
    """

    def move_in(name: str, chosen: np.ndarray) -> Difference | None:
        one, two = (sides.part(name, each[name], chosen) for each in (first, second))
        return None if one is None or two is None else how_far(name, one, two)

    for name, one in first.items():
        two = second.get(name)
        if two is None or not one.dim():
            continue
        found = move_in(name, ~touched)
        if found is None:
            # Of what nobody can divide no number may depend on both halves.
            now = one != two if one.shape == two.shape else torch.ones((), dtype=torch.bool)
            if name in moved_before and bool((now & moved_before[name]).any()):
                yield Difference(name + UNDIVIDED)
            moved_before[name] = now
            continue
        each = ((n, move_in(name, np.arange(len(touched)) == n)) for n in np.flatnonzero(~touched))
        moved = (int(n) for n, of_one in each if of_one is not None and of_one.excess > 1)
        yield replace(found, document=next(moved, 0)) if found.excess > 1 else found


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


def leak_by_gradients(call: Call) -> Difference:
    """Return the largest leak between a packed call's documents, by gradients of its inputs.

    The call runs once more, with media twice, and backward twice for each halving of the number of
    documents. Raises `CannotTell`.
    """
    layout = None if isinstance(call, PairCall) else call.declared.layout
    if layout is None:
        raise CannotTell("its documents are declared further in, or twice")
    sides = sides_of(call)
    if not media.given(call.arguments):
        return _leak_in_run(call, sides, nullcontext())[0]
    blind = True
    # Estimators that go straight through a choice have their gradients in the plain run alone.
    with suppress(Exception):  # the other one says what it raises
        found, blind = _leak_in_run(call, sides, nullcontext())
        if found.excess > 1:
            return found
    throughout = _Throughout()
    found, is_blind = _leak_in_run(call, sides, throughout)
    if found.excess > 1:
        return found
    if blind and is_blind:
        raise CannotTell("no gradient reaches its images or other media")
    if throughout.ended:
        raise CannotTell(
            "numbers that it computes become Python's or NumPy's, where no gradient follows them",
        )
    return found


def _leak_in_run(
    call: Call, sides: Sides, mode: AbstractContextManager[Any]
) -> tuple[Difference, bool]:
    """Return (the largest leak in a run in `mode`, True if media get no gradient in it)."""
    leaves: list[Tensor] = []
    """Copies of media, which come first, and of embedded tokens."""

    def leaf_of(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        leaves.append(tensor.detach().clone().requires_grad_())
        return leaves[-1].clone()  # some write to it

    def followed(value: Any) -> Any:
        """Return a value whose floating tensors are copies of new leaves."""
        return tree_map_only(Tensor, leaf_of, value)

    module: Any = call.module
    held = [(parameter, parameter.grad) for parameter in module.parameters()]
    given = {name: value for name, value in call.arguments.items() if name not in _LABELLED}
    embedding = None
    with suppress(NotImplementedError):
        embedding = module.get_input_embeddings()
    try:
        with unnoticed(call, share=False), torch.inference_mode(False), torch.enable_grad():
            # Reversible layers (Reformer) add to `.grad` in any backward pass.
            for parameter, _ in held:
                parameter.grad = None
            given |= {name: followed(given[name]) for name in media.given(given)}
            count = len(leaves)
            given |= {name: followed(given[name]) for name in _FOLLOWED if name in given}
            with listening(lambda part, _, out: followed(out) if part is embedding else None), mode:
                output = module(**given | {"return_dict": True})
            name, sums = _sums_of_documents(output, sides)
            of_media = gradients_of(sums.sum(), leaves[:count]) if count else []
            is_blind = bool(of_media) and not any(bool(each.any()) for each in of_media)
            return _largest_leak(name, sums, leaves, _foreign_parameters(module)), is_blind
    finally:
        for parameter, gradient in held:
            parameter.grad = gradient


class _Throughout(TorchFunctionMode):
    """Torch function mode in which gradients pass `no_grad`, `detach` and `.data`."""

    _cuts = (
        Tensor.detach,
        torch.detach,
        Tensor.data.__get__,  # type: ignore[attr-defined]
    )
    _ends = (
        Tensor.item,
        Tensor.tolist,
        Tensor.numpy,
        Tensor.__float__,
        Tensor.__array__,
    )

    def __init__(self) -> None:
        super().__init__()
        self.ended = False
        """True once numbers of documents became Python's or NumPy's, where no gradient goes."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch._C._set_grad_enabled:
            return func(True)
        tensor = args[0] if args else None
        # Leaves are parameters, which some models write to.
        if isinstance(tensor, Tensor) and tensor.requires_grad and not tensor.is_leaf:
            if func in self._cuts:
                return tensor.view_as(tensor)
            if func in self._ends:
                self.ended = True
                args = (tensor.detach(), *args[1:])
        return func(*args, **(kwargs or {}))


def _sums_of_documents(output: Any, sides: Sides) -> tuple[str, Tensor]:
    """Return the name of a field with results of tokens, and a sum of it for each document.

    Raises `CannotTell` if no such field has a gradient.
    """
    shape = sides.halves[0].owner.shape
    for name, states in fields_of(output).items():
        if states.requires_grad and states.shape[:2] == shape:
            sums = [weighted_sum([{"": part}], {"": 1.0}) for part in sides.parts(name, states)]
            return name, torch.stack([each for each in sums if each is not None])
    raise CannotTell("no result of it that has something for each token has a gradient")


def _largest_leak(
    name: str, sums: Tensor, leaves: list[Tensor], parameters: list[Tensor]
) -> Difference:
    """Return the largest leak: to leaves (media, tokens), else to third-party `parameters`.

    The backward of these may clip or normalise what comes from all documents.
    """

    def by_halves(chosen: list[int], by: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Return, for each tensor of `by`, gradients of the chosen documents and of all others."""
        inside = torch.zeros_like(sums)
        inside[chosen] = 1.0
        both = (gradients_of(sums, by, weights) for weights in (inside, 1 - inside))
        return list(zip(*both, strict=True))

    def shared(chosen: list[int]) -> float:
        """Return the largest gradient that chosen and others both have, over the largest."""
        both = [torch.stack(pair).abs() for pair in by_halves(chosen, leaves) if pair[0].numel()]
        most = max((float(each.max()) for each in both), default=0.0)
        size = max((float(each.amin(0).max()) for each in both), default=0.0)
        if not most or not math.isfinite(most + size):
            raise CannotTell(
                "its gradients are no numbers" if most else "nothing of it has a gradient"
            )
        return size / most

    numbers = range(len(sums))
    # Any two documents lie apart in some bit of their numbers.
    bits = range(max(len(sums) - 1, 0).bit_length())
    halves = [[n for n in numbers if n >> bit & 1] for bit in bits]
    met, document = max(map(shared, halves), default=0.0), 0
    if met > MET:
        document = next((n for n in numbers if shared([n]) > MET), 0)
    elif halves and parameters:
        wanted = gradients_of(sums.sum(), parameters)
        added = [one + other for one, other in by_halves(halves[0], parameters)]
        size = max(float(each.abs().max()) for each in wanted)
        apart = max(map(largest, added, wanted)) / size if size and math.isfinite(size) else 0.0
        if apart > ADDED_UP:
            than = "than those of half of the documents, and of the others, add up to"
            return Difference("gradients", apart, ADDED_UP, 0, than)
    field = f"{name}, by what is another document's,"
    return Difference(field, met, MET, document, "than it gets alone")


def _foreign_parameters(model: nn.Module) -> list[Tensor]:
    """Return trained parameters of third-party modules in a model; [] if they are too many."""
    others = [part for part in model.modules() if not is_own(class_of(part))]
    held = {
        p for part in others for p in part.parameters(recurse=not isinstance(part, PreTrainedModel))
    }
    found: list[Tensor] = [p for p in trained(model) if p in held]
    return found if sum(p.numel() for p in found) <= _MOST else []
