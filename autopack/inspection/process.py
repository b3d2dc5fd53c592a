"""Third-party replacements of torch's functions, and hooks on all modules of a process."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as nn_module

from autopack.inspection.foreign import is_own, whose

SPACES: dict[str, Any] = {
    "torch": torch,
    "torch.nn.functional": nn.functional,
    "torch.Tensor": torch.Tensor,
    "torch.nn.Module": nn.Module,
}
HOOKS = (
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


def foreign() -> list[str]:
    """Return, in words, third-party hooks on all modules and replacements of torch's functions."""
    hooks = (hook for held in HOOKS for hook in held.values() if not is_own(hook))
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
