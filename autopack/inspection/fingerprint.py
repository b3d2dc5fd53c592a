"""Notice cheaply that a model's modules, code, loss or configuration have changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import chain
from operator import itemgetter
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn
from transformers import PretrainedConfig

from autopack.inspection import process
from autopack.inspection.code import ModelCode
from autopack.inspection.code_origin import Place, is_of_autopack, is_own, original
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
    """A model as it was at the last look; `changed` names the first difference from it."""

    def __init__(
        self,
        model: nn.Module,
        code: ModelCode,
        configs: list[PretrainedConfig],
        changes: Counter[Key] | None = None,
    ):
        modules = list(model.modules())
        # What torch.jit has made keeps its parts and tensors in objects of its own, and they do not change.
        plain = [module for module in modules if not isinstance(module, torch.jit.ScriptModule)]
        children = [module._modules for module in plain]
        # A dict is held, and what somebody puts into it is seen.
        tensors = [held for module in plain for held in (module._parameters, module._buffers)]
        places = [*code.places, *(place for module in modules for place in functions_on(module))]
        places += [(vars(module), NOISE, vars(module)[NOISE]) for module in modules if NOISE in vars(module)]
        # One entry for each place: the same function stands in many trees of calls.
        places = list({(id(mapping), name): (mapping, name, value) for mapping, name, value in places}.values())
        self._followed, self._changes = code.followed, Counter() if changes is None else changes
        self._parts = [
            _Part("its modules", lambda: (list(map(type, modules)), _values(children))),
            _Part(
                "a function on one of its modules, its forward or its loss",
                lambda: ([*map(len, map(vars, modules))], [mapping.get(name) for mapping, name, _ in places]),
                lambda: _functions(places, modules),
            ),
            _Part("the types of its tensors", partial(_values, tensors), partial(types_in, tensors)),
            _Part("what stands in the place of torch's functions", process.held, lambda: process.foreign(code.words)),
            *(_Part(f"its {type(config).__name__}", partial(_fields, config)) for config in configs),
            _Part(_HOOKS, partial(_hooks, modules), partial(_watched_hooks, modules, set(_hooks(modules)))),
        ]

    def changed(self) -> str | None:
        """Return the first change, in words, or None."""
        if self._followed.held and any(is_code for _, is_code in self._followed.changes()):
            return "code that third-party code calls"
        for part in self._parts:
            if part.changed():
                return part.said
        return None

    def only_hooks(self) -> bool:
        """Return True if nothing has changed but third-party hooks, which are the last part."""
        return self.changed() == _HOOKS

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


class _Part:
    """One kind of facts about a model, which `said` names.

    Every call compares what `read` returns with the last time, by identity as far as possible.
    `facts` are what must stay the same, and are compared only where the former differs.
    """

    def __init__(self, said: str, read: Callable[[], Any], facts: Callable[[], Any] | None = None):
        self.said, self._read, self._facts = said, read, facts or read
        self._last, self._kept = read(), self._facts()

    def changed(self) -> bool:
        found = self._read()
        with suppress(Exception):  # what somebody has put there compares as it likes
            if found == self._last:
                return False
        with suppress(Exception):
            if self._facts() == self._kept:
                self._last = found
                return False
        return True


def _values(dicts: list[dict[str, Any]]) -> list[int]:
    """Return the identities of the values of some dicts, and their sizes.

    None is kept alive: a lost one has left its dict.
    """
    return [*map(len, dicts), *map(id, chain.from_iterable(map(dict.values, dicts)))]


def _functions(places: list[Place], modules: list[nn.Module]) -> dict[tuple[int, str], Any]:
    """Return the functions at places and on modules, as they are without autopack.

    torch's checkpoint function is left out: trainers put it on layers, and take it off, between calls.
    """
    held = [(mapping, name, mapping.get(name)) for mapping, name, _ in places]
    held += [place for module in modules for place in functions_on(module)]
    return {(id(mapping), name): original(value) for mapping, name, value in held if not only_checkpoints(value)}


def _hooks(modules: list[nn.Module]) -> list[int]:
    held = map(itemgetter(*HOOKS), map(vars, modules))
    return list(chain.from_iterable(filter(None, chain.from_iterable(held))))


def _watched_hooks(modules: list[nn.Module], known: set[int]) -> list[int]:
    """Return the numbers of hooks that are `known`, third-party, or may read rows and columns.

    transformers puts on its own when a user first asks for hidden states.
    """
    hooks = ((number, hook, module) for module in modules for number, hook in hooks_of(module).items())
    return [n for n, hook, module in hooks if n in known or is_foreign_hook(hook) or looks_at_rows(hook, module)]


def only_checkpoints(function: Any) -> bool:
    """Return True if a function is torch's own checkpoint function.

    autopack may have bound the documents of a forward around it.
    """
    while True:
        if is_of_autopack(function) and hasattr(function, "function"):
            function = function.function
        elif type(function) is partial and not function.args and function.keywords.keys() <= _OF_CHECKPOINTS:
            function = function.func
        else:
            return function is torch.utils.checkpoint.checkpoint and is_own(function)


def _fields(config: PretrainedConfig) -> dict[str, Any]:
    """Return the fields of a configuration that decide a model's results; of collections their text."""
    fields = vars(config).items()
    return {n: repr(v) if isinstance(v, dict | list | tuple) else v for n, v in fields if n not in _FOLLOWED}
