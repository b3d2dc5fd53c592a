"""Third-party replacements of torch's functions, and hooks on all modules of a process."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, ModuleType, WrapperDescriptorType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as nn_module
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from autopack.inspection.code_origin import TORCH, file_of, is_made_in_c, is_own, is_own_file, original, whose

_SPACES: dict[str, Any] = {
    "torch": torch,
    "torch.nn.functional": nn.functional,
    "torch.Tensor": torch.Tensor,
    "torch.nn.Module": nn.Module,
}
_HOOKS = (
    nn_module._global_forward_pre_hooks,
    nn_module._global_forward_hooks,
    nn_module._global_backward_pre_hooks,
    nn_module._global_backward_hooks,
)
_IN_C = (BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType, ModuleType, type, property, torch.dtype)
_RUN = ("torch.nn.functional", *(f"torch.nn.modules.{name}" for name in ("activation", "linear", "module", "sparse")))
"""Modules of torch that nearly every model runs."""
_NEVER = {
    "torch": "compile load save manual_seed seed set_default_dtype set_default_device set_grad_enabled",
    "torch.Tensor": "__repr__ __str__ __format__ __reduce_ex__ __deepcopy__ __dir__ numpy tolist item",
    "torch.nn.Module": "__init__ __repr__ __dir__ __setattr__ __delattr__ __setstate__ add_module register_module "
    "register_parameter register_buffer apply _apply to cuda cpu half float double bfloat16 train eval requires_grad_ "
    "zero_grad compile share_memory state_dict load_state_dict _load_from_state_dict _save_to_state_dict",
}
"""Functions of torch whose results no forward uses: they make, load, move, show or compile.

Packages replace these for the whole process (Lightning `torch.compile`, engines the making of
modules).
"""


def words_of(modules: Iterable[str], names: Iterable[str] = ()) -> frozenset[str]:
    """Return some `names`, and the words in the source of Python modules and of what models run."""
    return frozenset(names).union(*map(_words, (*_RUN, *modules)))


def held() -> list[list[Any]]:
    """Return the hooks on all modules, and all that stands in torch's places."""
    places: list[Any] = [*_HOOKS, *map(vars, _SPACES.values())]
    return [list(held.values()) for held in places]


def foreign(words: frozenset[str]) -> list[str]:
    """Name torch's third-party parts in this process: hooks on all modules, and replaced functions of torch.

    A replaced function counts if its name is among the `words` of the code that runs.
    """
    return list(_foreign(words))


def _foreign(words: frozenset[str]) -> Iterator[str]:
    for hooks in _HOOKS:
        yield from (
            f"a hook on all modules of the process is {whose(hook)} ({id(hook)})"
            for hook in hooks.values()
            if original(hook) is hook and not is_own(hook)
        )
    for name, space in _SPACES.items():
        for key, value in vars(space).items():
            # Nearly all are torch's, and are left at once.
            kind = type(value)
            if kind in _IN_C or (kind is FunctionType and value.__code__.co_filename.startswith(TORCH)):
                continue
            # Operators are no words of a source.
            is_run = (key.startswith("__") or key in words) and key not in _NEVER.get(name, "").split()
            if is_run and _is_foreign(value):
                yield f"{name}.{key} is {whose(value)} ({id(value)})"


def _is_foreign(value: Any) -> bool:
    if isinstance(value, FunctionType):
        file = value.__code__.co_filename
        # torch marks functions as deprecated by a decorator of this package.
        deprecating = file_of("typing_extensions")
        return not is_own_file(file) and file != deprecating and original(value) is value
    if not callable(value) or isinstance(value, type) or is_made_in_c(type(value)):
        return False
    return not (type(value).__module__.startswith(("torch", "typing")) or is_own(value))


@cache
def _words(module: str) -> frozenset[str]:
    """Return the words in the source of a module; none if it has no source."""
    path = file_of(module)
    if not path or not path.endswith(".py"):
        return frozenset()
    return frozenset(re.findall(r"\w+", Path(path).read_text(encoding="utf-8")))


def foreign_mode() -> str | None:
    """Return the class of a third-party mode of torch in force in this thread, or None."""
    if not torch._C._len_torch_function_stack() and not torch._C._len_torch_dispatch_stack():
        return None
    modes = [*torch.overrides._get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]
    known = ("torch", "transformers", "accelerate", "autopack")
    others = (type(mode) for mode in modes if type(mode).__module__.partition(".")[0] not in known)
    return next((f"{cls.__module__}.{cls.__qualname__}" for cls in others), None)
