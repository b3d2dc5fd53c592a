"""One enabled model: what it is, how it is served, and what came of its calls."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from autopack.errors import OutsideForward
from autopack.inspection.callers import callers
from autopack.inspection.fingerprint import Fingerprint
from autopack.inspection.modules import Anatomy
from autopack.inspection.sharding import Group
from autopack.options import Options
from autopack.patching import ProcessLock, SiteLease
from autopack.runtime.padding_read import PaddingRead
from autopack.runtime.tally import Tally
from autopack.runtime.traits import Traits


@dataclass(frozen=True)
class Around:
    """The name, module (if known) and function of third-party code around an enabled model."""

    name: str
    place: str | None
    function: str


@dataclass(frozen=True)
class Neighbours:
    """Facts and functions about trainers, PEFT and mixers' forwards that a model's calls need.

    `covered_mixer` is the class name of a mixer whose instance has a forward of its own, past
    autopack's, or None. `check_step` raises in the step of a trainer that loses documents.
    `hands_rows_to_layers` is True of a model whose layers get a value for each row in this call.
    """

    covered_mixer: str | None
    check_step: Callable[..., None]
    hands_rows_to_layers: Callable[[nn.Module], bool]


def in_a_group() -> bool:
    """Return True if this process is one of several in an initialized torch.distributed."""
    distributed = torch.distributed
    return (
        distributed.is_available()
        and distributed.is_initialized()
        and distributed.get_world_size() > 1
    )


@dataclass(frozen=True)
class Proof:
    """Findings about the exactness of one model's calls: reasons against it, and their source.

    `how` tells it in words. `why_not_packed`, `why_not_labels` and `why_not_unpadded` say why
    packed calls, packed calls with labels, and padded batches without their padding would not be
    exact; None where they are. A head may be exact for padded batches alone. `source` says what
    shows it: a "twin" of the model, a twin of a "part" of it, or "checks" of its calls alone; ""
    where it was not asked for. `leaves_out` names fields of the output that packed calls return as
    None, since they cannot be split by documents.
    """

    how: str
    why_not_packed: str | None = None
    why_not_labels: str | None = None
    why_not_unpadded: str | None = None
    source: str = ""
    leaves_out: tuple[str, ...] = ()


class Link:
    """A reference to an enabled model, held by the marks and hooks on its modules.

    It is not copied and not pickled along: a copy of a whole model brings its own `EnabledModel`,
    which links itself again, and a copy of a part of one brings nothing but the part, severed from
    the model.
    """

    def __init__(self, model: EnabledModel | None = None):
        self.model = model
        self.next_hook = 0  # a number that is higher than those of the model's hooks

    def __getstate__(self) -> dict[str, Any]:
        return {"model": None, "next_hook": self.next_hook}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        # torch numbers hooks by process: a number that is loaded must not be given to another hook.
        RemovableHandle.next_id = max(RemovableHandle.next_id, self.next_hook)

    def follow(self, module: Any) -> EnabledModel:
        """Return the enabled model; raise `OutsideForward` if `module` is a copy without one."""
        if self.model is None:
            raise OutsideForward(why_severed(module), code="copied-part")
        return self.model


def why_severed(module: Any) -> str:
    """Return the error text for a module in a copied part of an enabled model."""
    return (
        f"this {type(module).__name__} is, or is in, a copy of a part of a model that autopack "
        "enabled, and knows nothing of that model's documents. autopack.disable(copy) makes it "
        "plain, autopack.enable(copy) enables it by itself; where it was put into an enabled "
        "model, disable that model and enable it again."
    )


_settling = ProcessLock()
_settlers: ContextVar[tuple[object, ...]] = ContextVar("autopack_settlers", default=())
"""Tokens of the examinations that this thread, or one whose context it has, is making."""


class EnabledModel:
    """The state of one enabled model, copied and pickled along with it, installed sites aside.

    A copy, or a model loaded in another process, installs its sites at its first call, and is
    examined anew.
    """

    def __init__(
        self,
        anatomy: Anatomy,
        traits: Traits,
        options: Options,
        lease: SiteLease,
        renew: Callable[[EnabledModel], None],
    ):
        self.anatomy = anatomy
        self.traits = traits
        self.options = options
        self.lease = lease  # the sites that it keeps installed
        self.tally = Tally()  # what became of its padded batches
        self.logged: set[Any] = set()
        """Kinds of decisions about calls and reasons of audits that have been logged."""
        self.padding_read: PaddingRead | None = PaddingRead()
        """Observations of reads of results at padding; None while an audit or a twin does not look.
        """
        # levels of the entries that have been observed to return one result per row
        self.pooling: set[int] = set()
        self.widths = frozenset(
            size for weight in anatomy.entries[0].parameters() for size in weight.shape
        )
        """The sizes that vectors of the model may have."""
        self.active = False  # whether it is enabled now; a handle outlives that
        self.neighbours: Neighbours
        """Facts of other libraries for its calls, written when it is attached, or again when it has
        changed."""
        # the trainer whose data were last found to reach the model whole
        self.fed_by: weakref.ref[Any] | None = None
        self.harness: SiteLease | None = None
        """The site of lm-eval's function that pads, where it is the model of an `HFLM`."""
        self.lenient = False
        """True if a call that would be refused runs as it would without autopack (`autopack run`).
        """
        self.proof = Proof("not yet")  # what is known of its code
        self.fingerprint: Fingerprint | None = None
        """Its state when that was found out; None for a copy that was not examined yet."""
        self.live: Any = None
        """The checks of its calls (`autopack.watching.live.Live`)."""
        # calls of the auditor and of checks are nothing to tell the user of
        self.is_audited = False
        self.around: Around | None = None
        """The forward of third-party code around it that `enable` was given, which nothing proves.
        """
        self.is_checked_closely = False
        """True if third-party code takes part, hooks included, or no twin proves it."""
        # the first part of it that no twin proves or no library has written
        self.unknown_code: str | None = None
        self.kind: Hashable | None = None
        """Key of what twins say of models like it; None for one whose third-party code has no such
        key."""
        self.groups: tuple[Group, ...] = ()
        """The process groups over which its parameters are gathered when it runs, as its last call
        has found them."""
        self.twin_says: Callable[..., str | None] | None = None
        """Returns the reason why calls of a kind would get something else, or None; it runs a twin.

        A kind is "prefixes" (rows that begin alike), "parts" and labels (ranks that share rows), or
        "media", what they are and their number in a call.
        """
        self.said_by_twins: dict[tuple[Any, ...], str | None] = {}
        """Answers of twins about the model as it is, by such a kind."""
        self._renew = renew
        # the token of the thread that examines it now
        self._settler: object | None = None
        self.link = Link(self)  # what its marks and hooks know it by

    @property
    def module(self) -> Any:
        """The model itself, the outermost of its entries."""
        return self.anatomy.entries[0]

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.link.model is None:  # of a copy, or of a model that is loaded
            self.link.model = self

    def __getstate__(self) -> dict[str, Any]:
        of_process = {
            "groups": (),
            **dict.fromkeys(("fingerprint", "fed_by", "kind", "harness", "_settler")),
        }
        # the seconds were another's
        anew = {"logged": set(), "tally": replace(self.tally, _first=None)}
        return {**self.__dict__, **of_process, **anew}

    def follow_code(self) -> None:
        """Examine the model again if a module, a function, its loss or its configuration changed.

        Other threads wait until that is done, and do not use a model that is half examined.
        """
        if not self._is_stale() or self.is_settling:  # what settles a model calls it
            return
        with self.settling():
            if self._is_stale():  # another thread may have been first
                self._renew(self)

    @contextmanager
    def settling(self) -> Iterator[None]:
        """Mark this thread as examining the model in this block: its calls do not examine it.

        One thread of the process at a time does so. Threads that are given its context, such as the
        threads of twins, need not wait for it.
        """
        with nullcontext() if _settlers.get() else _settling.held():
            before, self._settler = self._settler, object()
            token = _settlers.set((*_settlers.get(), self._settler))
            try:
                yield
            finally:
                self._settler = before
                _settlers.reset(token)

    @property
    def is_settling(self) -> bool:
        """True if this thread examines the model, or runs a twin for that.

        What a twin runs may call the model itself (a function on it that holds it), and must not
        prove it a second time.
        """
        return self._settler is not None and self._settler in _settlers.get()

    @property
    def is_silent(self) -> bool:
        """True in calls of an examination or an audit, in which no warning is given."""
        return self.is_audited or self.is_settling

    def _is_stale(self) -> bool:
        """Return True if the model has changed since it was proven, or was never proven here."""
        return self.fingerprint is None or self.fingerprint.changed() is not None

    def ask_twin(self, *question: Any) -> str | None:
        """Return a twin's remembered reason against a kind of call; None if none, or not asked.

        `question` is a kind as in `twin_says`. No twin is asked while the model is examined.
        """
        if self.is_settling or self.twin_says is None:
            return None
        if question not in self.said_by_twins:
            with self.settling():
                self.said_by_twins[question] = self.twin_says(self, *question)
        return self.said_by_twins[question]

    @property
    def chunk_sizes(self) -> set[int]:
        """Numbers of tokens that its layers process at a time; empty if they take all at once."""
        held = (vars(module)["chunk_size_feed_forward"] for module in self.anatomy.chunked)
        return set(filter(None, held))

    def is_called_from(self, place: str, function: str = ".*") -> bool:
        """Return True if this model, or an object that holds it, runs a method in module `place`.

        `place` is the beginning of a module's name, `function` a pattern for the method's. False in
        compiled code.
        """
        return not torch.compiler.is_compiling() and any(
            map(self._is_held_by, callers(place, function))
        )

    def _is_held_by(self, caller: Any) -> bool:
        """Return True if `caller` is the model or an entry, contains it, or has such a `model`."""
        held = caller if isinstance(caller, nn.Module) else getattr(caller, "model", None)
        if not isinstance(held, nn.Module):
            return False
        entries = self.anatomy.entries
        return any(held is entry for entry in entries) or any(
            part is entries[0] for part in held.modules()
        )

    def implementations(self) -> tuple[str, ...]:
        """Return the attention implementations that this model's attention modules ask for now."""
        modules: Any = self.anatomy.attention
        configs = {
            id(c): c for m in modules if (c := getattr(m, "config", None)) is not None
        }.values()
        named = {
            c._attn_implementation or "eager" for c in configs if hasattr(c, "_attn_implementation")
        }
        return tuple(sorted(named))
