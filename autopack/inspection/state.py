"""State that modules keep of their inputs: buffers and attributes that their forwards write."""

from __future__ import annotations

import dis
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from itertools import chain, islice
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from autopack.inspection.foreign import functions_on, hooks_of, is_own, is_own_file, layers
from autopack.inspection.source import class_of, names_in

_HOLDERS = (Tensor, list, dict, set, deque)
_INTERNAL = frozenset(vars(nn.Module()))
_MOST = 256
"""Size of a container above which only its length is compared."""


class State:
    """Snapshot of a model's buffers and attributes that third-party code may write."""

    def __init__(self, model: nn.Module):
        self._watched = [
            (name, module, names, _values(module, names))
            for name, module in model.named_modules()
            if (names := _watched_in(module))
        ]

    def __bool__(self) -> bool:
        return bool(self._watched)

    def changed(self) -> str | None:
        """Return, in words, the first module and attribute written since the snapshot, or None."""
        for path, module, names, before in self._watched:
            after = _values(module, names)
            name = next((name for name in names if not _is_same(before[name], after[name])), None)
            if name is not None:
                return f"{path or 'the model'} ({type(module).__name__}) writes {name}"
        return None


class Contents:
    """Copies of the tensors, containers and variables in a model's third-party state, to restore.

    Of a module, they are what its functions write; of a hook, such as a recorder, all that it
    reaches by name. Containers whose class may refuse changes (a ModelOutput) stay as they are.
    """

    def __init__(self, model: nn.Module):
        self._undo: list[Callable[[], Any]] = []
        self._seen = set(map(id, model.modules()))
        for module in model.modules():
            self._keep(vars(module).get(name) for name in _watched_in(module))
            self._keep(hook for hook in hooks_of(module).values() if not is_own(hook))

    def _keep(self, values: Iterable[Any]) -> None:
        """Copy the contents of values, and all that functions among them hold, for `put_back`."""
        for value in values:
            if id(value) in self._seen:
                continue
            self._seen.add(id(value))
            if isinstance(value, Tensor):
                version = None if value.is_inference() else value._version
                self._undo.append(partial(_copy_back, value, value.detach().clone(), version))
            elif type(value) in (*_HOLDERS, Counter, defaultdict):
                self._undo.append(partial(_refill, value, value.copy()))
                parts = value.values() if isinstance(value, dict) else value
                inner = islice(parts, _MOST) if isinstance(value, dict | list) else ()
                self._keep(part for part in [*inner] if isinstance(part, list | dict | set))
            elif isinstance(value, FunctionType):
                self._keep_function(value)
            elif callable(value) and not isinstance(value, type):
                owner = getattr(value, "__self__", value)
                if not isinstance(owner, nn.Module):
                    self._keep([getattr(owner, "__dict__", None)])
                self._keep(
                    [
                        *layers(value),
                        *getattr(value, "args", ()),
                        *getattr(value, "keywords", {}).values(),
                    ]
                )

    def _keep_function(self, function: FunctionType) -> None:
        """Copy a function's closure, and numbers and containers among the globals that it names."""
        filled = [cell for cell in function.__closure__ or () if cell != CellType()]
        for cell in filled:
            self._undo.append(partial(setattr, cell, "cell_contents", cell.cell_contents))
        known = function.__globals__
        named = {name: known[name] for name in names_in(function.__code__) & known.keys()}
        for name, value in named.items():
            if isinstance(value, int | float):
                self._undo.append(partial(known.__setitem__, name, value))
        self._keep(cell.cell_contents for cell in filled)
        self._keep(
            v
            for v in named.values()
            if isinstance(v, _HOLDERS) or getattr(v, "__globals__", None) is known
        )

    def put_back(self) -> None:
        """Restore, in place, the contents of all values that were copied."""
        for undo in self._undo:
            undo()


def _refill(container: Any, copied: Any) -> None:
    """Give a container the contents of a copy, in place."""
    container.clear()
    (container.extend if isinstance(container, list | deque) else container.update)(copied)


@torch.no_grad()
def _copy_back(tensor: Tensor, copied: Tensor, version: int | None) -> None:
    """Give a tensor its former values, in place, if it has been written to."""
    if tensor.is_inference() or tensor._version != version:
        tensor.copy_(copied)


def _watched_in(module: nn.Module) -> list[str]:
    """Return names of buffers and attributes to watch; none for stock modules of transformers."""
    if type(module).__module__.startswith("transformers.") and all(
        is_own(each) for *_, each in functions_on(module)
    ):
        return []
    stored, read = _stored_and_named(class_of(module))
    held = vars(module)
    buffers = [name for name, each in module._buffers.items() if each is not None]
    written = [name for name in read if isinstance(held.get(name), _HOLDERS)]
    # not by iteration, which stand-ins of torch.jit do otherwise
    others = {*_INTERNAL, *module._parameters.keys(), *module._modules.keys()}
    return [name for name in dict.fromkeys([*buffers, *stored, *written]) if name not in others]


@cache
def _stored_and_named(cls: Any) -> tuple[list[str], list[str]]:
    """Return (attributes stored, all names) in a class's third-party code, without `__init__`."""
    values = [
        value for base in cls.__mro__ for name, value in vars(base).items() if name != "__init__"
    ]
    functions = [
        layer for value in values for layer in layers(value) if isinstance(layer, FunctionType)
    ]
    codes = [each.__code__ for each in functions if not is_own_file(each.__code__.co_filename)]
    steps = (step for code in codes for step in dis.get_instructions(code))
    stored = {str(step.argval) for step in steps if step.opname == "STORE_ATTR"}
    return sorted(stored), sorted(set().union(*map(names_in, codes)))


def _values(module: nn.Module, names: list[str]) -> dict[str, list[Any]]:
    """Return the `_parts` of some attributes and buffers of a module, by name."""
    held = {**module._buffers, **vars(module)}
    return {name: list(_parts(held.get(name))) for name in names}


def _parts(value: Any) -> Iterator[Any]:
    """Yield what to compare: a tensor and its version, the parts of a container, or a value."""
    if isinstance(value, Tensor):
        yield from (value, None if value.is_inference() else str(value._version))
    elif isinstance(value, list | tuple | set | dict | deque):
        parts = [*value.items()] if isinstance(value, dict) else [*value]
        yield str(len(parts))
        yield from chain.from_iterable(map(_parts, parts[:_MOST]))
    else:
        yield value


def _is_same(before: list[Any], after: list[Any]) -> bool:
    """Return True if parts are equal or the same objects; an int raised by one (calls) is equal."""
    plain = bool | int | float | str

    def same(one: Any, two: Any) -> bool:
        if isinstance(one, plain) and isinstance(two, plain):
            return one == two or (type(one) is type(two) is int and two == one + 1)
        return one is two

    return len(before) == len(after) and all(map(same, before, after))
