"""Notice cheaply that a model's modules, code, loss or configuration have changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn
from transformers import PretrainedConfig

from autopack.inspection.code import ModelCode
from autopack.inspection.foreign import (
    GLOBAL_HOOKS,
    HOOKS,
    SPACES,
    Place,
    functions_on,
    hooks_of,
    is_own,
    layers,
    looks_at_rows,
    original,
    replaced_in_torch,
)

_FOLLOWED = frozenset(
    "_attn_implementation_internal _attn_implementation _experts_implementation_internal "
    "_name_or_path _commit_hash problem_type id2label label2id architectures transformers_version "
    "use_cache return_dict _output_attentions output_hidden_states output_attentions "
    "output_router_logits".split()
)
"""Fields of a configuration that calls read themselves, or that no forward reads."""
Reader = Callable[[], Any]
_WRITTEN = attrgetter("__code__", "__defaults__", "__kwdefaults__")
_OF_TORCH: list[Any] = [*GLOBAL_HOOKS, *map(vars, SPACES.values())]
"""Torch's global hooks, and the members of its modules and classes that are watched."""


class Fingerprint:
    """A model's modules, code and configs when it was proven; `changed` names a difference."""

    def __init__(self, model: nn.Module, code: ModelCode, configs: list[PretrainedConfig]):
        modules = list(model.modules())
        # What torch.jit has made keeps its parts in an object of its own, and they do not change.
        children = [
            module._modules for module in modules if not isinstance(module, torch.jit.ScriptModule)
        ]
        # One entry for each place: the same function stands in many trees of calls.
        on_modules = (place for module in modules for place in functions_on(module))
        places = list(
            {
                (id(held), name): (held, name) for held, name, _ in chain(code.places, on_modules)
            }.values(),
        )
        self._parts = [
            _Part("its modules", lambda: (list(map(type, modules)), _sizes_and_ids(children))),
            _Part(
                "a function on one of its modules, its forward or its loss",
                lambda: (
                    [*map(len, map(vars, modules))],
                    [held.get(name) for held, name in places],
                ),
                lambda: _originals(
                    chain(
                        ((held, name, held.get(name)) for held, name in places),
                        *map(functions_on, modules),
                    )
                ),
            ),
            _Part("third-party code that it calls", lambda: list(map(_WRITTEN, code.others))),
            _Part(
                "what stands in the place of torch's functions",
                lambda: [list(held.values()) for held in _OF_TORCH],
                replaced_in_torch,
            ),
            *(
                _Part(f"its {type(config).__name__}", partial(_fields, config))
                for config in configs
            ),
            _Part(
                "its hooks",
                partial(_hooks, modules),
                partial(_watched_hooks, modules, set(_hooks(modules))),
            ),
        ]

    def changed(self) -> str | None:
        """Return the first part of the model that has changed, in words, or None."""
        return next((part.said for part in self._parts if part.changed()), None)


class _Part:
    """One part of a model's state, named by `said`, to compare with its state at the proof.

    Every call compares what `read` returns with the last time, by identity as far as possible.
    `facts` are what must stay the same, and are compared only where the former differs.
    """

    def __init__(self, said: str, read: Reader, facts: Reader | None = None):
        self.said, self._read, self._facts = said, read, facts or read
        self._last, self._kept = read(), self._facts()

    def changed(self) -> bool:
        """Return True if this part of the model's state has changed since it was proven."""
        found = self._read()
        with suppress(Exception):  # what somebody has put there compares as it likes
            if found == self._last:
                return False
        with suppress(Exception):
            if self._facts() == self._kept:
                self._last = found
                return False
        return True


def _sizes_and_ids(dicts: list[dict[str, Any]]) -> list[int]:
    """Return the sizes of some dicts and the ids of their values, in one flat list.

    None is kept alive: a lost one has left its dict.
    """
    return [*map(len, dicts), *map(id, chain.from_iterable(map(dict.values, dicts)))]


def _originals(held: Iterable[Place]) -> dict[tuple[int, str], Any]:
    """Return functions without autopack's wrappers, by (id of the dict that holds them, name).

    torch's checkpoint function is left out: trainers put it on layers, and take it off, between
    calls.
    """
    return {
        (id(mapping), name): original(value)
        for mapping, name, value in held
        if not only_checkpoints(value)
    }


def _hooks(modules: list[nn.Module]) -> list[int]:
    """Return the numbers that torch has given to all hooks of some modules."""
    held = map(itemgetter(*HOOKS), map(vars, modules))
    return list(chain.from_iterable(filter(None, chain.from_iterable(held))))


def _watched_hooks(modules: list[nn.Module], known: set[int]) -> list[int]:
    """Return the numbers of hooks that are `known`, third-party, or may read rows and columns.

    transformers puts on its own when a user first asks for hidden states.
    """
    hooks = ((number, hook) for module in modules for number, hook in hooks_of(module).items())
    return [
        number
        for number, hook in hooks
        if number in known or not is_own(hook) or looks_at_rows(hook)
    ]


def only_checkpoints(function: Any) -> bool:
    """Return True if a function is torch's own checkpoint function, with options or without."""
    return is_own(function) and any(
        layer is torch.utils.checkpoint.checkpoint for layer in layers(function)
    )


def _fields(config: PretrainedConfig) -> dict[str, Any]:
    """Return a configuration's fields that decide results, by name; collections as text."""
    fields = vars(config).items()
    return {
        n: repr(v) if isinstance(v, dict | list | tuple) else v
        for n, v in fields
        if n not in _FOLLOWED
    }
