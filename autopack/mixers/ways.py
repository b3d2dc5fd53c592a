"""The ways to keep a mixer within documents. A family names one for each class of mixers that it has."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from autopack import structure
from autopack.errors import UnsupportedModel
from autopack.layout import PackedLayout
from autopack.mixers.heads import run_and_redo_heads
from autopack.mixers.operations import PATHS, adapt_operation, keeping_documents_apart
from autopack.mixers.rows import Run, run_per_document_row
from autopack.patching import Site

__all__ = ["ROWS", "AtOperations", "LookingBack", "Rows", "Way"]


class Way(Protocol):
    """How mixers of one class are run on packed rows."""

    def run(self, run: Run, layout: PackedLayout, mixer: nn.Module) -> Any:
        """Run one mixer; `run` runs its own forward on its arguments in the form that it is told."""

    def sites(self, module: str) -> list[Site]:
        """Functions to stand at, besides the mixer's forward, in the Python module that defines it."""

    def paths(self) -> dict[str, str]:
        """What computes it: by device, or "any"."""

    def __str__(self) -> str: ...


@dataclass(frozen=True)
class Rows:
    """Documents as right-padded rows of a batch: right for every causal mixer."""

    def run(self, run: Run, layout: PackedLayout, mixer: nn.Module) -> Any:
        return run_per_document_row(run, layout)

    def sites(self, module: str) -> list[Site]:
        return []

    def paths(self) -> dict[str, str]:
        return {"any": "the mixer itself, on documents as right-padded rows, bucketed by length"}

    def __str__(self) -> str:
        return "documents as rows"


ROWS = Rows()


@dataclass(frozen=True)
class LookingBack:
    """For mixers that look back a fixed number of tokens, which `reach` reads off a mixer (None where it cannot)."""

    reach: Callable[[nn.Module], int | None]

    def run(self, run: Run, layout: PackedLayout, mixer: nn.Module) -> Any:
        reach = self.reach(mixer)
        return run_per_document_row(run, layout) if reach is None else run_and_redo_heads(run, layout, reach)

    def sites(self, module: str) -> list[Site]:
        return []

    def paths(self) -> dict[str, str]:
        return {"any": "the mixer itself, on whole rows, and again on the first tokens of each document"}

    def __str__(self) -> str:
        return "first tokens of documents run again"


@dataclass(frozen=True)
class AtOperations:
    """For mixers that look back in `operations` alone; where `fused` answers, it has done the work of all of them."""

    operations: tuple[str, ...]
    fused: str | None = None

    def run(self, run: Run, layout: PackedLayout, mixer: nn.Module) -> Any:
        if not self.sites(structure.defining_class(mixer).__module__):
            return run_per_document_row(run, layout)
        with keeping_documents_apart(layout) as arrived:
            output = run(lambda tensor: tensor)
        missed = set(self.operations) - arrived
        if missed and self.fused not in arrived:
            raise UnsupportedModel(
                f"{type(mixer).__name__} was run without {', '.join(sorted(missed))}, where autopack keeps documents "
                f"apart, so they may have been mixed. Train it on padded batches, one document per row."
            )
        return output

    def sites(self, module: str) -> list[Site]:
        found = importlib.import_module(module)
        if not all(callable(getattr(found, name, None)) for name in self.operations):
            return []  # releases before 5.23 have their kernels in other places
        names = [*self.operations, *([self.fused] if self.fused and hasattr(found, self.fused) else [])]
        return [Site(module, name, adapt_operation) for name in names]

    def paths(self) -> dict[str, str]:
        in_torch, in_kernels = zip(*(PATHS[name] for name in self.operations), strict=True)
        return {"CPU": ", ".join(in_torch), "CUDA": ", ".join(in_kernels) + " where installed, else as on CPU"}

    def __str__(self) -> str:
        return f"at {' and '.join(self.operations)}"
