"""Notice cheaply that a model's modules, code, loss or configuration have changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import partial
from itertools import chain
from operator import itemgetter
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn
from transformers import PretrainedConfig

from autopack.inspection.code import ModelCode
from autopack.inspection.code_origin import is_of_autopack, is_own, original
from autopack.inspection.followed import Key
from autopack.inspection.put_on import HOOKS, NOISE, functions_on, hooks_of, is_foreign_hook, looks_at_rows, types_in

_FOLLOWED = frozenset(
    "_attn_implementation_internal _attn_implementation _experts_implementation_internal _name_or_path _commit_hash "
    "problem_type id2label label2id architectures transformers_version use_cache return_dict _output_attentions "
    "output_hidden_states output_attentions output_router_logits".split()
)
"""Fields of a configuration that calls read themselves, or that no forward reads."""
_OF_CHECKPOINTS = frozenset(("use_reentrant", "preserve_rng_state", "determinism_check", "debug"))
"""Options of torch's checkpoint function that do not change a layer's results."""
_HOOKS = "its hooks"
_RESTLESS = 4
"""Number of changes after which a value counts as state."""


class Fingerprint:
    """A model as it was at the last look; `changed` names the first difference from it.

    Every call asks, so facts about all modules are compared as a whole, and by identity.
    """

    def __init__(
        self,
        model: nn.Module,
        code: ModelCode,
        configs: list[PretrainedConfig],
        changes: Counter[Key] | None = None,
    ):
        self._modules = list(model.modules())
        self._classes, self._hooks = list(map(type, self._modules)), _hooks(self._modules)
        # What torch.jit has made keeps its parts and tensors in objects of its own, and they do not change.
        plain = [module for module in self._modules if not isinstance(module, torch.jit.ScriptModule)]
        self._children = _Values([module._modules for module in plain])
        # One entry for each place: the same function stands in many trees of calls.
        places = [*code.places, *(place for module in self._modules for place in functions_on(module))]
        places += [(vars(module), NOISE, vars(module)[NOISE]) for module in self._modules if NOISE in vars(module)]
        unique = {(id(mapping), name): (mapping, name, original(value)) for mapping, name, value in places}
        self._places = list(unique.values())
        self._standing = [value for _, _, value in self._places]
        """What was last found at each place: the value, or what autopack has put in front of it."""
        self._configs = [_Config(config) for config in configs]
        self._process = code.process
        self._followed, self._changes = code.followed, Counter() if changes is None else changes
        self._sizes, self._functions = _sizes(self._modules), _functions(self._modules)
        # A dict is held, and what somebody puts into it is seen.
        self._tensors = [held for module in plain for held in (module._parameters, module._buffers)]
        self._types = types_in(self._tensors)
        self._parameters = _Values(self._tensors)

    def changed(self) -> str | None:
        """Return the first change, in words, or None."""
        if list(map(type, self._modules)) != self._classes or self._children.changed():
            return "its modules"
        if self._hooks_changed():
            return _HOOKS
        for number, (mapping, name, value) in enumerate(self._places):
            found = mapping.get(name)
            if found is value or found is self._standing[number]:
                continue
            if original(found) is not value and not (only_checkpoints(found) and only_checkpoints(value)):
                return f"the function {name}"
            self._standing[number] = found
        if self._followed.held and any(is_code for _, is_code in self._followed.changes()):
            return "code that third-party code calls"
        if self._functions_added():
            return "a function on one of its modules, its forward or its loss"
        if self._parameters.changed():
            if types_in(self._tensors) != self._types:
                return "the types of its tensors"
            self._parameters = _Values(self._tensors)
        if self._process.changed():
            return "what stands in the place of torch's functions"
        return next((f"its {type(held.config).__name__}" for held in self._configs if held.changed()), None)

    def values_changed(self) -> bool:
        """Return True if a value that third-party code reads has changed since the last query.

        A value that often differs (a counter) is the code's state, and is compared a few times
        only.
        """
        found = False
        for key, is_code in self._followed.changes() if self._followed.held else ():
            if not is_code and self._changes[key] < _RESTLESS:
                self._changes[key] += 1
                found = True
        if found:
            self._followed.take()
        return found

    def only_hooks(self) -> bool:
        """Return True if nothing has changed but third-party hooks, put on or taken off."""
        return self.changed() == _HOOKS

    def _functions_added(self) -> bool:
        """Return True if modules hold new functions. Their old ones are places of code."""
        sizes = _sizes(self._modules)
        if sizes == self._sizes:
            return False
        if not _functions(self._modules) <= self._functions:
            return True
        self._sizes = sizes
        return False

    def _hooks_changed(self) -> bool:
        """Return True if hooks have been taken off, or third-party hooks have been put on.

        transformers puts on its own when a user first asks for hidden states.
        """
        hooks = _hooks(self._modules)
        if hooks == self._hooks:
            return False
        known = set(self._hooks)
        for module in self._modules:
            for number, hook in hooks_of(module).items():
                if number in known:
                    known.remove(number)
                elif is_foreign_hook(hook) or looks_at_rows(hook, module):
                    return True
        if known:
            return True
        self._hooks = hooks
        return False


class _Values:
    """The values of some dicts, by identity. None is kept alive: a lost one has left its dict."""

    def __init__(self, dicts: list[dict[str, Any]]):
        self._dicts = dicts
        self._filled = list(filter(None, dicts))
        self._sizes, self._ids = list(map(len, dicts)), self._now()

    def _now(self) -> list[int]:
        return list(map(id, chain.from_iterable(map(dict.values, self._filled))))

    def changed(self) -> bool:
        return list(map(len, self._dicts)) != self._sizes or self._now() != self._ids


def _sizes(modules: list[nn.Module]) -> list[int]:
    return list(map(len, map(vars, modules)))


def _functions(modules: list[nn.Module]) -> set[tuple[int, str, int]]:
    return {(id(module), name, id(original(value))) for module in modules for _, name, value in functions_on(module)}


def _hooks(modules: list[nn.Module]) -> list[int]:
    held = map(itemgetter(*HOOKS), map(vars, modules))
    return list(chain.from_iterable(filter(None, chain.from_iterable(held))))


def only_checkpoints(function: Any) -> bool:
    """Return True if a function is torch's own checkpoint function.

    Trainers put it on layers anew between calls.

    autopack may have bound the documents of a forward around it.
    """
    while True:
        if is_of_autopack(function) and hasattr(function, "function"):
            function = function.function
        elif type(function) is partial and not function.args and function.keywords.keys() <= _OF_CHECKPOINTS:
            function = function.func
        else:
            return function is torch.utils.checkpoint.checkpoint and is_own(function)


class _Config:
    """A configuration, and the values that its fields had when this object was made.

    Fields that do not decide a model's results are left out.
    """

    def __init__(self, config: PretrainedConfig):
        self.config = config
        self._fields, self._size = _fields(vars(config)), len(vars(config))

    def changed(self) -> bool:
        now = vars(self.config)
        # Key by key and not as a whole: comparing identical values costs next to nothing.
        for name, value in self._fields.items():
            if now.get(name) is not value and _kept(now.get(name)) != value:
                return True
        if len(now) != self._size:
            if len(_fields(now)) != len(self._fields):
                return True
            self._size = len(now)
        return False


def _fields(config: dict[str, Any]) -> dict[str, Any]:
    return {name: _kept(value) for name, value in config.items() if name not in _FOLLOWED}


def _kept(value: Any) -> Any:
    """Return a copy of a value that changes of its collections do not reach."""
    if isinstance(value, Mapping):
        return {key: _kept(part) for key, part in value.items()}
    return tuple(map(_kept, value)) if isinstance(value, list | tuple) else value
