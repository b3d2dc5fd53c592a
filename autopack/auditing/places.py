"""The place in a model's source where results differ or an error arose.

It is the first module that gives a document something else in a packed row than alone, or the line
that raised.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from autopack.auditing.compare import Fields, how_far
from autopack.auditing.fields import Sides, fields_of

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


def first_that_moves(
    model: nn.Module, runs: Sequence[Callable[[], Any]], sides: Sides, touched: np.ndarray
) -> str | None:
    """Return the name of the first module that mixes documents; None if that cannot be told.

    In the second of two `runs` the documents (documents,) that are `touched` are replaced. The
    module gives the others something else, and is given the same of them.
    """

    def keep(fields: Fields) -> Fields:
        parts = {name: sides.part(name, value, ~touched) for name, value in fields.items() if value.dim() > 1}
        return {name: part.clone() for name, part in parts.items() if part is not None}

    def differs(one: Fields, two: Fields) -> bool | None:
        if not one or one.keys() != two.keys():
            return None
        return any(how_far(name, one[name], two[name]).excess > 1 for name in one)

    with torch.no_grad(), suppress(Exception):  # what mixes is said in any case
        first, second = (heard(model, run, keep) for run in runs)
        for key, (given, output) in first.items():
            others = second.get(key, ({}, {}))
            if differs(output, others[1]) and differs(given, others[0]) is False:
                return key[0]
    return None


def place_of(module: nn.Module) -> str:
    """Return a module's class, and its forward's place as a Python module and line, if it has source."""
    forward, name = type(module).forward, type(module).__name__
    code = getattr(inspect.unwrap(forward), "__code__", None)
    return name if code is None else f"{name}, {forward.__module__}, line {code.co_firstlineno}"


def raised_at(error: BaseException) -> str | None:
    """Return transformers' innermost line in a traceback, as Python module and line number."""
    found, step = None, error.__traceback__
    while isinstance(step, TracebackType):
        name = step.tb_frame.f_globals.get("__name__", "")
        if name.startswith(_LIBRARY) and name in sys.modules:
            found = f"{name}, line {step.tb_lineno}"
        step = step.tb_next
    return found
