"""What `enable` returns: what was done to one model, or to the models of a trainer, and how to take it back."""

from __future__ import annotations

import html
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

from transformers import PreTrainedModel

from autopack.attention.choose import availability, candidates
from autopack.auditing.report import html_cells
from autopack.enabling.attach import detach
from autopack.enabling.options import CHOICES
from autopack.integrations.boundaries import give_columns_back, kept_columns
from autopack.runtime.marks import handle_of
from autopack.runtime.model import EnabledModel
from autopack.runtime.tally import Tally
from autopack.watching.sentinel import Sentinel, Watched


class Handle(AbstractContextManager["Handle"]):
    """What `enable` did to one model. Also a context manager that disables on leaving.

    It keeps the model alive, as any other reference does, also after `remove`; an enabled model to which nobody has a
    reference, nor to its handle, is collected, and what stands for it in transformers goes with it.
    """

    def __init__(self, model: PreTrainedModel, enabled: EnabledModel):
        self.model, self.enabled = model, enabled

    def remove(self) -> None:
        """Disable the model: hooks, marks, checkpoint functions and installed functions go back by identity."""
        if handle_of(self.model) is self:
            detach(self.model, self.enabled)

    def __exit__(self, *_: Any) -> None:
        self.remove()

    @property
    def backend(self) -> str:
        """The backend that was asked for, and for `auto` those that calls may get here."""
        if self.enabled.options.backend != "auto":
            return self.enabled.options.backend
        names = {name for impl in self.enabled.implementations() for name in candidates(impl, self.model)[:2]}
        if not any(parameter.is_cuda for parameter in self.model.parameters()):
            names -= {"varlen", "flex"}
        usable = {name for name, (yes, _) in availability().items() if yes} | {"flash", "flex"}
        return "auto: " + " or ".join(name for name in CHOICES["backend"] if name in names & usable)

    @property
    def verified(self) -> str:
        """How the model was found to be exact, as it is now."""
        return self.enabled.proof.how

    @property
    def tally(self) -> Tally:
        """What became of padded batches: how many ran as packed rows, tokens and padding in them, and what was left."""
        return self.enabled.tally

    @property
    def watched(self) -> Watched | None:
        """What the checks of training calls have found: how many, the worst error; None where none were asked for."""
        sentinel = self.enabled.sentinel
        return sentinel.watched if isinstance(sentinel, Sentinel) else None

    def _facts(self) -> list[tuple[str, str]]:
        enabled, unpad = self.enabled, self.enabled.options.unpad
        implementations = ", ".join(enabled.implementations())
        return [
            ("model", f"{type(self.model).__name__} ({enabled.anatomy.model_type})"),
            ("state", "enabled" if enabled.active else "disabled"),
            ("family", enabled.traits.family),
            ("attention", f"{len(enabled.anatomy.attention)} modules, attn_implementation={implementations}"),
            *([("mixers", f"{len(enabled.anatomy.mixers)} modules")] if enabled.anatomy.mixers else []),
            ("backend", self.backend),
            ("padding", f"unpad={unpad!r}" + ("" if unpad == "never" else f"; {self.tally}")),
            ("verified", self.verified),
            *([("watched", str(self.watched))] if self.watched is not None else []),
        ]

    def __repr__(self) -> str:
        return "autopack.Handle(\n" + self._lines("  ") + ")"

    def _lines(self, indent: str) -> str:
        return "".join(f"{indent}{name + ':':<11}{value}\n" for name, value in self._facts())

    def _repr_html_(self) -> str:
        return f"<table><caption>autopack</caption>{_rows(self._facts())}</table>"


class TrainerHandle(AbstractContextManager["TrainerHandle"]):
    """What `enable` did to the models of a trainer. Also a context manager that disables them all on leaving.

    `trainer` is the name of its class; `handles`, and `left_alone` with the reasons, go by the trainer's attributes;
    `kept` are columns of its data that it would have dropped, as its model does not name them.
    """

    def __init__(self, trainer: Any, handles: dict[str, Handle], left_alone: dict[str, str]):
        self._trainer = trainer
        self.trainer, self.handles, self.left_alone = type(trainer).__name__, handles, left_alone
        self.kept = tuple(kept_columns(trainer))

    def remove(self) -> None:
        """Disable all models, and let the trainer drop the columns that it dropped."""
        give_columns_back(self._trainer)
        for handle in self.handles.values():
            handle.remove()

    def __exit__(self, *_: Any) -> None:
        self.remove()

    def __repr__(self) -> str:
        parts = [f"  {name}\n{handle._lines('    ')}" for name, handle in self.handles.items()]
        parts += [f"  {name}\n    left alone: {reason}\n" for name, reason in self.left_alone.items()]
        parts += [f"  data keep {', '.join(self.kept)}\n"] if self.kept else []
        return f"autopack.TrainerHandle(of {self.trainer}\n" + "".join(parts) + ")"

    def _repr_html_(self) -> str:
        rows = ""
        for name, handle in self.handles.items():
            rows += f"<tr><th colspan='2' style='text-align:left'>{html.escape(name)}</th></tr>{_rows(handle._facts())}"
        rows += _rows([*self.left_alone.items(), *([("data keep", ", ".join(self.kept))] if self.kept else [])])
        return f"<table><caption>autopack: {html.escape(self.trainer)}</caption>{rows}</table>"


def _rows(facts: Iterable[tuple[str, str]]) -> str:
    left = "text-align:left"
    return "".join(f"<tr>{html_cells('th', [name], left)}{html_cells('td', [text], left)}</tr>" for name, text in facts)
