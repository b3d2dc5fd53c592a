"""The plan of a call and its reason, in words: `handle.explain`, which runs nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from autopack.calls.call import LABELS, CallPlan
from autopack.calls.choose import call_at, decide
from autopack.calls.entry import Entry
from autopack.calls.sequence_parallel import SharedRows, rows_shared_by
from autopack.errors import AutopackError
from autopack.pages import parts
from autopack.runtime.model import EnabledModel
from autopack.runtime.scope import Activation
from autopack.runtime.tally import Volume, number_of


@dataclass(frozen=True)
class Decision:
    """The plan of a call at one entry in words, its reason, and the volume that runs."""

    name: str
    what: str
    reason: str
    volume: Volume | None = None

    @property
    def amount(self) -> str:
        """Numbers of documents and tokens that run, in words; "" if an inner entry decides."""
        if self.volume is None:
            return ""
        documents = number_of(self.volume.documents, "document")
        skipped = (
            f", {self.volume.skipped:,} columns of padding left out" if self.volume.skipped else ""
        )
        return f"{documents}, {self.volume.amount}{skipped}"

    def __str__(self) -> str:
        amount = f" ({self.amount})" if self.amount else ""
        return f"{self.name} {self.what}{amount}, since {self.reason}"


@dataclass(frozen=True)
class Explanation:
    """The plan of a call of an enabled model, in words.

    `decisions` has one for each model that it is left to, the outermost first; the last one is what
    is done. `notes` say what would come before it.
    """

    decisions: tuple[Decision, ...]
    notes: tuple[str, ...] = ()

    @classmethod
    def of_several(cls, models: Mapping[str, Explanation]) -> Explanation:
        """Return the explanations of several models as one, in which each names its model."""
        decisions = [
            replace(d, name=f"{name}: {d.name}")
            for name, one in models.items()
            for d in one.decisions
        ]
        return cls(
            tuple(decisions),
            tuple(f"{name}: {note}" for name, one in models.items() for note in one.notes),
        )

    @property
    def what(self) -> str:
        """The outcome of the call, in words."""
        return self.decisions[-1].what

    @property
    def reason(self) -> str:
        """The reason for that outcome, in words."""
        return self.decisions[-1].reason

    def __str__(self) -> str:
        return "\n".join([*map(str, self.decisions), *self.notes])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        head = ["model", "what becomes of the call", "since", ""]
        rows = [[d.name, d.what, d.reason, d.amount] for d in self.decisions]
        return parts.table(head, rows, "<<<<") + parts.lines(self.notes)


def explain(model: EnabledModel, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Explanation:
    """Return the plan of a call of a model with these arguments, without running it."""
    decisions: list[Decision] = []
    outer: Activation | None = None
    arguments, kept = kwargs, set[str]()
    for module in model.anatomy.entries:
        hooks = (getattr(hook, "entry", None) for hook in module._forward_pre_hooks.values())
        entry = next(found for found in hooks if isinstance(found, Entry))
        # What a head names and the model that it holds does not, it keeps, and labels.
        given = {
            name: value
            for name, value in arguments.items()
            if name in entry.names or name not in kept
        }
        call = call_at(entry, module, args if outer is None else (), given, outer)
        try:
            # what they declare is asked of all ranks
            if outer is None and rows_shared_by(call) is not None:
                decisions.append(Decision(call.name, SharedRows.what, SharedRows.why))
                break
            plan = decide(call)
            volume = None if plan.defers else plan.volume or call.volume  # or an inner one decides
            if volume is not None and plan.volume is None and plan.packs:
                volume = volume.without_padding()
            decisions.append(Decision(call.name, plan.what, plan.reason, volume))
        except AutopackError as error:
            said = " ".join(str(error).split())
            left = model.lenient and call.of_head is None
            what, reason = (
                (CallPlan.what, f"autopack refuses it: {said}") if left else ("is refused", said)
            )
            decisions.append(Decision(call.name, what, reason))
            break
        if not plan.defers:
            break
        outer = Activation(plan.scope, None, call.entry.level, plan)
        kept = {*LABELS, *call.entry.names}
        arguments = call.arguments if plan.arguments is None else plan.arguments
        arguments = call.choices_as_rows() if call.brings_choices else arguments
    change = None if model.fingerprint is None else model.fingerprint.changed()
    said = "Before that it is looked at anew, since it has changed"
    return Explanation(tuple(decisions), () if change is None else (f"{said}: {change}",))
