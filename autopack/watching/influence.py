"""Leaks between documents of a live packed call, found by gradients.

A document cannot always be cut out of a call and run alone: only its model knows which images are
its own, for one. But an input without a part in a result gets no gradient by it. So the gradients
of a call's embedded tokens and media, by the results of some documents and by the results of all
others, may not meet at any number.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel

from autopack.auditing.compare import ADDED_UP, MET, Difference, largest
from autopack.auditing.fields import Sides, fields_of
from autopack.auditing.running import gradients_of, listening, trained, weighted_sum
from autopack.calls.call import Call
from autopack.calls.encoder_decoder import PairCall
from autopack.inspection import media
from autopack.inspection.foreign import is_own
from autopack.inspection.source import class_of
from autopack.watching.schedule import CannotTell, sides_of, unnoticed

_MOST = 20_000_000
"""Numbers of the parameters of third-party modules, above which their gradients are not compared.
"""
_LABELLED = ("labels", "num_items_in_batch")
_FOLLOWED = ("inputs_embeds", "decoder_inputs_embeds")


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
    if found.excess <= 1 and blind and is_blind:
        raise CannotTell("no gradient reaches its images or other media")
    if found.excess <= 1 and throughout.ended:
        raise CannotTell(
            "numbers that it computes become Python's or NumPy's, where no gradient follows them",
        )
    return found


def _leak_in_run(
    call: Call, sides: Sides, mode: AbstractContextManager[Any]
) -> tuple[Difference, bool]:
    """Return (the largest leak in a run in `mode`, True if media get no gradient in it)."""
    held = [(parameter, parameter.grad) for parameter in call.module.parameters()]
    try:
        with unnoticed(call, share=False), torch.inference_mode(False), torch.enable_grad():
            # Reversible layers (Reformer) add to `.grad` in any backward pass.
            for parameter, _ in held:
                parameter.grad = None
            name, sums, leaves, count = _sums_and_leaves(call, sides, mode)
            of_media = gradients_of(sums.sum(), leaves[:count]) if count else []
            is_blind = bool(of_media) and not any(bool(each.any()) for each in of_media)
            return _largest_leak(name, sums, leaves, _foreign_parameters(call.module)), is_blind
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


def _sums_and_leaves(
    call: Call, sides: Sides, mode: AbstractContextManager[Any]
) -> tuple[str, Tensor, list[Tensor], int]:
    """Run a call in `mode`; return a field's name, documents' sums, leaves, and number of media.

    The field has results of tokens. Leaves are copies of media, which come first, and of embedded
    tokens.
    """
    given = {name: value for name, value in call.arguments.items() if name not in _LABELLED} | {
        "return_dict": True
    }
    leaves: list[Tensor] = []
    given |= {name: _from_leaves(given[name], leaves) for name in media.given(given)}
    count = len(leaves)
    given |= {name: _from_leaves(given[name], leaves) for name in _FOLLOWED if name in given}
    with _embeddings_from_leaves(call.module, leaves), mode:
        output = call.module(**given)
    shape = sides.halves[0].owner.shape
    for name, states in fields_of(output).items():
        if states.requires_grad and states.shape[:2] == shape:
            sums = [weighted_sum([{"": part}], {"": 1.0}) for part in sides.parts(name, states)]
            return name, torch.stack([each for each in sums if each is not None]), leaves, count
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


def _from_leaves(value: Any, leaves: list[Tensor]) -> Any:
    """Return a value whose floating tensors are copies of new leaves; append these to `leaves`."""

    def follow(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        leaves.append(tensor.detach().clone().requires_grad_())
        return leaves[-1].clone()  # some write to it

    return tree_map_only(Tensor, follow, value)


def _embeddings_from_leaves(model: Any, leaves: list[Tensor]) -> AbstractContextManager[None]:
    """Let token embeddings return, in a block, copies of new leaves; append these to `leaves`."""
    embedding = None
    with suppress(NotImplementedError):
        embedding = model.get_input_embeddings()

    def follow(module: nn.Module, given: Any, output: Any) -> Any:
        return _from_leaves(output, leaves) if module is embedding else None

    return listening(follow)
