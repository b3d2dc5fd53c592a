"""The conditions of a check: the same random numbers in each run, nothing left behind, and the
precision of a model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from autopack.auditing.compare import Difference, Fields, how_far
from autopack.auditing.fields import fields_of
from autopack.auditing.left_as_found import preserved
from autopack.auditing.running import listening, stock_again
from autopack.calls.call import Call
from autopack.inspection import torches
from autopack.inspection.randomness import afterwards, drawing_nothing
from autopack.watching.schedule import CannotTell


class Runs:
    """Runs of one call, each from the same random state, buffers and tensors of modules.

    Code that keeps something of a row there would hand it on to the next run.
    """

    def __init__(self, call: Call, begin: Callable[[], None]):
        self._call, self._module, self._begin = call, call.module, begin
        self._count = 0

    def __call__(self, arguments: dict[str, Any]) -> Any:
        """Run the model on arguments from the same state as all runs; return its output."""
        self._count += 1
        self._begin()
        with drawing_nothing(self._module):
            return self._module(**arguments)

    def stock(self, arguments: dict[str, Any]) -> Any:
        """Return the output of stock transformers for these arguments, from the same state."""
        with stock_again(self._module, self._call.model):
            try:
                return self(arguments)
            except CannotTell:
                raise
            except Exception:  # of a row without its padding some types make no cache
                return self({**arguments, "use_cache": False})

    def beside_itself(
        self, worst: Difference, before: Fields, arguments: dict[str, Any]
    ) -> Difference:
        """Return a difference, with its tolerance widened if two equal runs differ as well.

        Atomic additions, and draws from an unknown generator, differ from run to run.
        """
        if worst.excess <= 1:
            return worst
        again, name = fields_of(self(arguments)), worst.name
        moved = (
            how_far(name, before[name], again[name]).excess
            if name in before and name in again
            else 0.0
        )
        if moved == math.inf:
            raise CannotTell(f"{name} differs from run to run")
        return replace(worst, tolerance=worst.tolerance * max(1.0, 8 * moved))

    @contextmanager
    def on_ranks(self, together: bool, packs: bool, own: int, count: int) -> Iterator[None]:
        """Run the call until this rank has `count` runs, at the end of the block, if `together`.

        A rank whose call does not pack makes nothing else: it raises `CannotTell`.
        """
        try:
            if not packs:
                raise CannotTell("the call packed nothing")
            yield
        finally:
            while together and self._count < count:
                (self if self._count < own else self.stock)(self._call.arguments)


@contextmanager
def unnoticed(call: Call, share: bool = True, **kept: bool) -> Iterator[Runs]:
    """Yield `Runs` of a call without gradients or compiled code; restore all state at the end.

    Without `share` each document computes what several begin with.
    """
    caches = torch.is_autocast_cache_enabled()
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        if hasattr(torch.compiler, "set_stance"):  # since torch 2.6
            # Documents have lengths that no graph was made for.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        begin = stack.enter_context(preserved(call.module, call.model, **kept))
        stack.enter_context(afterwards(lambda: torch.set_autocast_cache_enabled(caches)))
        # Weights that are cast without gradients must not be found by a later call under the same
        # autocast.
        torch.set_autocast_cache_enabled(False)
        if not share:
            call.model.options = replace(call.model.options, share=False)
        yield Runs(call, begin)


@contextmanager
def precisions() -> Iterator[set[torch.dtype]]:
    """Yield a set that collects, in this block, the dtypes in which layers of this thread run."""
    dtypes: set[torch.dtype] = set()

    def note(module: nn.Module, given: dict[Any, Any], output: Any) -> None:
        weight = dict(module._parameters).get("weight")
        for tensor in (weight, given.get(0)):
            if (
                isinstance(tensor, torch.Tensor)
                and tensor.is_floating_point()
                and weight is not None
            ):
                # by the rule of layers, which is the same
                dtypes.add(torches.taken_by_sdpa(tensor))

    with listening(note):
        yield dtypes
