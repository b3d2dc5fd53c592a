"""The place in a model's source where results differ or an error arose.

It is the first module that gives a document something else in a packed row than alone, or the line
that raised.
"""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from autopack.auditing.cases import Call, Case
from autopack.auditing.fields import Fields, Sides, WrongShape, errors_between, fields_of, scales_of
from autopack.auditing.running import Runner

_LIBRARY = "transformers."


def first_difference(runner: Runner, case: Case, call: Call, bound: float) -> str | None:
    """Return the first module that changes a document's results by more than `bound`.

    Modules come in the order in which they end. If the module's inputs differ already, the module
    around it counts. In words, with the place of its forward; None if no module can be compared.
    """
    with torch.no_grad():
        packed = _Heard(runner.model, lambda: runner.model(**case.given(call)))
        alone = [
            _Heard(runner.model, partial(runner.stock, case.alone(call, number))) for number in range(len(call.spans))
        ]
    sides = Sides.of(call)

    def differs(found: Fields, by_itself: list[Fields]) -> bool:
        try:
            got, expected, _ = sides.split(found, by_itself)
            return any(expected) and max(errors_between(got, expected, scales_of(expected)))[0] > bound
        except (WrongShape, RuntimeError, ValueError, IndexError):
            return False  # it was run on something else than the row

    for key, outputs in packed.given_back.items():
        if not differs(outputs, [heard.given_back.get(key, {}) for heard in alone]):
            continue
        name, number = key
        while name and differs(packed.taken[name, number], [heard.taken.get((name, number), {}) for heard in alone]):
            name, number = name.rpartition(".")[0], 0
            while name and (name, 0) not in packed.taken:  # a list of modules is not called
                name = name.rpartition(".")[0]
        module = runner.model.get_submodule(name)
        place = place_of(module)
        return f"it begins in {type(module).__name__}" + (f", {place}" if place else "")
    return None


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


class _Heard:
    """The inputs and outputs of a model's modules in a run, by their names and numbers of calls.

    `given_back` is in the order in which they end. The hooks are global ones of the process: a hook
    on a module of an enabled model would be treated as third-party.
    """

    def __init__(self, model: nn.Module, run: Callable[[], Any]):
        self.taken: dict[tuple[str, int], Fields] = {}
        self.given_back: dict[tuple[str, int], Fields] = {}
        self._names = {id(module): name for name, module in model.named_modules() if name}
        begun: Counter[str] = Counter()
        ended: Counter[str] = Counter()
        handles = [
            register_module_forward_pre_hook(lambda module, given: self._keep(self.taken, begun, module, given)),
            register_module_forward_hook(lambda module, _, output: self._keep(self.given_back, ended, module, output)),
        ]
        try:
            run()
        finally:
            for handle in handles:
                handle.remove()

    def _keep(self, found: dict[tuple[str, int], Fields], calls: Counter[str], module: nn.Module, value: Any) -> None:
        name = self._names.get(id(module))
        if name is not None:
            found[name, calls[name]] = {n: tensor.detach().clone() for n, tensor in fields_of(value).items()}
            calls[name] += 1
