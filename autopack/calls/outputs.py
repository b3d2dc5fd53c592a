"""Outputs of an unpadded call in the form that the caller expects: padded again, zero at padding."""

from __future__ import annotations

import copy
import operator
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from transformers.utils import ModelOutput

from autopack.errors import UnsupportedModel
from autopack.inspection import media
from autopack.layout.forms import Frame, Of, stands_for_no_router
from autopack.layout.pair import Pair
from autopack.layout.token_map import TokenMap
from autopack.runtime.in_graph import Result, outputs_of
from autopack.runtime.padding_read import PaddingRead


@torch._dynamo.disable
def restore(output: Any, padding: TokenMap | Pair, pooled: bool = True, read: PaddingRead | None = None) -> Any:
    """The output of a model that ran on the packed row of a padded batch, as the batch would have given it.

    `pooled` says that a pooler was handed the rows of the batch, so that the output may hold vectors (rows, channels).
    `read` is told of gradients that come back to padding of what stands beside a loss, and raises. Logits beside a loss
    are brought into that form when somebody uses them.

    Raises `UnsupportedModel` for a tensor whose place in the batch is not known.
    """
    parts = parts_of(output)
    loss = parts.get("loss" if isinstance(output, Mapping) else 0)
    loss = loss if isinstance(loss, torch.Tensor) and loss.dim() == 0 else None
    read = read if loss is not None and loss.requires_grad else None
    results: dict[int, Result] = {}
    of = padding.of if isinstance(padding, Pair) else lambda name: padding

    for key, value in parts.items():
        name = key if isinstance(key, str) else None
        refuse = None if read is None else partial(read.refuse, name or f"[{key}]")
        waits, whole = loss is not None and name == "logits", pooled and isinstance(value, torch.Tensor)
        for tensor in _tensors(value):
            if id(tensor) not in results:
                results[id(tensor)] = _result(name, tensor, of(name), whole, refuse, waits)
    outputs = dict(zip(results, outputs_of(list(results.values())), strict=True))
    found = {key: _put(value, outputs) for key, value in parts.items()}
    if not isinstance(output, ModelOutput):
        return with_parts(output, found)
    for name, value in found.items():
        output[name] = value
    return output


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    for part in value if isinstance(value, tuple | list) else ():  # one for each layer
        yield from _tensors(part)


def _put(value: Any, outputs: Mapping[int, torch.Tensor]) -> Any:
    """A part of an output with what tensors in it become, by their ids."""
    if isinstance(value, tuple | list):
        found = [_put(part, outputs) for part in value]
        return value if all(map(operator.is_, found, value)) else type(value)(found)
    return outputs.get(id(value), value)


def _result(
    name: str | None,
    value: torch.Tensor,
    padding: TokenMap | None,
    pooled: bool,
    refuse: Callable[[], None] | None,
    waits: bool,
) -> Result:
    """A tensor of an output, and how it is brought into the form of the batch."""
    if padding is None or value.dim() == 0 or name == media.STATES or stands_for_no_router(name, value):
        return Result([value])
    if pooled and value.dim() == 2 and value.shape[0] == padding.shape[0]:
        return Result([value])
    form = Frame(1, padding.tokens).form_of_output(name, value)
    if form.of is not Of.TOKEN:
        raise UnsupportedModel(
            f"autopack ran a padded batch of shape {padding.shape} as one row of {padding.tokens} tokens, and "
            f"{name or 'an output'} of shape {tuple(value.shape)} cannot be brought back "
            f"into the form of the batch. Use autopack.enable(model, unpad=False).",
            code="unpad-refused",
        )
    axis = form.columns
    shape = (*value.shape[: axis - 1], *padding.shape, *value.shape[axis + 1 :]) if axis else None

    def join(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return padding.restore(parts[0], axis)

    def filled(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        # A square of zeros has no slope, by which a reader of padding would be seen.
        return padding.restore(parts[0], axis, fill=True)

    def split(gradient: torch.Tensor) -> list[torch.Tensor]:
        return [padding.gather(gradient, axis)]

    def check(gradient: torch.Tensor) -> None:
        gradient = gradient.detach().nan_to_num()
        if refuse is not None and bool((join(split(gradient)) != gradient).any()):
            refuse()

    def no_sum() -> None:
        raise UnsupportedModel(
            f"a gradient of {name or 'an output'} is asked for, and what rows begin with in common has run once, where "
            f"that of each row cannot be told. Use autopack.enable(model, share=False).",
            code="share-refused",
        )

    shared = padding.shares
    return Result(
        [value],
        join,
        split=None if shared else split,
        refuse=no_sum if shared else None,
        values=None if refuse is None else filled,
        check=None if refuse is None else check,
        shape=shape if waits else None,
    )


def parts_of(output: Any) -> dict[Any, Any]:
    """The parts of an output of any form, by their names or places; by None the output itself, where it has none."""
    if isinstance(output, Mapping):
        return dict(output.items())
    return dict(enumerate(output)) if isinstance(output, tuple | list) else {None: output}


def with_parts(output: Any, changed: Mapping[Any, Any]) -> Any:
    """The output with some of its parts, as `parts_of` has them, changed."""
    parts = {**parts_of(output), **changed}
    if isinstance(output, ModelOutput):
        return type(output)(**parts)
    if isinstance(output, Mapping):
        return type(output)(parts)  # type: ignore[call-arg]
    return type(output)(parts.values()) if isinstance(output, tuple | list) else parts[None]


def loss_of(output: Any) -> torch.Tensor | None:
    """The loss in an output of any form, as one number; None where there is none."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is None and isinstance(output, tuple) and output and not hasattr(output, "_fields"):
        loss = output[0] if isinstance(output[0], torch.Tensor) and output[0].dim() == 0 else None
    if loss is None and isinstance(output, torch.Tensor) and output.dim() == 0:
        loss = output
    if not isinstance(loss, torch.Tensor) or not loss.is_floating_point():
        return None
    return loss.sum() if loss.dim() else loss


def without(output: Any, names: Collection[str]) -> Any:
    """Return an output without some of its fields; they read as None where the output has attributes.

    Raises `UnsupportedModel` for a tuple, in which fields have no names.
    """
    if isinstance(output, ModelOutput):
        for name in names:
            if name in output:
                OrderedDict.__delitem__(output, name)  # its own raises
                object.__setattr__(output, name, None)
        return output
    if isinstance(output, Mapping):
        return type(output)({name: value for name, value in output.items() if name not in names})  # type: ignore[call-arg]
    if isinstance(output, tuple) and hasattr(output, "_fields"):
        fields: Any = output
        return fields._replace(**{name: None for name in names if name in fields._fields})
    if isinstance(output, tuple | list):
        raise UnsupportedModel(
            f"packed calls leave {', '.join(names)} out of the output, and this call returns a "
            f"{type(output).__name__}, whose parts have no names. Pass return_dict=True.",
            code="output-unknown",
        )
    held = [name for name in names if name in getattr(output, "__dict__", ())]
    if held:
        output = copy.copy(output)
        vars(output).update(dict.fromkeys(held))
    return output
