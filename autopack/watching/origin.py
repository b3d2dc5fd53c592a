"""Find the module in which documents meet: the first that gets the same for a document, and gives something else."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from autopack.auditing.fields import fields_of
from autopack.calls.call import Call
from autopack.watching.conditions import Runs
from autopack.watching.owners import Side, part_of

Parts = list[torch.Tensor]


def module_of(
    call: Call,
    runs: Runs,
    sides: list[Side],
    touched: np.ndarray,
    arguments: dict[str, Any],
    moves: Callable[..., bool],
) -> str:
    """Return the name and class of the module in which documents that are not touched begin to move; "" if none tells.

    `arguments` have other tokens in the documents that are touched; `moves` says of two tensors whether they differ by
    more than rounding.
    """
    names = {module: name for name, module in call.module.named_modules()}
    first: list[tuple[nn.Module, Parts, Parts]] = []
    found: list[nn.Module] = []

    def parts(value: Any) -> Parts:
        fields = fields_of(value) if not isinstance(value, torch.Tensor) else {"": value}
        made = [part_of(sides, name, each, ~touched) for name, each in fields.items() if each.dim() > 1]
        return [part.clone() for part in made if part is not None]

    def note(module: nn.Module, given: Any, output: Any) -> None:
        first.append((module, parts(given), parts(output)))

    def compare(module: nn.Module, given: Any, output: Any) -> None:
        if found or not first:
            return
        other, before, after = first.pop(0)
        inputs, outputs = parts(given), parts(output)
        comparable = other is module and module in names and len(inputs) == len(before) and len(outputs) == len(after)
        if comparable and before and not any(map(moves, before, inputs)) and any(map(moves, after, outputs)):
            found.append(module)

    for hook, given in ((note, call.arguments), (compare, arguments)):
        with _on_all_modules(hook):
            runs(given)
    return f"{names[found[0]] or 'the model'}, of the class {type(found[0]).__name__}" if found else ""


@contextmanager
def _on_all_modules(hook: Callable[[nn.Module, Any, Any], None]) -> Iterator[None]:
    thread = threading.get_ident()

    def called(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if threading.get_ident() == thread:
            hook(module, [*args, *kwargs.values()], output)

    # One for all modules and not one for each, which the model would be looked at again for.
    handle = nn.modules.module.register_module_forward_hook(called, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
