"""Whose code a class or a function is: a library's that autopack knows, or third-party.

No name is trusted. A class is a library's if a module of the library holds that very object. A
function is if its code was compiled from a file of the library.
"""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
from collections.abc import Iterator
from itertools import compress
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as nn_module

_AUTOPACK = os.path.dirname(os.path.dirname(__file__)) + os.sep
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
_INSTALLED = ("site-packages", "dist-packages")
_LIBRARIES = """
transformers torch typing_extensions peft accelerate deepspeed wandb flash_attn flash_attn_interface
safetensors huggingface_hub tokenizers numpy tqdm packaging regex yaml
""".split()
"""Packages whose functions and hooks keep documents apart.

`autopack.integrations` knows PEFT and accelerate. DeepSpeed gathers parameters and counts time, and
wandb records. transformers takes kernels from the two after them, and the last ones are what it is
built on. torch marks functions as deprecated by a decorator of typing_extensions.
"""
_MADE_BY_CODE = 1 << 9
"""The flag of classes made by Python code (`Py_TPFLAGS_HEAPTYPE`)."""

Place = tuple[Any, str, Any]
"""A mapping (or an object with its `get`), a key, and the code that stands there."""


# --- Files


def file_of(module: str) -> str | None:
    """Return the file of a Python module, by name; None if it is not imported or has no file."""
    return getattr(sys.modules.get(module), "__file__", None)


def is_in(file: str, package: str) -> bool:
    """Return True if a file belongs to an imported package, or is the module of that name."""
    path = file_of(package)
    if path is None:
        return False
    folder, name = os.path.split(path)
    return file.startswith(folder + os.sep) if name.startswith("__init__.") else file == path


@functools.cache
def is_own_file(file: str) -> bool:
    """Return True for files of autopack, the standard library and libraries that autopack knows."""
    is_standard = file.startswith(_STDLIB) and not any(part in file for part in _INSTALLED)
    is_known = is_standard or file.startswith((_AUTOPACK, "<frozen "))
    return is_known or any(is_in(file, package) for package in _LIBRARIES)


# --- Functions


def original(value: Any) -> Any:
    """Return the object that autopack's function replaces; other values are returned unchanged."""
    while _is_of_autopack(value) and (inner := _held(value, "autopack_original")) is not None:
        value = inner
    return value


def _is_of_autopack(value: Any) -> bool:
    """Return True if a function, or the class of another object, is autopack's.

    A function to which `functools.wraps` gave the attributes of one is not.
    """
    value = value.__func__ if isinstance(value, MethodType) else value
    if isinstance(value, FunctionType):
        return value.__code__.co_filename.startswith(_AUTOPACK)
    return type(value).__module__.partition(".")[0] == "autopack"


def _held(value: Any, name: str) -> Any:
    """Return an attribute from an object's own `__dict__`, or None; a mock has all others."""
    return getattr(value, "__dict__", {}).get(name)


def layers(value: Any) -> Iterator[Any]:
    """Yield a function and all that it wraps, the outermost first, without autopack's own.

    A member of a class, such as a property, holds functions in the same way.
    """
    waiting, seen = [value], set()
    while waiting:
        value = original(waiting.pop(0))
        if value is None or id(value) in seen:
            continue
        seen.add(id(value))
        yield value
        if isinstance(value, MethodType | staticmethod | classmethod):
            waiting.append(value.__func__)
        elif isinstance(value, functools.partial | functools.cached_property):
            waiting.append(value.func)
        elif isinstance(value, property):
            waiting += [value.fget, value.fset]
        waiting.append(_held(value, "__wrapped__"))


def is_own(value: Any) -> bool:
    """Return True if known libraries wrote a function and all it wraps, or a class and bases."""
    if isinstance(value, type):
        return all(map(is_of_library, value.__mro__))
    return all(map(_is_own_layer, layers(value)))


def _is_own_layer(layer: Any) -> bool:
    """Return True if one function is a known library's; functions that it wraps are not read."""
    if isinstance(layer, FunctionType):
        return is_own_file(layer.__code__.co_filename)
    if isinstance(layer, torch.jit.ScriptFunction):  # DeBERTa before transformers 5.20
        return layer.qualified_name.startswith("__torch__.transformers.")
    return is_own(type(layer))


def is_from(value: Any, package: str) -> bool:
    """Return True if a class or function is a package's; it may wrap known libraries' functions."""
    if isinstance(value, type):
        return is_in(file_of(value.__module__) or "", package) and found_by_name(value)
    files = {
        layer.__code__.co_filename for layer in layers(value) if isinstance(layer, FunctionType)
    }
    others = {file for file in files if not is_in(file, package)}
    return others != files and all(map(is_own_file, others))


def passes_on(module: nn.Module, name: str, value: Any) -> bool:
    """Return True if `value`, put on a module as `name`, adds known libraries' code only."""
    known = set(map(id, layers(getattr(type(module), name, None))))
    found = list(layers(value))
    wraps = name == "forward" or not known.isdisjoint(map(id, found))
    return wraps and all(id(layer) in known or _is_own_layer(layer) for layer in found)


def whose(function: Any) -> str:
    """Return a function's name, with file and line if it is third-party, else with its module."""
    for layer in layers(function):
        code = getattr(layer, "__code__", None)
        if code is not None and not is_own_file(code.co_filename):
            return (
                f"{getattr(layer, '__qualname__', layer)} of "
                f"{code.co_filename}:{code.co_firstlineno}"
            )
    *_, inner = layers(function)
    name = getattr(inner, "__qualname__", type(inner).__qualname__)
    return f"{getattr(inner, '__module__', '')}.{name}"


# --- Classes


def is_of_library(cls: type) -> bool:
    """Return True if a known library's module, or Python itself, holds this very class."""
    module = cls.__module__
    if module == "builtins":  # which a class that code made by `exec` says of itself, too
        return not cls.__flags__ & _MADE_BY_CODE
    is_known = module in sys.builtin_module_names or is_own_file(file_of(module) or "")
    return is_known and found_by_name(cls)


def found_by_name(cls: type) -> bool:
    """Return True if a module, of any origin, holds this very class under its name."""
    found: Any = sys.modules.get(cls.__module__)
    for part in cls.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is cls


# --- What stands on single modules, and in torch

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""Names of a module's dicts of hooks, by a number that torch gives once in a process."""
_HOOK_OF_NOISE = "neftune_post_forward_hook"


def hooks_of(module: nn.Module) -> dict[int, Any]:
    """Return the forward and backward hooks of a module by number."""
    held = filter(None, map(vars(module).__getitem__, HOOKS))
    return {number: hook for hooks in held for number, hook in hooks.items()}


def looks_at_rows(hook: Any) -> bool:
    """Return True if a hook on a module may read rows and columns (third-party, PEFT's, NEFTune's).

    NEFTune's noise shrinks with the row. PEFT's hooks (EVA, CorDA) collect a layer's inputs by the
    mask. A hook that only asks for gradients (`output.requires_grad_(True)`, for adapters under
    checkpointing) does not count.
    """
    of_peft = any(map(_collects_for_peft, layers(hook)))
    if is_own(hook) and not of_peft:
        return getattr(hook, "__name__", None) == _HOOK_OF_NOISE
    code = getattr(hook, "__code__", None)
    return code is None or code.co_names != ("requires_grad_",) or bool(code.co_freevars)


def _collects_for_peft(layer: Any) -> bool:
    """Return True for a function of PEFT, except hooks that only pass on per-row arguments."""
    name = getattr(layer, "__name__", "")
    return str(getattr(layer, "__module__", "")).startswith("peft.") and "pre_" not in name


def functions_on(module: nn.Module) -> list[Place]:
    """Return (the module's dict, name, callable) of all callables on a module, not on its class."""
    held = vars(module)
    return [(held, name, held[name]) for name in compress(held, map(callable, held.values()))]


SPACES: dict[str, Any] = {
    "torch": torch,
    "torch.nn.functional": nn.functional,
    "torch.Tensor": torch.Tensor,
    "torch.nn.Module": nn.Module,
}
GLOBAL_HOOKS = (
    nn_module._global_forward_pre_hooks,
    nn_module._global_forward_hooks,
    nn_module._global_backward_pre_hooks,
    nn_module._global_backward_hooks,
)
_NEVER = frozenset(
    "compile load save manual_seed seed set_default_dtype set_default_device set_grad_enabled "
    "requires_grad_ __init__ __repr__ __str__ __format__ __reduce_ex__ __deepcopy__ __dir__ "
    "__setstate__ add_module register_module register_parameter register_buffer apply _apply train "
    "eval zero_grad share_memory state_dict load_state_dict _load_from_state_dict "
    "_save_to_state_dict".split()
)
"""Functions of torch whose results no forward uses: they make, load, show or compile.

Packages replace these for the whole process (Lightning `torch.compile`, engines the making of
modules).
"""
_own: dict[int, tuple[Any, Any]] = {}
"""Functions that were found to be torch's own, and their code, by id.

They are kept alive, so that no other has the id.
"""


def replaced_in_torch() -> list[str]:
    """Return, in words, third-party hooks on all modules and replacements of torch's functions."""
    hooks = (hook for held in GLOBAL_HOOKS for hook in held.values() if not is_own(hook))
    told = [f"a hook on all modules of the process is {whose(hook)} ({id(hook)})" for hook in hooks]
    for space, place in SPACES.items():
        for name, value in vars(place).items():
            known = value, getattr(value, "__code__", None)
            if _own.get(id(value)) == known or name in _NEVER or not callable(value):
                continue
            if isinstance(value, type | ModuleType) or is_own(value):
                _own[id(value)] = known
            else:
                told.append(f"{space}.{name} is {whose(value)} ({id(value)})")
    return told
