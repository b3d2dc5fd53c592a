"""The code that a model runs: where it stands, and which of it is third-party.

A library's function that stands where its class does not put it, or a library's module where
another one belongs, is not looked for here: the model's twin then lacks it (`autopack.proving`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import FunctionType
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from autopack.inspection import process, releases, sharding
from autopack.inspection.code_origin import (
    MODELING,
    PLAIN,
    Place,
    innermost,
    is_from,
    is_kernel,
    is_of_library,
    is_own,
    original,
    whose,
)
from autopack.inspection.followed import Followed
from autopack.inspection.put_on import (
    foreign_hook_of_accelerate,
    functions_on,
    hooks_of,
    is_foreign_hook,
    looks_at_rows,
)
from autopack.inspection.source import names_in
from autopack.inspection.words import words_of

_FORWARDS = ("forward", "_old_forward", "_loss_function")
"""Functions on a module that run in place of its class's own."""


class ModelCode:
    """The code that a model runs now.

    `foreign` names, by module, third-party code other than hooks. `unknown` is the first such entry
    that is not a forward of TRL, or a hook on a model. `hook` is the first third-party hook that
    may read or change what passes, and `onlooker` the first hook, of any origin, that may read rows
    and columns of a part that is no model.

    `places` are those of the libraries' own functions, and `followed` is what third-party code
    reads, for `autopack.inspection.fingerprint`. `words` are those of the model's code.
    """

    def __init__(self, model: PreTrainedModel, implementations: tuple[str, ...] = ()):
        self.foreign: list[str] = []
        self.unknown: str | None = None
        self.onlooker: str | None = None
        self.hook: str | None = None
        self.places: list[Place] = []
        self._modules = list(model.modules())
        self._classes: dict[Any, str | None] = {}
        self._checked: set[int] = set()
        self._others: list[Any] = []
        foreign_modules = []
        for name, module in model.named_modules():
            said = name or "the model"
            reason = self._of_module(module)
            if reason is not None:
                foreign_modules.append(module)
                self._note(f"{said}: {reason}", known=self._is_of_trl(module))
            self._look_at_hooks(module, said)
        for implementation in implementations:
            function = sharding.of_whole_rows(releases.attention_function(implementation))
            if function is not None and (other := self._reached(function)) is not None:
                self._note(f"the attention function {implementation!r} is, or calls, {whose(other)}")
        self.followed = Followed(self._others, foreign_modules, self._modules)
        self.words = process.words_of({cls.__module__ for cls in self._classes}, self.followed.names)
        for part in process.foreign(self.words):
            self._note(part)

    def around(self, module: nn.Module) -> str | None:
        """Return the third-party part of a module's forward, loss or (a model's) hooks, or None."""
        hooks = hooks_of(module).values() if isinstance(module, PreTrainedModel) else ()
        hooked = (f"a hook on it is {whose(hook)}" for hook in hooks if is_foreign_hook(hook))
        return self._of_forward(module) or next(hooked, None)

    def _note(self, said: str, known: bool = False) -> None:
        self.foreign.append(said)
        if not known:
            self.unknown = self.unknown or said

    def _is_of_trl(self, module: nn.Module) -> bool:
        """Return True if a forward of TRL on a module is all of it that is third-party."""
        others = [name for _, name, value in functions_on(module) if not isinstance(value, type) and not is_own(value)]
        of_trl = others == ["forward"] and is_from(vars(module)["forward"], ("trl",))
        of_accelerate = foreign_hook_of_accelerate(module) is not None
        return of_trl and not of_accelerate and self._of_class(type(module)) is None and self._of_loss(module) is None

    def _of_module(self, module: nn.Module) -> str | None:
        found = self._of_forward(module)
        for _, name, value in functions_on(module):
            if is_of_library(value) if isinstance(value, type) else is_own(value):
                continue
            self._others.append(value)
            if found is None and self._is_read(name):
                found = f"its {name}, set on the instance, is {whose(value)}"
        return found

    def _of_forward(self, module: nn.Module) -> str | None:
        """Return the third-party part of a module's class, of its forward on it, or of its loss."""
        reason = self._of_class(type(module))
        for name in _FORWARDS:
            value = vars(module).get(name)
            if reason is None and value is not None and not is_own(value):
                reason = f"its {name}, set on the instance, is {whose(value)}"
        hook = foreign_hook_of_accelerate(module)
        if hook is not None:
            reason = reason or f"a hook by which accelerate runs it is a {type(hook).__qualname__}"
        return reason or self._of_loss(module)

    def _is_read(self, name: str) -> bool:
        """Return True if code of the model may read an attribute of this name."""
        words = words_of(self._modules)
        return words is None or name in words

    def _of_loss(self, module: nn.Module) -> str | None:
        if not isinstance(module, PreTrainedModel) or not (losses := releases.losses()):
            return None
        kind = releases.kind_of_loss(module)
        self.places.append((losses, kind, original(losses[kind])))
        if is_own(losses[kind]):
            return None
        self._others.append(losses[kind])
        return f"the loss of the kind {kind!r} is {whose(losses[kind])}"

    def _look_at_hooks(self, module: nn.Module, said: str) -> None:
        for hook in hooks_of(module).values():
            told = f"{said}: a hook on it is {whose(hook)}"
            is_foreign, looks = is_foreign_hook(hook), looks_at_rows(hook, module)
            if is_foreign:
                self._others.append(hook)
            # What is on a model itself gets the form that it knows there (`autopack.calls.entry`).
            if isinstance(module, PreTrainedModel):
                if is_foreign:
                    self.hook, self.unknown = self.hook or told, self.unknown or told
            elif looks:
                self.onlooker = self.onlooker or told
                if is_foreign:
                    self.hook = self.hook or told

    def _of_class(self, cls: type) -> str | None:
        """Return the part of a class, or of its bases, that is third-party, or None."""
        if cls not in self._classes:
            reasons = [reason for base in cls.__mro__ for reason in self._of_base(base)]
            self._classes[cls] = next(iter(reasons), None)
            if not all(map(is_of_library, cls.__mro__)) or reasons:
                self._others.append(cls)
        return self._classes[cls]

    def _of_base(self, base: type) -> Iterator[str]:
        if base in (object, nn.Module):
            return
        members = vars(base)
        # What a library's general classes hold besides (saving, generation) has no part in a forward.
        is_general = is_of_library(base) and not base.__module__.startswith("transformers.models.")
        names = ("forward", "__call__", "loss_function") if is_general else tuple(members)
        for name in names:
            functions = list(_functions_of(members[name])) if name in members and name not in PLAIN else []
            if functions:
                self.places.append((members, name, original(members[name])))
            for function in functions:
                other = self._reached(function)
                if other is not None:
                    yield f"{base.__qualname__}.{name} is, or calls, {whose(other)}"

    def _reached(self, function: Any) -> Any:
        """Return the first third-party function that a function is, or calls by name; or None.

        Calls are followed in modules of transformers. In the one that it loads flash-attn into,
        functions of that package stand for its own.
        """
        if not is_own(function):
            return function
        inner = innermost(function)
        if not isinstance(inner, FunctionType) or id(inner) in self._checked:
            return None
        self._checked.add(id(inner))
        if not inner.__code__.co_filename.startswith(MODELING):
            return None
        found = None
        with_kernels = inner.__module__ == releases.HOLDS_KERNELS
        for name in names_in(inner.__code__):
            value = inner.__globals__.get(name)
            other = None
            if isinstance(value, FunctionType) or hasattr(value, "__wrapped__"):
                self.places.append((inner.__globals__, name, original(value)))
                other = None if with_kernels and is_kernel(value) else self._reached(value)
            elif with_kernels and isinstance(value, functools.partial) and not is_own(value):
                other = value  # a kernel with options that the model does not name
            found = found or other
        return found


def _functions_of(value: Any) -> Iterator[Any]:
    """Yield the functions that make up a member of a class."""
    if isinstance(value, property):
        yield from (part for part in (value.fget, value.fset) if part is not None)
    elif isinstance(value, staticmethod | classmethod):
        yield value.__func__
    elif isinstance(value, functools.cached_property):
        yield value.func
    elif isinstance(value, FunctionType) or hasattr(value, "autopack_original"):
        yield value
