"""The place in a model's source where results differ or an error arose.

It is the first module that gives a document something else in a packed row than alone, or the line
that raised.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from autopack.auditing.cases import Case, Input
from autopack.auditing.compare import Fields, errors_between, scales_of
from autopack.auditing.fields import WrongShape, fields_of
from autopack.auditing.running import Runner

_LIBRARY = "transformers."
Heard = dict[tuple[str, int], tuple[Fields, Fields]]
"""Inputs and outputs of a model's modules, by their names and numbers of calls, in the order in which they end."""


@contextmanager
def listening(hook: Callable[[nn.Module, dict[Any, Any], Any], Any]) -> Iterator[None]:
    """Call a hook with every module that this thread runs, its arguments by place or name, and its output.

    It is a global hook of the process: a model would be looked at again for one on a module.
    """
    thread = threading.get_ident()

    def called(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        return hook(module, {**dict(enumerate(args)), **kwargs}, output) if threading.get_ident() == thread else None

    handle = register_module_forward_hook(called, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def heard(model: nn.Module, run: Callable[[], Any], keep: Callable[[Fields], Fields]) -> Heard:
    """Return what is to `keep` of what modules are given and give back in a run."""
    names = {module: name for name, module in model.named_modules()}
    ended: Counter[nn.Module] = Counter()
    found: Heard = {}

    def note(module: nn.Module, given: dict[Any, Any], output: Any) -> None:
        if module in names:
            found[names[module], ended[module]] = keep(fields_of(given)), keep(fields_of(output))
            ended[module] += 1

    with listening(note):
        run()
    return found


def first_that_differs(runs: list[Heard], differs: Callable[[list[Fields]], bool | None]) -> str | None:
    """Return the name of the first module whose outputs differ between runs and whose inputs do not; None if none.

    `differs` gets the fields of each run, and returns None if they cannot be compared.
    """
    for key in runs[0]:
        given, output = ([run[key][side] if key in run else {} for run in runs] for side in (0, 1))
        if differs(output) and differs(given) is False:
            return key[0]
    return None


def first_difference(runner: Runner, case: Case, call: Input, bound: float) -> str | None:
    """Return the first module that changes a document's results by more than `bound`.

    In words, with the place of its forward; None if no module can be compared.
    """

    def keep(fields: Fields) -> Fields:
        return {name: value.detach().clone() for name, value in fields.items()}

    with torch.no_grad():
        packed = heard(runner.model, lambda: runner.model(**case.given(call)), keep)
        numbers = range(len(call.first))
        alone = [heard(runner.model, partial(runner.stock, case.alone(call, number)), keep) for number in numbers]

    def differs(found: list[Fields]) -> bool | None:
        try:
            got, expected, _ = call.sides.split(found[0], found[1:])
            return max(errors_between(got, expected, scales_of(expected)))[0] > bound if any(expected) else None
        except (WrongShape, RuntimeError, ValueError, IndexError):
            return None  # it was run on something else than the row

    name = first_that_differs([packed, *alone], differs)
    if not name:
        return None
    module = runner.model.get_submodule(name)
    place = place_of(module)
    return f"it begins in {type(module).__name__}" + (f", {place}" if place else "")


def place_of(module: nn.Module) -> str | None:
    """Return a module's forward's place as a Python module and line; None without source."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return None if code is None else f"{type(module).forward.__module__}, line {code.co_firstlineno}"


def raised_at(error: BaseException) -> str | None:
    """Return transformers' innermost line in a traceback, as Python module and line number."""
    found, step = None, error.__traceback__
    while isinstance(step, TracebackType):
        name = step.tb_frame.f_globals.get("__name__", "")
        if name.startswith(_LIBRARY) and name in sys.modules:
            found = f"{name}, line {step.tb_lineno}"
        step = step.tb_next
    return found
