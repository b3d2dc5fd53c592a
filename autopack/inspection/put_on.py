"""What has been put on single modules that their classes do not put there: functions, and tensors of other types."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from autopack.inspection.code_origin import Place, constructors, is_own, layers, located, original, whose
from autopack.inspection.source import names_in

JUDGED_ELSEWHERE = frozenset(("forward", "_old_forward", "_loss_function"))
"""Functions on a module that `code_origin.on_instance` judges."""
_PLAIN = (torch.Tensor, nn.Parameter, type(None))


def functions_on(module: nn.Module) -> Iterator[Place]:
    """The functions, and other objects that can be called, that a module holds itself, and not by its class."""
    held = vars(module)
    for name, value in held.items():
        if callable(value):
            yield held, name, value


def why_foreign_function(module: nn.Module, name: str, value: Any) -> str | None:
    """What is wrong with a function on a module, in words: somebody else's, or one that its class does not put there.

    Functions of torch are many, and some of them mix tokens: the constructor has to name the one that is there.
    """
    value = original(value)  # what autopack has put its own around
    inner = list(layers(value))[-1]
    if isinstance(inner, type):
        return None if located(inner) else f"its {name} is the class {inner.__module__}.{inner.__qualname__}"
    if not is_own(value):
        return f"its {name}, set on the instance, is {whose(value)}"
    if isinstance(value, MethodType) and value.__self__ is module:
        return None
    module_name = str(getattr(inner, "__module__", "") or "torch")
    of_torch = module_name.startswith(("torch", "_")) and module_name != "torch.utils.checkpoint"
    if not of_torch or any(_names(function, inner) for function in _making(type(module))):
        return None
    return f"its {name}, set on the instance, is {whose(value)}, which its class does not put there"


def _making(cls: type) -> Iterator[FunctionType]:
    """The constructors of a class, and the methods that they name."""
    for constructor in constructors(cls):
        yield constructor
        methods = (getattr(cls, name, None) for name in names_in(constructor.__code__))
        yield from (method for method in methods if isinstance(method, FunctionType))


def _names(constructor: FunctionType, function: Any) -> bool:
    """Whether a constructor names a function, the class that it belongs to, or a table in which it stands."""
    names, known = names_in(constructor.__code__), constructor.__globals__
    owner = getattr(function, "__self__", None)
    if any(getattr(torch.fft, name, None) is function for name in names):  # they have longer names of their own
        return True
    if getattr(function, "__name__", None) in names or (isinstance(owner, type) and owner.__name__ in names):
        return True
    tables = (known[name] for name in names if isinstance(known.get(name), Mapping))
    return any(value is function for table in tables for value in table.values())


def is_mentioned(name: str, modules: list[nn.Module]) -> bool:
    """Whether a function of the classes of some modules, as transformers has them, names something."""
    classes = {cls for module in modules for cls in type(module).__mro__}
    return any(
        isinstance(layer, FunctionType) and name in names_in(layer.__code__)
        for cls in classes
        if cls.__module__.startswith(("transformers.models.", "transformers.modeling_layers"))
        for value in vars(cls).values()
        for layer in layers(value)
    )


def types_in(held: list[dict[str, Any]]) -> frozenset[type]:
    """The types of parameters and buffers in dicts of modules that are no plain tensors, and none of torch's own."""
    kinds = set(map(type, chain.from_iterable(map(dict.values, held))))
    return frozenset(kind for kind in kinds if not _is_plain(kind))


def why_foreign_tensor(module: nn.Module) -> str | None:
    """What parameter or buffer of a module is of a type of somebody else's, in words."""
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        kind = type(tensor)
        if not _is_plain(kind):
            return f"its {name} is a {kind.__module__}.{kind.__qualname__}"
    return None


def _is_plain(kind: type) -> bool:
    return kind in _PLAIN or kind.__module__.partition(".")[0] == "torch"
