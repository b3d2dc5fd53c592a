"""The origin of a model's code: transformers' own, where transformers puts it, or third-party."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import FunctionType
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from autopack.inspection import put_on, releases, sharding
from autopack.inspection.code_origin import (
    MODELING,
    PLAIN,
    Place,
    found_by_name,
    innermost,
    is_from,
    is_kernel,
    is_made_in_c,
    is_own,
    located,
    located_class,
    original,
    out_of_place,
    whose,
)
from autopack.inspection.followed import Followed, Value
from autopack.inspection.process import Process
from autopack.inspection.put_on import hooks_of, is_foreign_hook, looks_at_rows
from autopack.inspection.source import names_in


class Provenance:
    """The origin of the code that a model runs now.

    `foreign` names, by module, everything that is not transformers' own; it is empty if all is.
    `unknown` is the first such entry that is not a forward of TRL. `runs_other_code` is True if any
    entry is more than a hook. Hooks on parts that are no models are no entries: `onlooker` is the
    first that may read rows and columns of its inputs, or None, and `hook` the first of these that
    is not transformers' own.

    `places` hold the model's code and `values` what third-party code reads beside it, for
    `autopack.inspection.changes`. `process` is torch as found in this process.
    """

    def __init__(self, model: PreTrainedModel, implementations: tuple[str, ...] = ()):
        self.foreign: list[str] = []
        self.unknown: str | None = None
        self.onlooker: str | None = None
        self.hook: str | None = None
        self.places: list[Place] = []
        self.values: list[Value] = []
        self._classes: dict[Any, str | None] = {}
        self._pairs: dict[tuple[Any, Any], str | None] = {}
        self._functions: set[int] = set()
        self._modules = list(model.modules())
        self._others: list[Any] = []
        self._foreign_modules: list[nn.Module] = []
        self.runs_other_code = False
        self._tree(model)
        self._registered(implementations)
        followed = Followed(self._others, self._foreign_modules, self._modules)
        self.places, self.values = [*self.places, *followed.places], followed.values
        self.process = Process({cls.__module__ for cls in self._classes}, followed.names)
        self.foreign += self.process.foreign
        self.unknown = next(iter(self.process.foreign), self.unknown)
        self.runs_other_code |= bool(self.process.foreign)

    def _tree(self, model: PreTrainedModel) -> None:
        parents: dict[int, Any] = {}
        for name, module in model.named_modules():
            said = name or "the model"
            above = parents.get(id(module))
            cls = located_class(module)
            added = self._put_on(module)
            own = self._own(module)
            if own is not None:
                self._foreign_modules.append(module)
            reason = own or added
            if reason is None and above is not None:
                if (cls, above) not in self._pairs:
                    self._pairs[cls, above] = out_of_place(cls, above)
                reason = self._pairs[cls, above]
            self.runs_other_code |= reason is not None
            hooked = self._hooked(module)
            reason = reason or hooked
            if reason is not None:
                self.foreign.append(f"{said}: {reason}")
                is_known = reason == put_on.why_foreign_forward(module) and is_from(
                    vars(module).get("forward"), ("trl",)
                )
                if hooked or added or not is_known:
                    self.unknown = self.unknown or self.foreign[-1]
            self._others += [hook for hook in hooks_of(module).values() if is_foreign_hook(hook)]
            # What is on a model itself gets the form that it knows there (`autopack.calls.entry`).
            for hook in () if isinstance(module, PreTrainedModel) else hooks_of(module).values():
                if looks_at_rows(hook, module):
                    told = f"{said}: a hook on it is {whose(hook)}"
                    self.onlooker = self.onlooker or told
                    if is_foreign_hook(hook):
                        self.hook = self.hook or told
            below = cls if cls is not None and cls.__module__.startswith("transformers.") else above
            for child in module.children():
                parents.setdefault(id(child), below)

    def _put_on(self, module: nn.Module) -> str | None:
        """Return a third-party function or tensor type on a module that its class lacks."""
        found = None
        for _, name, value in put_on.functions_on(module):
            reason = put_on.why_foreign_function(module, name, value)
            if reason is not None or not is_own(value):
                self._others.append(value)
            if reason is not None and found is None and put_on.is_mentioned(name, self._modules):
                found = reason
        return found or put_on.why_foreign_tensor(module)

    def _registered(self, implementations: tuple[str, ...]) -> None:
        for implementation in implementations:
            function = sharding.of_whole_rows(releases.attention_function(implementation))
            if function is not None and not self._check(function):
                self._others.append(function)
                self.foreign.append(f"the attention function {implementation!r}: {whose(function)}")
                self.runs_other_code = True
                self.unknown = self.unknown or self.foreign[-1]

    def around(self, module: nn.Module) -> str | None:
        """Return the third-party part of a module's forward, loss or (a model's) hooks, or None."""
        return self._own(module) or self._hooked(module)

    def _own(self, module: nn.Module) -> str | None:
        return self.of_class(type(module)) or put_on.why_foreign_forward(module) or self._of_loss(module)

    @staticmethod
    def _hooked(module: nn.Module) -> str | None:
        hooks = hooks_of(module).values() if isinstance(module, PreTrainedModel) else ()
        return next((f"a hook on it is {whose(hook)}" for hook in hooks if is_foreign_hook(hook)), None)

    def _of_loss(self, module: nn.Module) -> str | None:
        if not isinstance(module, PreTrainedModel) or not (known := releases.losses()):
            return None
        kind = releases.kind_of_loss(module)
        self.places.append((known, kind, original(known[kind])))
        if is_own(known[kind]):
            return None
        self._others.append(known[kind])
        return f"the loss of the kind {kind!r} is {whose(known[kind])}"

    def of_class(self, cls: type) -> str | None:
        """Return the part of a class, or of its bases, that is not transformers' own, or None."""
        if cls not in self._classes:
            self._classes[cls] = next((r for base in cls.__mro__ if (r := self._of_base(base, cls))), None)
            if self._classes[cls] is not None:
                self._others.append(cls)
        return self._classes[cls]

    def _of_base(self, base: type, cls: type) -> str | None:
        if base in (object, nn.Module) or is_made_in_c(base):
            return None
        if base.__module__ in ("typing", "abc") and found_by_name(base):
            return None
        members, known = vars(base), located(base)
        in_library = known and not base.__module__.startswith("transformers.models.")
        # What a library's general classes hold besides (saving, generation) has no part in a forward.
        names = [n for n in ("forward", "__call__", "loss_function") if n in members] if in_library else list(members)
        for name in names:
            if name in PLAIN:
                continue
            functions = list(_functions_of(members[name]))
            if not functions and not known:
                if members[name] is _inherited(cls, base, name):
                    continue  # transformers notes some attributes anew on each class
                return f"{base.__qualname__}.{name} is not transformers' own"
            self.places.append((members, name, original(members[name])))
            for function in functions:
                if not self._check(function) or (known and not in_library and not _belongs(function, base)):
                    return f"{base.__qualname__}.{name} is {whose(function)}"
        return None

    def _check(self, function: Any) -> bool:
        """Return True if a function, and its callees by name in its module, is transformers' own.

        In the module that transformers loads flash-attn into, functions of that package stand for its own.
        """
        if not is_own(function):
            return False
        inner = innermost(function)
        if not isinstance(inner, FunctionType) or id(inner) in self._functions:
            return True
        self._functions.add(id(inner))
        if not inner.__code__.co_filename.startswith(MODELING):
            return True
        with_kernels = inner.__module__ == releases.HOLDS_KERNELS
        for name in names_in(inner.__code__):
            value = inner.__globals__.get(name)
            if isinstance(value, FunctionType) or hasattr(value, "__wrapped__"):
                self.places.append((inner.__globals__, name, original(value)))
                if not (self._check(value) or (with_kernels and is_kernel(value))):
                    return False
            elif with_kernels and isinstance(value, functools.partial) and not is_own(value):
                return False  # a kernel with options that the model does not name
        return True


def _inherited(cls: type, base: type, name: str) -> Any:
    """Return the attribute that a class would have if one of its bases had not defined it."""
    above = cls.__mro__[cls.__mro__.index(base) + 1 :]
    return next((vars(other)[name] for other in above if name in vars(other)), None)


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


def _belongs(function: Any, cls: type) -> bool:
    """Return True if a function was defined where it stands, not for another class."""
    inner = innermost(function)
    if not isinstance(inner, FunctionType) or not inner.__module__.startswith("transformers.models."):
        return True  # what a decorator of the library has put there
    # A class may hold a function of its module under another name, but hardly as its forward.
    here = {f"{cls.__qualname__}.{inner.__name__}", *([inner.__name__] if inner.__name__ != "forward" else ())}
    return inner.__module__ == cls.__module__ and inner.__qualname__ in here
