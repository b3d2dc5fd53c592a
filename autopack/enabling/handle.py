"""The handle that `enable` returns: facts on the models that are enabled, and `remove`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from textwrap import indent
from typing import Any

from transformers import PreTrainedModel

from autopack.attention.choose import taken_by_auto
from autopack.calls.prefixes import why_not
from autopack.enabling.attach import detach
from autopack.enabling.explain import Explanation, explain
from autopack.integrations.boundaries import give_columns_back
from autopack.pages import parts
from autopack.runtime.marks import enabled_at
from autopack.runtime.model import EnabledModel
from autopack.runtime.tally import Checked, Tally, number_of
from autopack.steps.trainers import cutter_of

__all__ = ["Handle"]
ONE = "model"
"""The name of the only model of a handle, and of the one that a trainer trains."""
_EXACT = {"twin": "exact", "part": "exact", "checks": "checked in use", "": "not verified"}
"""Words for the sources of a proof."""
Facts = list[tuple[str, str]]
"""Lines of `print(handle)`, each as a name and a text."""


@dataclass(frozen=True)
class EnabledTrainer:
    """A trainer whose models are enabled.

    `left_alone` has the reasons for models that are not, by the trainer's attributes; `kept` are
    columns of its data that it would have dropped, as its model does not name them; `cut` says why
    documents of its rows cannot be told apart, where that is so.
    """

    trainer: Any
    left_alone: Mapping[str, str]
    kept: tuple[str, ...]
    cut: str | None

    @property
    def facts(self) -> Facts:
        """Names and texts about the trainer's data and steps, for `print(handle)`."""
        found = [
            ("data keep", ", ".join(self.kept)),
            ("steps", cutter_of(self.trainer)),
            ("data", self.cut),
            *((name, f"left alone: {reason}") for name, reason in self.left_alone.items()),
        ]
        return [(name, str(said)) for name, said in found if said]


class Handle(AbstractContextManager["Handle"]):
    """Handle to one or several enabled models: their facts, their counts, and `remove`.

    As a context manager it disables, when left, what the call that returned it has enabled.

    `model`, `backend`, `verified` and `checked` are of the first model, which of a trainer is the
    one that it trains. `left_alone` and `kept` are of trainers: models that stay as they are, with
    the reasons, and columns of the data that the trainer would have dropped. It keeps the models
    alive, as any other reference does, also after `remove`.
    """

    def __init__(
        self,
        enabled: Mapping[Any, EnabledModel],
        new: Iterable[EnabledModel] = (),
        trainers: Iterable[EnabledTrainer] = (),
    ):
        """Hold models by name; leaving a `with` block disables the `new` ones."""
        self._enabled, self._new, self._trainers = dict(enabled), set(new), list(trainers)
        self.enabled: EnabledModel = next(iter(self._enabled.values()))
        self.left_alone = {
            name: why for each in self._trainers for name, why in each.left_alone.items()
        }
        self.kept = tuple(name for each in self._trainers for name in each.kept)

    @classmethod
    def of_several(cls, handles: Mapping[Any, Handle]) -> Handle:
        """Return a handle to the models of several handles, with their names joined by a dot."""
        enabled = {
            name if each._holds_one_model else f"{name}.{inner}": model
            for name, each in handles.items()
            for inner, model in each._enabled.items()
        }
        new = set().union(*(each._new for each in handles.values()))
        return cls(
            enabled, new, [trainer for each in handles.values() for trainer in each._trainers]
        )

    def of_trainer(self, trainer: EnabledTrainer) -> Handle:
        """Return a handle to the same models with the facts of their trainer."""
        return Handle(self._enabled, self._new, [trainer])

    @property
    def models(self) -> dict[Any, Handle]:
        """The handles of all models, by name.

        Names are the keys of a dict, `[0]`, `[1]` and so on of a list, or the attributes of a
        trainer.
        """
        return {
            name: Handle({ONE: each}, self._new & {each}) for name, each in self._enabled.items()
        }

    @property
    def model(self) -> PreTrainedModel:
        """The first model."""
        return self.enabled.module

    @property
    def _holds_one_model(self) -> bool:
        return [*self._enabled] == [ONE] and not self._trainers

    def remove(self) -> None:
        """Disable the models; hooks, marks and installed functions go back by identity.

        Trainers drop columns and write logs as before.
        """
        for each in self._trainers:
            take_back(each.trainer)
        for enabled in self._enabled.values():
            take_off(enabled)

    def __exit__(self, *_: Any) -> None:
        # What another call has enabled stays so.
        for enabled in self._new:
            take_off(enabled)
        if not any(enabled.active for enabled in self._enabled.values()):
            self.remove()

    @property
    def backend(self) -> str:
        """The backend that was asked for; for "auto" the backends that calls may get, in words."""
        if self.enabled.options.backend != "auto":
            return self.enabled.options.backend
        device = next((parameter.device.type for parameter in self.model.parameters()), "cpu")
        taken = [
            name for each in self.enabled.implementations() for name in taken_by_auto(each, device)
        ]
        return "auto: " + " or ".join(dict.fromkeys(taken))

    @property
    def verified(self) -> str:
        """The proof that the model is exact at present, in words."""
        return self.enabled.proof.how

    @property
    def tally(self) -> Tally:
        """Counts of calls of all models together.

        They say how many padded batches ran as packed rows or were left, and how full rows were.
        """
        tallies = [enabled.tally for enabled in self._enabled.values()]
        if len(tallies) == 1:
            return tallies[0]
        total = Tally()
        for each in tallies:
            total.add(each)
        return total

    def explain(self, *args: Any, **batch: Any) -> Explanation:
        """Return the plan that a call would get, and the reason; run nothing.

        `print(handle.explain(**batch))` says whether the batch runs as packed rows, without its
        padding or as it came, for what reason, and how many documents and tokens it has. A call
        that autopack would refuse is explained too. Of several models each decision has the name of
        its model before it, the first model's last. Raises `ValueError` for a model that is
        disabled.
        """
        found = {}
        for name, each in reversed(self._enabled.items()):
            if not _is_in_force(each):
                name = type(each.module).__name__
                raise ValueError(f"{name} is disabled, so its calls run as without autopack")
            with each.tally.unchanged():
                found[name] = explain(each, args, batch)
        return next(iter(found.values())) if len(found) == 1 else Explanation.of_several(found)

    @property
    def checked(self) -> Checked | None:
        """Counts of checked calls; None if no call is to be checked.

        Checked are calls 1, 2, 4, 8 and so on, those that go beyond the calls checked before, and
        every Nth training call if that was asked for.
        """
        return None if self.enabled.live is None else self.enabled.live.checked

    @property
    def summary(self) -> str:
        """One line on whether calls are packed, if they are exact, and how much is saved."""
        proof, tally = self.enabled.proof, self.enabled.tally
        calls = tally.training.plus(tally.evaluation)
        if not self.enabled.active:
            return "disabled"
        if proof.why_not_packed is None:
            exact = _EXACT[proof.source]
        else:
            exact = (
                "refused"
                if proof.why_not_unpadded is not None
                else "exact on padded batches, packed rows are refused"
            )
        if not calls.calls:
            return f"enabled, {exact}, no call yet"
        spared = calls.skipped + calls.shared
        saved = f", {spared / (calls.columns + spared):.1%} of tokens saved" if spared else ""
        packs = (
            "packed" if calls.skipped > 0 or calls.documents > calls.rows else "not packed so far"
        )
        return f"{packs}, {exact}{saved}"

    def _facts(self) -> Facts:
        """Return names and texts about the first model, for `print(handle)`."""
        enabled, options, tally = self.enabled, self.enabled.options, self.enabled.tally
        attention, mixers = len(enabled.anatomy.attention), len(enabled.anatomy.mixers)
        implementations = ", ".join(enabled.implementations())
        found = [
            ("model", f"{type(self.model).__name__} ({enabled.anatomy.model_type})"),
            ("family", enabled.traits.family),
            (
                "attention",
                attention
                and f"{number_of(attention, 'module')}, attn_implementation={implementations}",
            ),
            ("mixers", mixers and number_of(mixers, "module")),
            ("backend", attention and self.backend),
            ("rows", options.sequence_parallel and f"shared by {options.sequence_parallel!r}"),
            ("padding", str(tally) if options.unpad else "stays (unpad=False)"),
            ("prefixes", options.unpad and self._prefixes),
            ("trained", tally.trained),
            ("evaluated", tally.evaluation.calls and tally.evaluation),
            ("verified", self.verified),
            ("left out", ", ".join(enabled.proof.leaves_out)),
            ("around it", enabled.around and f"{enabled.around.name}, which is not checked"),
            ("checked", "no call (check_every=0)" if options.check_every == 0 else self.checked),
        ]
        return [(name, str(said)) for name, said in found if said]

    @property
    def _prefixes(self) -> str:
        """Words on whether common beginnings of rows are computed once, and on tokens saved."""
        share, reason = self.enabled.options.share, why_not(self.enabled)
        if not share:
            return "not shared (share=False)"
        if reason is not None:
            return f"not shared: {reason}"
        tally = self.enabled.tally
        shared = tally.training.shared + tally.evaluation.shared
        said = f"{shared:,} tokens were computed with those of another row"
        for why, count in tally.apart.most_common():
            said += (
                f"; {number_of(count, 'batch')} whose rows begin alike computed one by one: {why}"
            )
        return said

    def _groups(self) -> list[tuple[str, Facts]]:
        """Return the headings, and the names and texts below each, of the text and the HTML."""
        if self._holds_one_model:
            return [(f"autopack: {self.summary}", self._facts())]
        names = [type(each.trainer).__name__ for each in self._trainers]
        what = names[0] if len(names) == 1 else number_of(len(self._enabled), "model")
        of_trainers = [fact for each in self._trainers for fact in each.facts]
        models = self.models.items()
        return [
            (f"autopack: {what}", of_trainers),
            *((f"{name}: {each.summary}", each._facts()) for name, each in models),
        ]

    def __repr__(self) -> str:
        first, *others = (
            "\n".join([heading, *(f"  {name + ':':<10} {said}" for name, said in facts)])
            for heading, facts in self._groups()
        )
        return "\n".join([first, *(indent(each, "  ") for each in others)])

    def _repr_html_(self) -> str:
        return parts.facts(self._groups())


def take_off(enabled: EnabledModel) -> None:
    """Disable one model, unless it was disabled or enabled anew in the meantime."""
    if _is_in_force(enabled):
        detach(enabled)
    leave_harness(enabled)


def _is_in_force(enabled: EnabledModel) -> bool:
    """Return True if a model still has this state: neither disabled nor enabled anew."""
    return enabled_at(enabled.module) is enabled


def leave_harness(enabled: EnabledModel) -> None:
    """Release the site at lm-eval's padding, if the model holds it."""
    if enabled.harness is not None:
        enabled.harness.release()
        enabled.harness = None


def take_back(trainer: Any) -> None:
    """Undo what `enable` has done to a trainer itself: columns that it keeps, logs, steps."""
    # it needs transformers' callbacks, which models alone do not
    from autopack.enabling import trainer_logs

    if (cutter := cutter_of(trainer)) is not None:
        cutter.remove()
    give_columns_back(trainer)
    trainer_logs.take_logs(trainer)
