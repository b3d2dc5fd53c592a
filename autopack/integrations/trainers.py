"""Facts about trainers of other libraries: an adapter for each kind, with their private parts.

An adapter names the attributes in which a kind of trainer holds its model, its data and its
collator, the columns that it drops, and how its loss reads a row. Another kind is another entry of
`ADAPTERS`. No other module knows these private parts. None of these libraries is imported.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any


@dataclass(frozen=True)
class TrainerAdapter:
    """A kind of trainer: class `kind` of the package or module `package`, and classes derived from
    it.

    Names that begin with an underscore are private parts of the library, as in release `seen_in`.
    """

    kind: str
    package: str
    seen_in: str
    model: str = "model"
    """Attribute with the model that is trained; other models are searched among all attributes."""
    wrapped: tuple[str, ...] = ()
    """Attributes with the same model in wrappers."""
    makes_model: str = "model_init"
    """Attribute that is not None if training makes the model anew."""
    data: tuple[str, ...] = ("train_dataset", "eval_dataset")
    collator: str = "data_collator"
    steps: tuple[str, ...] = ()
    """Methods that train and evaluate, with the trainer as `self`."""
    columns: str | None = None
    """Attribute with the list of columns that the trainer keeps; None if it drops none."""
    find_columns: str = ""
    """Method that fills `columns`."""
    drops: str = ""
    """Field of the trainer's `args` that makes it drop the other columns."""
    callbacks: str | None = None
    """Attribute whose `callbacks` are transformers' own kind; None if it has none: nothing is
    logged."""
    adds_up_rows: bool = False
    """True if the loss takes every row of a batch for one sequence, whatever the row declares."""
    reference: str | None = None
    """Attribute with a model that is never trained, and called for log-probabilities of the same
    tokens."""
    cuts: str | None = None
    """Value of `args.packing_strategy` that cuts documents at row ends and declares no
    boundaries."""

    def drops_columns(self, trainer: Any) -> bool:
        """Return True if a trainer drops columns that its model's forward does not name."""
        return self.columns is not None and hasattr(trainer, self.columns) and bool(getattr(trainer.args, self.drops))

    def why_documents_are_lost(self, trainer: Any) -> str | None:
        """Return why documents in rows that the trainer made cannot be told apart; None if they
        can."""
        args = trainer.args if self.cuts is not None else None
        skips = (getattr(args, "dataset_kwargs", None) or {}).get("skip_prepare_dataset")
        packs = getattr(args, "packing", False) or getattr(args, "eval_packing", False)
        if args is None or skips or not packs or getattr(args, "packing_strategy", None) != self.cuts:
            return None
        return (
            f"{type(trainer).__name__} packs with packing_strategy={self.cuts!r}, which cuts documents where rows end "
            f"and does not say where they begin. Each row counts as one document, and its documents see each other. "
            f'Use packing_strategy="bfd" or "bfd_split", whose documents are kept apart.'
        )

    def columns_of(self, trainer: Any) -> list[str] | None:
        """Return the columns that a trainer keeps; None if it drops none or has not found them
        yet."""
        return None if self.columns is None else getattr(trainer, self.columns, None)

    def found_columns(self, trainer: Any) -> list[str]:
        """Let a trainer that drops columns find those that it keeps, and return them."""
        getattr(trainer, self.find_columns)()
        return getattr(trainer, self.columns or "")

    def set_columns(self, trainer: Any, columns: list[str] | None) -> None:
        """Let a trainer keep these columns."""
        setattr(trainer, self.columns or "", columns)

    def collator_of(self, trainer: Any) -> Any:
        """Return the collator of a trainer, which makes batches of examples."""
        return getattr(trainer, self.collator, None)

    def reference_of(self, trainer: Any) -> Any:
        """Return the model that the trained one is compared with; None if there is none."""
        return None if self.reference is None else getattr(trainer, self.reference, None)

    def callbacks_of(self, trainer: Any) -> list[Any]:
        """Return the list of callbacks of a trainer; an empty one if it has none."""
        return getattr(getattr(trainer, self.callbacks or "", None), "callbacks", [])

    def datasets_of(self, trainer: Any) -> list[Any]:
        """Return the data sets of a trainer; one of them may hold several by name."""
        found: list[Any] = []
        for name in self.data:
            given = getattr(trainer, name, None)
            found += given.values() if isinstance(given, dict) else [given]
        return [dataset for dataset in found if dataset is not None]


TRANSFORMERS = TrainerAdapter(
    "Trainer",
    "transformers.trainer",
    seen_in="transformers 5.24",
    wrapped=("model_wrapped",),
    steps=("training_step", "prediction_step"),
    columns="_signature_columns",
    find_columns="_set_signature_columns_if_needed",
    drops="remove_unused_columns",
    callbacks="callback_handler",
)
_TRL = replace(TRANSFORMERS, package="trl", seen_in="trl 1.16")
ADAPTERS = [
    replace(_TRL, kind="DPOTrainer", adds_up_rows=True, reference="ref_model"),
    replace(_TRL, kind="KTOTrainer", adds_up_rows=True, reference="ref_model"),
    replace(_TRL, kind="ORPOTrainer", adds_up_rows=True),
    replace(_TRL, kind="CPOTrainer", adds_up_rows=True),
    replace(_TRL, kind="SFTTrainer", cuts="wrapped"),
    TRANSFORMERS,
]
"""Adapters of all known kinds; for a trainer of several kinds the first counts."""


def adapter_of(trainer: Any) -> TrainerAdapter | None:
    """Return the adapter of a trainer, by its class and base classes; None for anything else."""
    return next((each for each in ADAPTERS if derives_from(trainer, each.kind, each.package)), None)


def derives_from(thing: Any, kind: str, *packages: str) -> bool:
    """Return True if the class of a thing, or a base class, is `kind` of one of these packages or
    modules."""
    below = tuple(f"{package}." for package in packages)
    return any(cls.__name__ == kind and f"{cls.__module__}.".startswith(below) for cls in type(thing).__mro__)


def at_work() -> Iterator[tuple[Any, TrainerAdapter]]:
    """Yield the trainers that train or evaluate in this thread, innermost first, with their
    adapters."""
    steps = {name for adapter in ADAPTERS for name in adapter.steps}
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        # Only of such functions: up to Python 3.12 asking for the locals keeps them alive until the frame ends.
        if frame.f_code.co_name in steps and (adapter := adapter_of(found := frame.f_locals.get("self"))) is not None:
            yield found, adapter
        frame = frame.f_back
