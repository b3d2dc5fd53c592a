"""The place in a model's source where results differ or an error arose.

It is the first module that gives a document something else in a packed row than alone, or the line
that raised.
"""

from __future__ import annotations

import inspect
import sys
import threading
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


def first_that_moves(
    model: nn.Module, runs: Sequence[Callable[[], Any]], sides: Sides, touched: np.ndarray
) -> str | None:
    """Return the name of the first module that mixes documents; None if that cannot be told.

    In the second of two `runs` the documents (documents,) that are `touched` are replaced. The
    module gives the others something else, and is given the same of them.
    """
    names = {module: name for name, module in model.named_modules()}

    def keep(value: Any) -> Fields:
        fields = {name: each for name, each in fields_of(value).items() if each.dim() > 1}
        parts = {name: sides.part(name, each, ~touched) for name, each in fields.items()}
        return {name: part.clone() for name, part in parts.items() if part is not None}

    def heard(run: Callable[[], Any]) -> list[tuple[nn.Module, Fields, Fields]]:
        found: list[tuple[nn.Module, Fields, Fields]] = []
        with listening(lambda module, given, output: found.append((module, keep(given), keep(output)))):
            run()
        return found

    def differs(one: Fields, two: Fields) -> bool | None:
        if not one or one.keys() != two.keys():
            return None
        return any(how_far(name, one[name], two[name]).excess > 1 for name in one)

    with torch.no_grad(), suppress(Exception):  # what mixes is said in any case
        for (module, given, output), (other, *others) in zip(*map(heard, runs), strict=False):
            same_place = module is other and module in names
            if same_place and differs(output, others[1]) and differs(given, others[0]) is False:
                return names[module]
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
