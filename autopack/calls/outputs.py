"""Outputs of an unpadded call in the form that the caller expects: padded again, and only what is read.

A model output keeps its packed tensors until somebody reads them; logits that nobody reads cost nothing. What is read
is an ordinary tensor, zero at padding, and stays in the output.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cache, partial
from typing import Any

import torch
from torch.utils._pytree import tree_map_only
from transformers.utils import ModelOutput

from autopack.calls.in_graph import Place, tied
from autopack.errors import UnsupportedModel
from autopack.inspection import media
from autopack.layout.forms import Form, Frame, Of, stands_for_no_router
from autopack.layout.padding import Padding
from autopack.layout.pair import Pair
from autopack.runtime.padding_read import PaddingRead


@torch._dynamo.disable
def restore(
    output: Any, padding: Padding | Pair, pooled: bool = True, read: PaddingRead | None = None, waits: bool = True
) -> Any:
    """The output of a model that ran on the packed row of a padded batch, as the batch would have given it.

    `pooled` says that a pooler was handed the rows of the batch, so that the output may hold vectors (rows, channels).
    `read` is told of gradients that come back to padding of what stands beside a loss, and raises. Without `waits`
    all parts of the output are brought into that form now.

    Raises `UnsupportedModel` for a tensor whose place in the batch is not known.
    """
    found = {}
    for key, value in parts_of(output).items():
        name = key if isinstance(key, str) else None
        found[key] = _restored(name, value, padding.of(name), pooled)
    loss = "loss" if isinstance(output, Mapping) else 0
    if _is_differentiable(found.get(loss)):
        found[loss] = _tied(found[loss], found, read)
    waits = waits and isinstance(output, ModelOutput)
    found = found if waits else {key: _read(value) for key, value in found.items()}
    return _read_later(output, found) if isinstance(output, ModelOutput) else with_parts(output, found)


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
    """An output without fields that the user wants left out; they read as None where the output has attributes.

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
            f"leave_out={list(names)!r} names fields of the output, and this call returns a {type(output).__name__}, "
            f"whose parts have no names. Pass return_dict=True."
        )
    held = [name for name in names if name in getattr(output, "__dict__", ())]
    if held:
        output = copy.copy(output)
        vars(output).update(dict.fromkeys(held))
    return output


def unread(output: Any) -> Any:
    """An output of any form without reading it: what waits to be padded is packed, (1, tokens, ...) or (tokens, ...).

    Of a model output the parts by name; any other one holds nothing that waits.
    """
    if not isinstance(output, ModelOutput):
        return output
    return {name: _as_it_waits(OrderedDict.__getitem__(output, name)) for name in OrderedDict.keys(output)}


def _as_it_waits(value: Any) -> Any:
    if type(value) is _Waiting:
        return _as_it_waits(value.value)
    if type(value) in (tuple, list):
        return type(value)(map(_as_it_waits, value))
    return value.packed if isinstance(value, _Packed) else value


class _Packed:
    """A packed tensor of an output, on its way into the form of the batch; `form` says where its tokens are."""

    __slots__ = ("_form", "_is_looked_at", "_padding", "_place", "_tensor")

    def __init__(self, tensor: torch.Tensor, padding: Padding, form: Form):
        self._tensor, self._padding, self._form = tensor, padding, form
        self._place: Place | None = None
        self._is_looked_at = False

    def places(self, refuse: Callable[[], None] | None) -> Iterator[Place]:
        """A place in the graph of the loss, if it is in a graph."""
        if self._tensor.requires_grad:
            (rows, columns), shape, axis = self._padding.shape, self._tensor.shape, self._form.columns
            padded = (rows * columns, *shape[1:])
            if axis:
                padded = (*shape[: axis - 1], rows, columns, *shape[axis + 1 :])
            # The graph keeps these, and must not keep the tensor by them.
            restore, gather = partial(self._padding.restore, axis=axis), partial(self._padding.gather, axis=axis)
            self._place = Place(self._tensor, restore, gather, padded, refuse)
            self._is_looked_at = refuse is not None
            yield self._place

    @property
    def packed(self) -> torch.Tensor:
        """What each token of the documents got, one document after the other."""
        return self._padding.apart(self._tensor, self._form.columns)

    def read(self) -> torch.Tensor:
        """The padded tensor."""
        axis = self._form.columns
        if self._place is None:
            return self._padding.restore(self._tensor, axis)
        # A square of zeros has no slope, by which a reader of padding would be seen.
        return self._place.fill(self._padding.restore(self._tensor.detach(), axis, fill=self._is_looked_at))


def _restored(name: str | None, value: Any, padding: Padding | None, pooled: bool) -> Any:
    """An output with `_Packed` for the tensors in it that have to be brought into the form of the batch."""
    if padding is None:
        return value
    if isinstance(value, tuple | list):
        parts = [_restored(name, part, padding, False) for part in value]  # one for each layer
        return value if all(part is own for part, own in zip(parts, value, strict=True)) else type(value)(parts)
    if not isinstance(value, torch.Tensor) or value.dim() == 0 or name == media.STATES:
        return value
    if pooled and value.dim() == 2 and value.shape[0] == padding.rows:
        return value
    if stands_for_no_router(name, value):
        return value
    form = Frame(1, padding.tokens).form_of_output(name, value)
    if form.of is Of.TOKEN:
        return _Packed(value, padding, form)
    raise UnsupportedModel(
        f"autopack ran a padded batch of shape {padding.shape} as one row of {padding.tokens} tokens, and "
        f"{name or 'an output'} of shape {tuple(value.shape)} cannot be brought back "
        f"into the form of the batch. Use autopack.enable(model, unpad='never')."
    )


def _read(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return type(value)(map(_read, value))
    return value.read() if isinstance(value, _Packed) else value


def _packed_in(values: Iterable[Any]) -> Iterator[_Packed]:
    for value in values:
        if isinstance(value, tuple | list):
            yield from _packed_in(value)
        elif isinstance(value, _Packed):
            yield value


def _is_differentiable(loss: Any) -> bool:
    """Whether a backward pass may begin at it, that could ask for gradients of other outputs; torch.func's cannot."""
    if not isinstance(loss, torch.Tensor) or torch._C._are_functorch_transforms_active():
        return False
    return loss.dim() == 0 and loss.requires_grad


def _tied(loss: torch.Tensor, values: Mapping[Any, Any], read: PaddingRead | None) -> torch.Tensor:
    """The loss, with the padded outputs in its graph, as those of stock are."""
    places: list[Place] = []
    for name, value in values.items():
        refuse = None if read is None else partial(read.refuse, name if isinstance(name, str) else f"[{name}]")
        places += [place for packed in _packed_in([value]) for place in packed.places(refuse)]
    return tied(loss, places) if places else loss


class _Waiting:
    """An output that has not been read yet. It is restored as if that had been done when the forward ended.

    Who gets hold of it past the class of the output, by `dict.values(output)` for instance, can use it as what it
    stands for: torch's functions take it, and its attributes and operators are those of the padded output.
    """

    __slots__ = ("grad", "inference", "value")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(cls, cls.fetch, (args, kwargs or {}))
        return function(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)  # of protocols that it does not follow
        return getattr(self.fetch(), name)

    def __init__(self, value: Any):
        self.value = value
        self.grad = torch.is_grad_enabled()
        self.inference = torch.is_inference_mode_enabled()

    def fetch(self) -> Any:
        with torch.inference_mode(self.inference), torch.set_grad_enabled(self.grad):
            return _read(self.value)


def _operator(name: str) -> Callable[..., Any]:
    def apply(waiting: _Waiting, *others: Any) -> Any:
        found, others = waiting.fetch(), tuple(o.fetch() if type(o) is _Waiting else o for o in others)
        return getattr(found, name)(*others)

    return apply


_OPERATORS = "add sub mul truediv floordiv mod pow matmul and or xor"
_OPERATORS = f"{_OPERATORS} {' '.join(f'r{name}' for name in _OPERATORS.split())} neg abs invert lt le gt ge"
for _name in f"{_OPERATORS} getitem len iter bool float int array".split():
    setattr(_Waiting, f"__{_name}__", _operator(f"__{_name}__"))


def _read_later(output: ModelOutput, found: dict[str, Any]) -> ModelOutput:
    """The output with what was found in it, each part of which is restored when it is read."""
    waits = False
    for name, value in found.items():
        if any(_packed_in([value])):
            output[name], waits = _Waiting(value), True
        elif value is not output[name]:
            output[name] = value
    if waits:
        object.__setattr__(output, "__class__", _lazy(type(output)))
    return output


@cache
def _lazy(cls: Any) -> Any:
    """A subclass of a model output class that restores what is read, and is the class itself once all has been."""

    def read(output: Any, name: str) -> Any:
        value = OrderedDict.__getitem__(output, name)
        if type(value) is _Waiting:
            value = value.fetch()
            cls.__setitem__(output, name, value)
            if not any(type(v) is _Waiting for v in OrderedDict.values(output)):
                object.__setattr__(output, "__class__", cls)
        return value

    def read_all(output: Any) -> Any:
        for name in OrderedDict.keys(output):
            read(output, name)
        object.__setattr__(output, "__class__", cls)  # that of a tree that was put together again has waited for none
        return output

    class Lazy(cls):
        def __getattribute__(self, name: str) -> Any:
            if name == "__dict__":
                return read_all(self).__dict__
            value = super().__getattribute__(name)
            return read(self, name) if type(value) is _Waiting else value

        def __getitem__(self, key: Any) -> Any:
            if isinstance(key, str):
                return read(self, key)
            names = list(self.keys())[key]
            return read(self, names) if isinstance(names, str) else tuple(read(self, name) for name in names)

        def get(self, key: Any, default: Any = None) -> Any:
            return read(self, key) if key in self else default

        def items(self) -> Any:
            return read_all(self).items()

        def values(self) -> Any:
            return read_all(self).values()

        def copy(self) -> Any:
            return read_all(self).copy()

        def __reduce__(self) -> Any:
            return read_all(self).__reduce__()

        def __or__(self, other: Any) -> Any:
            return read_all(self) | other

        def __ror__(self, other: Any) -> Any:
            return other | read_all(self)

        def __eq__(self, other: Any) -> Any:
            return read_all(self) == other

    Lazy.__name__, Lazy.__qualname__, Lazy.__doc__ = cls.__name__, cls.__qualname__, cls.__doc__
    return Lazy
