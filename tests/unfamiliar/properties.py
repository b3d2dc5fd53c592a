"""Tables of what users do: a `Property` is written once, and held for many subjects."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from tests.engine import WHEN, Call, Calls, verdict
from tests.subjects import build

STALE = (*WHEN, "stale")
"""The same, and before it is enabled but after another model of its type was."""


@dataclass(frozen=True)
class Property:
    """A row of a table of what users do: exact or refused, never silently wrong, for each of many
    models.

    `over` holds a model type for each case, what else `change`, `patch` and `make` are given, and
    at last when the model is changed, if not before it is enabled. Where `exact` holds that time,
    refusing the model is a failure. By default so many cases run as `usual` says, evenly spread;
    the others are exhaustive."""

    name: str
    over: Sequence[Any]
    change: Callable[..., Any] | None = None
    calls: Calls | Callable[..., Calls] = Call().both
    exact: Sequence[str] = ()
    usual: int = 0
    patch: Callable[..., None] | None = None
    make: Callable[..., Any] | None = None

    def cases(self):
        kept = {len(self.over) * place // self.usual for place in range(self.usual)}
        for place, case in enumerate(self.over):
            marks = () if place in kept else (pytest.mark.exhaustive,)
            values = case if isinstance(case, tuple) else (case,)
            yield pytest.param(self, values, marks=marks, id=shown((self.name, *values)))

    def hold(self, model_type, *others):
        *others, when = others if others and others[-1] in STALE else (*others, "before")

        def bound(function: Callable[..., Any] | None, *first):
            return function and (lambda each: function(each, *first, *others))

        calls = self.calls(model_type, *others) if callable(self.calls) else self.calls
        make = partial(self.make or (lambda one, *_: build(one)), model_type, *others)
        found = verdict(make, calls, bound(self.change), when, patch=bound(self.patch, model_type))
        assert when not in self.exact or found == "exact", found


def shown(value):
    """A short name of a value, for the name of a case."""
    if isinstance(value, tuple | Mapping):
        return "-".join(map(shown, value))
    return str(getattr(value, "__name__", value))


def table(properties):
    """Parametrize a test over all cases of these properties; it calls `subject.hold(*case)`."""
    return pytest.mark.parametrize(
        ("subject", "case"), [each for one in properties for each in one.cases()]
    )
