"""The code that a model runs: where it stands, and which of it is third-party.

A library's function that stands where its class does not put it, or a library's module where
another one belongs, is not looked for here: the model's twin then lacks it (`autopack.proving`).
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from itertools import chain
from types import FunctionType, ModuleType
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from autopack.inspection import releases, sharding
from autopack.inspection.foreign import (
    Place,
    functions_on,
    hooks_of,
    is_from,
    is_in,
    is_of_library,
    is_own,
    is_own_file,
    layers,
    looks_at_rows,
    original,
    replaced_in_torch,
    whose,
)
from autopack.inspection.source import class_of, names_in

_RUN = ("forward", "__call__", "loss_function")
"""Members of a library's general classes that a forward runs; others save, or generate."""
_ON_INSTANCES = ("forward", "_old_forward", "_loss_function")
"""Functions on a module that run in place of its class's own."""

Globals = dict[str, Any]


class ModelCode:
    """Third-party code and hooks that a model runs now, and the names that its code uses.

    `foreign` names, by module, third-party code other than hooks. `unknown` is the first such entry
    that is not a forward of TRL, or a hook on a model. `hook` is the first third-party hook that
    may read or change what passes, and `onlooker` the first hook, of any origin, that may read rows
    and columns of a part that is no model.

    `places` are those where its functions stand, `others` its third-party functions, and `words`
    the names, strings and numbers in all of it.
    Names are followed in modules of transformers, and in the Python module of third-party code;
    what stands there from elsewhere is not followed.
    """

    def __init__(self, model: nn.Module, implementations: Iterable[str] = ()):
        self.foreign: list[str] = []
        self.unknown: str | None = None
        self.onlooker: str | None = None
        self.hook: str | None = None
        self.places: list[Place] = []
        self.others: list[FunctionType] = []
        self.words: set[Any] = set(_ON_INSTANCES)
        self._classes: dict[Any, str | None] = {}
        self._seen: set[Any] = set()
        self._waiting: list[FunctionType] = []
        modules = [(*named, hooks_of(named[1]).values()) for named in model.named_modules()]
        for _, module, hooks in modules:
            self._of_class(class_of(module))
            for value in [*(on for *_, on in functions_on(module)), *hooks]:
                self._follow(value)
            for losses, kind in _places_of_loss(module):
                self._follow_place(losses, kind, losses[kind])
        for implementation in implementations:
            function = sharding.of_whole_rows(releases.attention_function(implementation))
            if function is not None and (other := self._follow(function)) is not None:
                self._note(_runs_in_words(f"the attention function {implementation!r}", other))
        for function in self._waiting:  # which grows
            self._follow_names(
                function.__globals__, names_in(function.__code__), function.__globals__
            )
        for name, module, hooks in modules:
            said = name or "the model"
            for part, value in self._parts_of(module):
                self._note(f"{said}: {part}", known=is_from(value, "trl"))
            is_model = isinstance(module, PreTrainedModel)
            for hook in hooks:
                told = f"{said}: a hook on it is {whose(hook)}"
                is_foreign, looks = not is_own(hook), looks_at_rows(hook)
                # What is on a model itself gets the form that it knows there
                # (`autopack.calls.entry`).
                if is_foreign and (is_model or looks):
                    self.hook = self.hook or told
                if is_foreign and is_model:
                    self.unknown = self.unknown or told
                if looks and not is_model:
                    self.onlooker = self.onlooker or told
        for part in replaced_in_torch():
            self._note(part)

    def first_foreign(self, module: nn.Module) -> str | None:
        """Return, in words, a module's first third-party class, function, loss or hook, or None.

        Other functions on a module, such as one for checkpoints, are called by its forward, with
        values that the forward has.
        """
        hooks = hooks_of(module).values() if isinstance(module, PreTrainedModel) else ()
        hooked = (f"a hook on it is {whose(hook)}" for hook in hooks if not is_own(hook))
        return next(
            chain((part for part, _ in self._parts_of(module, _ON_INSTANCES)), hooked), None
        )

    def _note(self, said: str, known: bool = False) -> None:
        """Record third-party code in `foreign`, and in `unknown` too unless it is `known`."""
        self.foreign.append(said)
        if not known:
            self.unknown = self.unknown or said

    def _parts_of(
        self, module: nn.Module, names: Container[str] | None = None
    ) -> Iterator[tuple[str, Any]]:
        """Yield (words, object) of a module's third-party class, hooks, loss and named
        functions."""
        cls = class_of(module)
        if (reason := self._of_class(cls)) is not None:
            yield reason, cls
        for _, name, value in functions_on(module):
            if name in (self.words if names is None else names) and not is_own(value):
                yield f"its {name}, set on the instance, is {whose(value)}", value
        hook = vars(module).get("_hf_hook")
        for of_hook in map(type, (hook, *getattr(hook, "hooks", ()))):
            if not is_own(of_hook):
                yield f"a hook by which accelerate runs it is a {of_hook.__qualname__}", of_hook
        for losses, kind in _places_of_loss(module):
            if not is_own(losses[kind]):
                yield f"the loss of the kind {kind!r} is {whose(losses[kind])}", losses[kind]

    def _of_class(self, cls: Any, within: Globals | None = None) -> str | None:
        """Return, in words, a class's or its bases' first third-party function, or None; cached."""
        if cls not in self._classes:
            self._classes[cls] = None  # its functions may name it
            reasons = [reason for base in cls.__mro__ for reason in self._of_base(base, within)]
            self._classes[cls] = next(iter(reasons), None)
        return self._classes[cls]

    def _of_base(self, base: type, within: Globals | None) -> Iterator[str]:
        """Yield, in words, the functions of one class that are, or run, third-party code."""
        if base in (object, nn.Module):  # whose functions are looked at as torch's
            return
        is_known, held = is_of_library(base), vars(base)
        is_general = is_known and not base.__module__.startswith("transformers.models.")
        # What a library's class makes in these is looked at where it stands in the model.
        run = [n for n in held if not (is_known and n in ("__init__", "_init_weights"))]
        for name in _RUN if is_general else run:
            member = held.get(name)
            if any(isinstance(layer, FunctionType) for layer in layers(member)):
                other = self._follow_place(held, name, member, within)
                if other is not None:
                    yield _runs_in_words(f"{base.__qualname__}.{name}", other)

    def _follow_place(self, held: Any, name: str, value: Any, within: Globals | None = None) -> Any:
        """Add (mapping, key, function) to `places`; return the first third-party one, or None."""
        self.places.append((held, name, original(value)))
        return self._follow(value, within)

    def _follow(self, function: Any, within: Globals | None = None) -> Any:
        """Add a function's names to `words`; return the first third-party function, or None.

        Third-party code `within` other globals is not followed.
        """
        found = None if is_own(function) else function
        for layer in layers(function):
            if not isinstance(layer, FunctionType) or layer in self._seen:
                continue
            self._seen.add(layer)
            file, held = layer.__code__.co_filename, layer.__globals__
            self.words |= names_in(layer.__code__).union(layer.__code__.co_consts)
            if is_in(file, "transformers"):
                other = self._follow_names(held, names_in(layer.__code__))
                found = found or other
            elif not is_own_file(file):
                self.others.append(layer)
                if within is None or within is held:
                    self._waiting.append(layer)
        return found

    def _follow_names(
        self, held: Globals, names: frozenset[str], within: Globals | None = None
    ) -> Any:
        """Follow what `names` stand for in `held`; return the first third-party function, or None.

        Of names in third-party code, which is `within` its globals, classes and Python modules are
        followed too, and one that is free may shadow a builtin later.
        """
        found = None
        for name in names:
            value = held.get(name)
            kind = value if isinstance(value, type) else type(value)
            if within is not None and isinstance(value, ModuleType):
                if (
                    not is_own_file(getattr(value, "__file__", None) or "")
                    and value not in self._seen
                ):
                    self._seen.add(value)
                    self._follow_names(vars(value), names & vars(value).keys(), within)
            elif within is not None and not is_own(kind):
                self._of_class(kind, within)
            elif isinstance(value, int):
                self.words.add(value)
            if isinstance(value, type) and issubclass(value, BaseException):
                continue  # one that is raised or caught
            if callable(value) or (value is None and within is not None):
                other = self._follow_place(held, name, value, within)
                found = found or other
        return found


def _places_of_loss(module: nn.Module) -> list[tuple[dict[str, Any], str]]:
    """Return [(transformers' dict of losses, key of the model's loss)], or [] for a non-model."""
    losses = releases.losses() if isinstance(module, PreTrainedModel) else {}
    return [(losses, releases.kind_of_loss(module))] if losses else []


def _runs_in_words(name: str, function: Any) -> str:
    """Return "NAME runs FUNCTION", or FUNCTION with its file alone if it has that name itself."""
    found = whose(function)
    return found if found.startswith(f"{name} of ") else f"{name} runs {found}"
