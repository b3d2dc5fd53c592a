"""Leaks between documents of a live packed call, found by gradients.

A document cannot always be cut out of a call and run alone: what of its images is its own, for one, only its model
knows. But what has no part in a result gives it no gradient. So of the embedded tokens of a call, and of its media, the
gradients by the results of some documents, and by those of all others, may not meet at any number.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import PreTrainedModel

from autopack.auditing.compare import largest
from autopack.auditing.fields import Sides, fields_of
from autopack.auditing.places import listening
from autopack.auditing.running import weighted_sum
from autopack.calls.call import Call
from autopack.calls.encoder_decoder import PairCall
from autopack.errors import Leak
from autopack.inspection import media
from autopack.inspection.code_origin import is_of_library
from autopack.inspection.source import class_of
from autopack.watching.conditions import unnoticed
from autopack.watching.owners import CannotTell, sides_of

TOLERANCE = 1e-6
"""Of the largest gradient. What another document has no part in is not small, but exactly 0."""
_ADDED = 1e-3
"""Of the largest gradient of a parameter: sums of other terms round differently."""
_MOST = 20_000_000
"""Numbers of the parameters of third-party modules, above which their gradients are not compared."""
_LABELLED = ("labels", "num_items_in_batch")
_FOLLOWED = ("inputs_embeds", "decoder_inputs_embeds")


def media_sizes(call: Call) -> tuple[int, int]:
    """Numbers in the largest media tensor of a call, and the longest of their sides in places or pixels."""
    values = tree_leaves([call.arguments[name] for name in media.given(call.arguments)])
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    sides = [max(value.shape[1:], default=0) for value in tensors if value.is_floating_point()]
    # Of images of which only the sum of all has a size, a grid of whole numbers says how large each is.
    grids = [int(value.max()) for value in tensors if not value.is_floating_point() and value.numel()]
    return max((value.numel() for value in tensors), default=0), max([*sides, *grids], default=0)


def leak_of(call: Call, step: int) -> Leak | None:
    """Return where one document reaches another one in a call that packs; None if none does. Raises `CannotTell`.

    The call runs once more, with media twice, and backward twice for each halving of the number of documents.
    """
    layout = None if isinstance(call, PairCall) else call.declared.layout
    if layout is None:
        raise CannotTell("its documents are declared further in, or twice")
    if call.model.groups:
        raise CannotTell("ranks gather parameters together, and may not all have such a call")
    sides = sides_of(call)
    # Any two documents lie apart in some bit of their numbers.
    bits = range(max(sides.count - 1, 0).bit_length())
    halves = [[n for n in range(sides.count) if n >> bit & 1] for bit in bits]
    blind, reason = True, None
    # Estimators that go straight through a choice have their gradients in the first of both alone.
    throughout = _Throughout()
    for mode in (nullcontext(), throughout) if media.given(call.arguments) else (nullcontext(),):
        try:
            with (
                unnoticed(call, share=False),
                _keeping_gradients(call.module),
                torch.inference_mode(False),
                torch.enable_grad(),
            ):
                run = _Run(call, sides, mode)
                leak = run.leak(call.name, halves, step)
                blind = blind and run.is_blind()
        except Exception as error:  # of somebody else's code, and of checkpoints that cannot be differentiated so
            reason = error
        else:
            reason = None
            if leak is not None:
                return leak
    if reason is not None:
        raise reason
    if blind:
        raise CannotTell("no gradient reaches its images or other media")
    if throughout.ended:
        raise CannotTell("numbers that it computes become Python's or NumPy's, where no gradient follows them")
    return None


@contextmanager
def _keeping_gradients(model: nn.Module) -> Iterator[None]:
    """Keep the `.grad` of parameters, to which reversible layers (Reformer) add in any backward pass."""
    held = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in held:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in held:
            parameter.grad = gradient


class _Throughout(TorchFunctionMode):
    """Has gradients go through what a model computes without them: `no_grad`, `detach` and `data`."""

    _cuts = (torch.Tensor.detach, torch.detach, torch.Tensor.data.__get__)  # type: ignore[attr-defined]
    _ends = (torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__float__, torch.Tensor.__array__)

    def __init__(self) -> None:
        super().__init__()
        self.ended = False
        """Whether numbers of documents became Python's or NumPy's, through which no gradient goes."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch._C._set_grad_enabled:
            return func(True)
        tensor = args[0] if args else None
        # Leaves are parameters, which some models write to.
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad and not tensor.is_leaf:
            if func in self._cuts:
                return tensor.view_as(tensor)
            if func in self._ends:
                self.ended = True
                args = (tensor.detach(), *args[1:])
        return func(*args, **(kwargs or {}))


class _Run:
    """A run of a call whose results have gradients by its media and by its embedded tokens."""

    def __init__(self, call: Call, sides: Sides, mode: AbstractContextManager[Any]):
        given = {name: value for name, value in call.arguments.items() if name not in _LABELLED} | {"return_dict": True}
        self._leaves: list[torch.Tensor] = []
        given |= {name: _followed(given[name], self._leaves) for name in media.given(given)}
        self._media = len(self._leaves)
        given |= {name: _followed(given[name], self._leaves) for name in _FOLLOWED if name in given}
        with _embedded(call.module, self._leaves), mode:
            output = call.module(**given)
        self._sides, self._parameters = sides, _of_others(call.module)
        shape = sides.halves[0].owner.shape
        known = ((n, v) for n, v in fields_of(output).items() if v.requires_grad and v.shape[:2] == shape)
        self.name, states = next(known, ("", None))
        if states is None:
            raise CannotTell("no result of it that has something for each token has a gradient")
        parts = [sides.part(self.name, states, chosen) for chosen in np.eye(sides.count, dtype=bool)]
        sums = [weighted_sum([{self.name: part}], {self.name: 1.0}) for part in parts if part is not None]
        self._sums = torch.stack([each for each in sums if each is not None])

    def is_blind(self) -> bool:
        """Return True if there are media of numbers, none of which has a part in the results."""
        found = self._gradients(torch.ones_like(self._sums), self._leaves[: self._media]) if self._media else []
        return bool(found) and not any(bool(gradient.any()) for gradient in found)

    def leak(self, name: str, halves: list[list[int]], step: int) -> Leak | None:
        """Return where documents meet: at tokens or media, or in gradients of third-party modules."""
        worst = max(map(self._shared, halves), default=0.0)
        if worst > TOLERANCE:
            place = next((n for n in range(self._sides.count) if self._shared([n]) > TOLERANCE), 0)
            field = f"{self.name}, by what is another document's,"
            return Leak(name, place, *self._sides.halves[0].place_of(place), field, worst, TOLERANCE, step)
        if halves and (apart := self._not_added_up(halves[0])) > _ADDED:
            than = "than those of half of the documents, and of the others, add up to"
            return Leak(name, 0, *self._sides.halves[0].place_of(0), "gradients", apart, _ADDED, step, than)
        return None

    def _by_halves(self, chosen: list[int], leaves: list[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return gradients by the results of the chosen documents, and by those of all others."""
        inside = torch.zeros_like(self._sums)
        inside[chosen] = 1.0
        return list(zip(self._gradients(inside, leaves), self._gradients(1 - inside, leaves), strict=True))

    def _shared(self, chosen: list[int]) -> float:
        """The largest part of a gradient that the chosen documents, and all others, have at one number."""
        pairs = [(ours.abs(), theirs.abs()) for ours, theirs in self._by_halves(chosen, self._leaves) if ours.numel()]
        most = max((float(torch.maximum(*pair).max()) for pair in pairs), default=0.0)
        shared = max((float(torch.minimum(*pair).max()) for pair in pairs), default=0.0)
        if not most or not math.isfinite(most + shared):
            raise CannotTell("its gradients are no numbers" if most else "nothing of it has a gradient")
        return shared / most

    def _not_added_up(self, chosen: list[int]) -> float:
        """Return by how much gradients of two halves of the documents do not add up to those of all, relative.

        Of parameters in third-party modules: their backward may clip or normalise what comes from all documents.
        """
        if not self._parameters:
            return 0.0
        wanted = self._gradients(torch.ones_like(self._sums), self._parameters)
        added = [one + other for one, other in self._by_halves(chosen, self._parameters)]
        size = max(float(each.abs().max()) for each in wanted)
        return max(map(largest, added, wanted)) / size if size and math.isfinite(size) else 0.0

    def _gradients(self, weights: torch.Tensor, leaves: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        options = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
        return torch.autograd.grad(self._sums, leaves, weights, **options)


def _of_others(model: nn.Module) -> list[torch.Tensor]:
    """Return the trained parameters of third-party modules in a model, unless they are too many."""
    others = [part for part in model.modules() if not all(map(is_of_library, class_of(part).__mro__))]
    held: list[torch.Tensor] = [
        parameter
        for part in others
        for parameter in part.parameters(recurse=not isinstance(part, PreTrainedModel))
        if parameter.requires_grad and parameter.numel()
    ]
    unique = list({id(parameter): parameter for parameter in held}.values())
    return unique if sum(parameter.numel() for parameter in unique) <= _MOST else []


def _followed(value: Any, leaves: list[torch.Tensor]) -> Any:
    """The same, with every floating tensor in it made of a leaf of its own."""

    def follow(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor
        leaves.append(tensor.detach().clone().requires_grad_())
        return leaves[-1].clone()  # some write to it

    return tree_map_only(torch.Tensor, follow, value)


def _embedded(model: Any, leaves: list[torch.Tensor]) -> AbstractContextManager[None]:
    """Have what a model embeds tokens with give leaves, in this thread."""
    try:
        embedding = model.get_input_embeddings()
    except NotImplementedError:
        embedding = None

    def follow(module: nn.Module, given: Any, output: Any) -> Any:
        return _followed(output, leaves) if module is embedding else None

    return listening(follow)
