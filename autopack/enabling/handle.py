"""Handles that `enable` returns: facts on one model, or on the models of a trainer, and the way to
take it back.
"""

from __future__ import annotations

import textwrap
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel

from autopack.attention.choose import taken_by_auto
from autopack.calls.prefixes import why_not
from autopack.enabling.attach import detach
from autopack.enabling.explain import Explanation, explain
from autopack.integrations import lm_eval
from autopack.integrations.boundaries import give_columns_back, kept_columns
from autopack.pages import parts
from autopack.patching import SiteLease
from autopack.runtime.model import EnabledModel
from autopack.runtime.scope import handle_of
from autopack.runtime.tally import Checked, Tally, number_of
from autopack.steps.trainers import cutter_of
from autopack.watching.live import Live

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Handle", "Handles", "TrainerHandle"]
_EXACT = {"twin": "exact", "part": "exact", "checks": "checked in use", "": "not verified"}
"""Words for the sources of a proof."""


class Handle(AbstractContextManager["Handle"]):
    """The handle of one enabled model. Also a context manager that disables on leaving.

    It keeps the model alive, as any other reference does, also after `remove`; an enabled model to
    which nobody has a reference, nor to its handle, is collected, and what stands for it in
    transformers goes with it.
    """

    def __init__(self, model: PreTrainedModel, enabled: EnabledModel):
        self.model, self.enabled = model, enabled
        self._harness: SiteLease | None = None
        self.repeated = False
        """Whether `enable` has given it out again since a `with` block was last entered with it."""
        self._blocks: list[bool] = []
        """Of the `with` blocks that it is used in, the outermost first: whether leaving it takes
        everything back.
        """

    def __getstate__(self) -> dict[str, Any]:
        # It travels with copies of the model, whose harness and blocks are others.
        return {**self.__dict__, "_harness": None, "repeated": False, "_blocks": []}

    def remove(self) -> None:
        """Disable the model: hooks, marks, checkpoint functions and installed functions go back by
        identity.
        """
        if handle_of(self.model) is self:
            detach(self.model, self.enabled)
        self.leave_harness()

    def join_harness(self) -> bool:
        """Have an `HFLM` of lm-eval say where it pads; whether it did not do so before."""
        if self._harness is not None:
            return False
        lease = lm_eval.lease()
        lease.follow(())
        self._harness = lease
        return True

    def leave_harness(self) -> None:
        """Take back what `join_harness` has done."""
        if self._harness is not None:
            self._harness.release()
            self._harness = None

    def __enter__(self) -> Handle:
        # A block around a model that another call has enabled leaves it so.
        self._blocks.append(not self.repeated)
        self.repeated = False
        return self

    def __exit__(self, *_: Any) -> None:
        if not self._blocks or self._blocks.pop():
            self.remove()

    @property
    def backend(self) -> str:
        """The backend that was asked for, and for `auto` those that calls may get here."""
        if self.enabled.options.backend != "auto":
            return self.enabled.options.backend
        device = next((parameter.device.type for parameter in self.model.parameters()), "cpu")
        taken = [name for each in self.enabled.implementations() for name in taken_by_auto(each, device)]
        return "auto: " + " or ".join(dict.fromkeys(taken))

    @property
    def verified(self) -> str:
        """The proof that the model is exact at present, in words."""
        return self.enabled.proof.how

    @property
    def tally(self) -> Tally:
        """Counts of calls: padded batches that ran as packed rows or were left, and how full rows
        were.
        """
        return self.enabled.tally

    def explain(self, *args: Any, **batch: Any) -> Explanation:
        """Return the plan that a call of the model would get, and the reason; run nothing.

        `print(handle.explain(**batch))` says whether the batch runs as packed rows, without its
        padding or as it came, for what reason, and how many documents and tokens it has. A call
        that autopack would refuse is explained too. Raises `ValueError` for a model that is
        disabled.
        """
        if handle_of(self.model) is not self:
            raise ValueError(f"{type(self.model).__name__} is disabled, so its calls run as without autopack")
        with self.enabled.tally.unchanged():
            return explain(self.enabled, args, batch)

    @property
    def checked(self) -> Checked | None:
        """Counts of checked calls; None if no call is to be checked.

        Checked are calls 1, 2, 4, 8 and so on, those that go beyond the calls checked before, and
        every Nth training call if that was asked for.
        """
        live = self.enabled.live
        return live.checked if isinstance(live, Live) else None

    @property
    def summary(self) -> str:
        """The answer to what users ask first: are calls packed, are they exact, how much is saved."""
        proof, calls = self.enabled.proof, self.tally.training.plus(self.tally.evaluation)
        if not self.enabled.active:
            return "disabled"
        if proof.packed is None:
            exact = _EXACT[proof.source]
        else:
            exact = "refused" if proof.padded is not None else "exact on padded batches, packed rows are refused"
        if not calls.calls:
            return f"enabled, {exact}, no call yet"
        spared = calls.skipped + calls.shared
        saved = f", {spared / (calls.columns + spared):.1%} of tokens saved" if spared else ""
        packs = "packed" if calls.skipped > 0 or calls.documents > calls.rows else "not packed so far"
        return f"{packs}, {exact}{saved}"

    def _facts(self) -> list[tuple[str, str]]:
        """Return the lines of `print(handle)`, each as a name and a text."""
        enabled, options, tally = self.enabled, self.enabled.options, self.tally
        attention, mixers = len(enabled.anatomy.attention), len(enabled.anatomy.mixers)
        implementations = ", ".join(enabled.implementations())
        found = [
            ("model", f"{type(self.model).__name__} ({enabled.anatomy.model_type})"),
            ("family", enabled.traits.family),
            ("attention", attention and f"{number_of(attention, 'module')}, attn_implementation={implementations}"),
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
        """Return in words whether common beginnings of rows are computed once."""
        share, reason = self.enabled.options.share, why_not(self.enabled)
        if not share:
            return "not shared (share=False)"
        if reason is not None:
            return f"not shared: {reason}"
        shared = self.tally.training.shared + self.tally.evaluation.shared
        said = f"{shared:,} tokens were computed with those of another row"
        for why, count in self.tally.apart.most_common():
            said += f"; {number_of(count, 'batch')} whose rows begin alike computed one by one: {why}"
        return said

    def __repr__(self) -> str:
        return f"autopack: {self._text('  ')}"

    def _text(self, indent: str) -> str:
        """Return the summary and the lines of `print(handle)`, indented."""
        return "\n".join(
            [self.summary, *(f"{indent}{name + ':':<11}{value}" for name, value in self._facts())],
        )

    def _repr_html_(self) -> str:
        return parts.facts(self._facts(), f"autopack: {self.summary}")


class Handles(AbstractContextManager["Handles"]):
    """The handle of several enabled models. Also a context manager that disables them all on
    leaving.

    `handles` go by the names of the models: the keys of a dict, or `[0]`, `[1]` and so on.
    """

    def __init__(self, handles: dict[Any, Any]):
        self.handles = handles

    def remove(self) -> None:
        """Disable all of them."""
        for handle in self.handles.values():
            handle.remove()

    def __enter__(self) -> Self:
        for handle in self.handles.values():
            handle.__enter__()
        return self

    def __exit__(self, *_: Any) -> None:
        for handle in self.handles.values():
            handle.__exit__()

    def __repr__(self) -> str:
        parts = (f"{name}: {handle!r}".replace("autopack: ", "", 1) for name, handle in self.handles.items())
        return "\n".join(
            [f"autopack: {number_of(len(self.handles), 'model')}", *(textwrap.indent(part, "  ") for part in parts)]
        )

    def _repr_html_(self) -> str:
        return parts.named((str(name), handle._repr_html_()) for name, handle in self.handles.items())


class TrainerHandle(Handles):
    """The handle of the models of a trainer. Also a context manager that disables them all on
    leaving.

    `trainer` is the name of its class; `handles`, and `left_alone` with the reasons, go by the
    trainer's attributes; `kept` are columns of its data that it would have dropped, as its model
    does not name them; `cut` says why documents of its rows cannot be told apart, where that is so.
    """

    def __init__(
        self,
        trainer: Any,
        handles: dict[str, Handle],
        left_alone: dict[str, str],
        cut: str | None = None,
    ):
        super().__init__(handles)
        self._trainer, self.cut = trainer, cut
        self.trainer, self.left_alone = type(trainer).__name__, left_alone
        self.kept = tuple(kept_columns(trainer))

    @property
    def tally(self) -> Tally:
        """Counts of calls of all models of the trainer together."""
        tallies = [handle.tally for handle in self.handles.values()]
        if len(tallies) == 1:
            return tallies[0]
        total = Tally()
        for each in tallies:
            total.add(each)
        return total

    def explain(self, *args: Any, **batch: Any) -> Explanation:
        """Return the plan of a call of its models with these arguments and its reason; nothing is
        run.

        Of several models each decision has the attribute of its model before the name, that of the
        trained model last. Raises `ValueError` where one is disabled.
        """
        found = {name: handle.explain(*args, **batch) for name, handle in reversed(self.handles.items())}
        return next(iter(found.values())) if len(found) == 1 else Explanation.of_several(found)

    def remove(self) -> None:
        """Disable all models; the trainer drops columns and writes logs as before."""
        take_back(self._trainer)
        super().remove()

    def __exit__(self, *_: Any) -> None:
        super().__exit__()
        if not any(handle.enabled.active for handle in self.handles.values()):
            take_back(self._trainer)

    @property
    def _of_data(self) -> list[tuple[str, str]]:
        """Return the lines on a trainer's data and steps, each as a name and a text."""
        found = [
            ("data keep", ", ".join(self.kept)),
            ("steps:", cutter_of(self._trainer)),
            ("data:", self.cut),
        ]
        return [(name, str(said)) for name, said in found if said]

    def __repr__(self) -> str:
        parts = [f"  {name}: {handle._text('    ')}" for name, handle in self.handles.items()]
        parts += [f"  {name}: left alone: {reason}" for name, reason in self.left_alone.items()]
        parts += [f"  {name} {said}" for name, said in self._of_data]
        return "\n".join([f"autopack: {self.trainer}", *parts])

    def _repr_html_(self) -> str:
        groups: list[tuple[str, list[tuple[str, str]]]]
        groups = [(f"{name}: {handle.summary}", handle._facts()) for name, handle in self.handles.items()]
        groups.append(("", [*self.left_alone.items(), *self._of_data]))
        return parts.groups_of_facts(groups, f"autopack: {self.trainer}")


def take_back(trainer: Any) -> None:
    """Take back what `enable` has done to a trainer itself: the columns that it keeps, its logs,
    its steps.
    """
    from autopack.enabling import trainer_logs  # it needs transformers' callbacks, which models alone do not

    if (cutter := cutter_of(trainer)) is not None:
        cutter.remove()
    give_columns_back(trainer)
    trainer_logs.take_logs(trainer)
