"""The origin of a class or a function: a library that autopack knows, or third-party.

No name is trusted. A class is a library's if a module of the library holds that very object. A
function is if its code was compiled from a file of the library.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import sysconfig
from collections.abc import Iterator
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
import transformers
from torch import nn

HERE = os.path.dirname(os.path.dirname(__file__)) + os.sep
MODELING, TORCH = (os.path.dirname(str(package.__file__)) + os.sep for package in (transformers, torch))
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
_PACKAGES = ("site-packages", "dist-packages")
_INTEGRATED = ("peft", "accelerate", "deepspeed", "wandb")
"""Packages whose functions and hooks keep documents apart.

`autopack.integrations` knows the first two, where they are installed and imported. DeepSpeed
gathers parameters and counts time, and wandb records.
"""
_KERNELS = ("flash_attn", "flash_attn_interface")
"""Packages that `transformers.modeling_flash_attention_utils` takes its kernels from."""

_TOKEN_WISE: tuple[type, ...] = (
    *(nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm, nn.Dropout, nn.Identity),
    *(nn.ModuleList, nn.ModuleDict, nn.Sequential, nn.ParameterList, nn.ParameterDict),
)
"""Modules of torch that treat every token alike, or only hold other modules."""
_OVER_AN_AXIS = (nn.MultiheadAttention, nn.Softmax, nn.Softmin, nn.LogSoftmax, nn.Softmax2d, nn.GLU)
PLAIN = {"__module__", "__doc__", "__dict__", "__weakref__", "__qualname__", "__annotations__", "__orig_bases__"}
PLAIN |= {"__parameters__", "__abstractmethods__", "_abc_impl", "__static_attributes__", "__firstlineno__"}
PLAIN |= {"__type_params__", "__annotate_func__", "__annotations_cache__"}  # annotations, as Python 3.14 keeps them

_MADE_BY_CODE = 1 << 9
"""The flag of classes made by Python code (`Py_TPFLAGS_HEAPTYPE`)."""

Place = tuple[Any, str, Any]
"""A mapping (or an object with its `get`), a key, and the code that stands there."""


# --- Files


def file_of(module: str) -> str | None:
    """Return the file of an imported Python module, or None."""
    return getattr(sys.modules.get(module), "__file__", None)


def _is_in(name: str, package: str) -> bool:
    path = file_of(package)
    return path is not None and name.startswith(os.path.dirname(path) + os.sep)


def is_own_file(name: str) -> bool:
    """Return True for files of transformers, torch, the standard library, integrated packages."""
    known = name.startswith((MODELING, TORCH, HERE, "<frozen ")) or is_standard(name)
    return known or any(_is_in(name, package) for package in _INTEGRATED)


def is_standard(name: str) -> bool:
    """Return True if a file belongs to the standard library."""
    return name.startswith(_STDLIB) and not any(part in name for part in _PACKAGES)


def _is_kernel_file(name: str) -> bool:
    """Return True if a file belongs to a package of attention kernels that transformers loads."""
    found = ((package, file_of(package)) for package in _KERNELS)
    # Flash-attention 3 is a module of its own, not a package.
    return any(path and (name == path or (path.endswith("__init__.py") and _is_in(name, p))) for p, path in found)


# --- Functions


def original(value: Any) -> Any:
    """Return the object that autopack's function replaces; any other value as it is."""
    while is_of_autopack(value) and (inner := _held(value, "autopack_original")) is not None:
        value = inner
    return value


def is_of_autopack(value: Any) -> bool:
    """Return True if a function is autopack's.

    A function to which `functools.wraps` gave the attributes of one is not.
    """
    value = value.__func__ if isinstance(value, MethodType) else value
    if isinstance(value, FunctionType):
        return value.__code__.co_filename.startswith(HERE)
    return type(value).__module__.partition(".")[0] == "autopack"


def _held(value: Any, name: str) -> Any:
    """Return an attribute that really exists.

    A mock has every attribute that is asked for, and each of them has it again.
    """
    if isinstance(value, FunctionType):
        return vars(value).get(name)
    if isinstance(value, MethodType) and name != "__func__":
        return _held(value.__func__, name)
    return None if inspect.getattr_static(value, name, None) is None else getattr(value, name, None)


def layers(value: Any) -> Iterator[Any]:
    """Yield a function and all that it wraps, the outermost first, without autopack's own."""
    waiting, seen = [value], set()
    while waiting:
        value = original(waiting.pop(0))
        if value is None or id(value) in seen:
            continue
        seen.add(id(value))
        yield value
        # A bound method passes on what its function wraps, so the function itself comes first.
        inner = ("__func__",) if isinstance(value, MethodType) else ("func", "__func__", "__wrapped__")
        waiting += [_held(value, name) for name in inner]


def innermost(value: Any) -> Any:
    """Return the innermost function that a function wraps."""
    return list(layers(value))[-1]


def is_own(value: Any) -> bool:
    """Return True if all layers of a function are transformers', torch's or integrated code."""
    for layer in layers(value):
        if isinstance(layer, FunctionType):
            if not is_own_file(layer.__code__.co_filename):
                return False
        elif isinstance(layer, type) or not callable(layer):
            return False
        elif not is_made_in_c(type(layer)):  # an object that is called
            called = next((vars(cls)["__call__"] for cls in type(layer).__mro__ if "__call__" in vars(cls)), None)
            # What an object of the standard library calls, such as a mock, is what somebody has given it.
            if not is_own(called) or is_standard(getattr(getattr(called, "__code__", None), "co_filename", "")):
                return False
    return True


def is_kernel(value: Any) -> bool:
    """Return True if a function comes unchanged from a package of attention kernels."""
    found = [layer.__code__.co_filename if isinstance(layer, FunctionType) else "" for layer in layers(value)]
    return any(map(_is_kernel_file, found)) and all(_is_kernel_file(name) or is_own_file(name) for name in found)


def is_from(function: Any, place: tuple[str, ...]) -> bool:
    """Return True if a function, with all that it wraps, is code below `place` in a package."""
    package, *parts = place
    top = file_of(package)
    if top is None:
        return False
    below = os.path.join(os.path.dirname(top), *parts)
    names = [layer.__code__.co_filename for layer in layers(function) if isinstance(layer, FunctionType)]
    inside = [name == below or name.startswith(below + os.sep) for name in names]
    return any(inside) and all(known or is_own_file(name) for name, known in zip(names, inside, strict=True))


def passes_on(module: nn.Module, name: str, value: Any) -> bool:
    """Return True if a function on a module is a library's wrapper of its class's (accelerate)."""
    of_class = {id(layer) for layer in layers(getattr(type(module), name, None))}
    if not of_class & {id(layer) for layer in layers(value)}:
        return False
    around = [layer for layer in layers(value) if id(layer) not in of_class]
    functions = [layer for layer in around if isinstance(layer, FunctionType)]
    others = all(isinstance(layer, FunctionType | MethodType | functools.partial) for layer in around)
    return others and all(is_own_file(function.__code__.co_filename) for function in functions)


def whose(function: Any) -> str:
    """Return a function's name and the place where it was written."""
    for layer in layers(function):
        code = getattr(layer, "__code__", None)
        if code is not None and not is_own_file(code.co_filename):
            return f"{getattr(layer, '__qualname__', layer)} of {code.co_filename}:{code.co_firstlineno}"
    inner = innermost(function)
    return f"{getattr(inner, '__module__', '')}.{getattr(inner, '__qualname__', type(inner).__qualname__)}"


# --- Classes


def is_of_library(value: Any) -> bool:
    """Return True if a module or class is from a known library or Python itself."""
    if isinstance(value, type) and not found_by_name(value):
        return is_made_in_c(value)
    name = value.__name__ if isinstance(value, ModuleType) else value.__module__
    file = file_of(name)
    return name in sys.builtin_module_names or (file is not None and is_own_file(file))


def located(cls: type) -> bool:
    """Return True if a module of a known library holds this very class under its name."""
    path = file_of(cls.__module__)
    return path is not None and is_own_file(path) and found_by_name(cls)


def found_by_name(cls: type) -> bool:
    """Return True if a module, of any origin, holds this very class under its name."""
    found: Any = sys.modules.get(cls.__module__)
    for part in cls.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is cls


def is_made_in_c(cls: type) -> bool:
    """Return True if a class is part of Python itself: builtin, or from functools.

    A class that code made by `exec` says that it is of "builtins", too.
    """
    if cls.__module__ == "builtins":
        return not cls.__flags__ & _MADE_BY_CODE
    return cls.__module__ == "functools" and found_by_name(cls)


def is_of(cls: type, package: str) -> bool:
    """Return True if an installed package holds this very class under its name."""
    return _is_in(file_of(cls.__module__) or "", package) and found_by_name(cls)


def is_token_wise(cls: type) -> bool:
    """Return True if modules of a class of torch treat every token alike, or only hold others."""
    if cls.__module__ == "torch.nn.modules.activation":
        return cls not in _OVER_AN_AXIS and located(cls)
    return cls in _TOKEN_WISE
