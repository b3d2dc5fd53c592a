"""Where in the source of a model something is: the first module that gives a document something else in a packed row
than alone, or the line that raised."""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from autopack.auditing.cases import Call, Case
from autopack.auditing.fields import Fields, Sides, WrongShape, errors_between, fields_of, scales_of
from autopack.auditing.running import Runner

_LIBRARY = "transformers."


def first_difference(runner: Runner, case: Case, call: Call, bound: float) -> str | None:
    """The first module, in the order in which they end, of which a document gets more than `bound` else than alone.

    In words, with the place of its forward; None where no module can be compared.
    """
    with torch.no_grad():
        packed = _outputs(runner.model, lambda: runner.model(**case.given(call)))
        alone = [
            _outputs(runner.model, lambda number=number: runner.stock(case.alone(call, number)))
            for number in range(len(call.spans))
        ]
    modules = dict(runner.model.named_modules())
    sides = Sides.of(call)
    for key, outputs in packed.items():
        by_itself = [found.get(key, {}) for found in alone]
        try:
            found, expected, _ = sides.split(outputs, by_itself)
            differs = any(expected) and max(errors_between(found, expected, scales_of(expected)))[0] > bound
        except (WrongShape, RuntimeError, ValueError, IndexError):
            continue  # it was run on something else than the row
        if differs:
            module = _not_of_torch(modules, key[0])
            place = place_of(module)
            return f"it begins in {type(module).__name__}" + (f", {place}" if place else "")
    return None


def _not_of_torch(modules: dict[str, nn.Module], name: str) -> nn.Module:
    """A module, or of torch's own the module around it, which is what has given it its input."""
    while name and type(modules[name]).__module__.startswith("torch."):
        name = name.rpartition(".")[0]
    return modules[name]


def place_of(module: nn.Module) -> str | None:
    """Where the forward of a module stands, as the name of a Python module and a line; None where it has no source."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return None if code is None else f"{type(module).forward.__module__}, line {code.co_firstlineno}"


def raised_at(error: BaseException) -> str | None:
    """The innermost line of transformers that an error came by, as the name of a Python module and its number."""
    found, step = None, error.__traceback__
    while isinstance(step, TracebackType):
        name = step.tb_frame.f_globals.get("__name__", "")
        if name.startswith(_LIBRARY) and name in sys.modules:
            found = f"{name}, line {step.tb_lineno}"
        step = step.tb_next
    return found


def _outputs(model: nn.Module, run: Any) -> dict[tuple[str, int], Fields]:
    """What the modules of a model give in a run, by their names and numbers of calls, in the order in which they end.

    The hook is one of the process: a hook on a module of an enabled model would be looked at as somebody else's.
    """
    names = {id(module): name for name, module in model.named_modules() if name}
    calls: Counter[str] = Counter()
    found: dict[tuple[str, int], Fields] = {}

    def listen(module: nn.Module, given: Any, output: Any) -> None:
        name = names.get(id(module))
        if name is not None:
            found[name, calls[name]] = {n: value.detach().clone() for n, value in fields_of(output).items()}
            calls[name] += 1

    handle = register_module_forward_hook(listen)
    try:
        run()
    finally:
        handle.remove()
    return found
