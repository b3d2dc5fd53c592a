"""Facts about trainers of other libraries: an adapter for each kind, with their private parts.

All known kinds derive from transformers' own, and hold their model, data and collator as that does
(seen in transformers 5.24 and trl 1.16). An adapter says how the loss of its kind reads a row.
Another kind is another entry of `ADAPTERS`. Of other modules `boundaries` alone knows such a part,
the columns. None of these libraries is imported.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from autopack.inspection.callers import STEPS, callers


@dataclass(frozen=True)
class TrainerAdapter:
    """Facts about trainers of the class `kind` of a package or module, and of derived classes."""

    kind: str
    package: str = "trl"
    adds_up_rows: bool = False
    """True if the loss takes every row of a batch for one sequence, whatever the row declares."""
    reference: str | None = None
    """Attribute with a model that is never trained, and called for log-probabilities of the same
    tokens."""
    cuts: str | None = None
    """Value of `args.packing_strategy` that cuts documents at row ends and declares no
    boundaries."""
    rows_each: int = 1
    """Number of rows of each example: 2 where a batch holds all chosen ones before all rejected
    ones."""
    losses: tuple[str, ...] | None = None
    """Values of `loss_type`, of the arguments or of the trainer (LLaMA-Factory's), by which the
    loss is a mean over examples; None if none is asked about."""

    def why_documents_are_lost(self, trainer: Any) -> str | None:
        """Return the reason why a trainer's own packed rows lose documents, or None."""
        args = getattr(trainer, "args", None)
        skips = (getattr(args, "dataset_kwargs", None) or {}).get("skip_prepare_dataset")
        packs = getattr(args, "packing", False) or getattr(args, "eval_packing", False)
        if (
            self.cuts is None
            or skips
            or not packs
            or getattr(args, "packing_strategy", None) != self.cuts
        ):
            return None
        return (
            f"{type(trainer).__name__} packs with packing_strategy={self.cuts!r}, which cuts "
            "documents where rows end and does not say where they begin. Each row counts as one "
            "document, and its documents see each other. "
            'Use packing_strategy="bfd" or "bfd_split", whose documents are kept apart.'
        )

    def why_not_cut(self, trainer: Any) -> str | None:
        """Return the reason why a step's loss depends on its division into batches, or None."""
        if self.losses is None:
            return None
        given = getattr(trainer.args, "loss_type", None) or getattr(trainer, "loss_type", None)
        found = given if isinstance(given, list) else [given]
        others = [each for each in found if each not in self.losses]
        return f"its loss ({others[0]}) may compare examples of a batch" if others else None


_OF_PAIRS = tuple(
    "sigmoid hinge ipo exo_pair nca_pair robust sppo_hard apo_zero apo_down discopop "
    "sigmoid_norm".split()
)
"""Losses of DPO that are a mean over pairs (trl 1.16); others have a mean over tokens, or sort the
pairs."""
TRANSFORMERS = TrainerAdapter("Trainer", "transformers.trainer")
ADAPTERS = [
    TrainerAdapter(
        "DPOTrainer", adds_up_rows=True, reference="ref_model", rows_each=2, losses=_OF_PAIRS
    ),
    TrainerAdapter("KTOTrainer", adds_up_rows=True, reference="ref_model", losses=()),
    TrainerAdapter("ORPOTrainer", adds_up_rows=True, losses=()),
    TrainerAdapter("CPOTrainer", adds_up_rows=True, losses=()),
    TrainerAdapter("RewardTrainer", rows_each=2),
    TrainerAdapter("PairwiseTrainer", "llamafactory", rows_each=2),
    TrainerAdapter("SFTTrainer", cuts="wrapped"),
    TRANSFORMERS,
]
"""Adapters of all known kinds; for a trainer of several kinds the first counts."""


def adapter_of(trainer: Any) -> TrainerAdapter | None:
    """Return the adapter of a trainer, by its class and base classes; None for anything else."""
    return next((each for each in ADAPTERS if derives_from(trainer, each.kind, each.package)), None)


def drops_columns(trainer: Any) -> bool:
    """Return True if a trainer drops columns that its model's forward does not name."""
    return hasattr(trainer, "_signature_columns") and bool(trainer.args.remove_unused_columns)


def found_columns(trainer: Any) -> list[str]:
    """Return the columns that a trainer keeps, after it has determined them if need be."""
    trainer._set_signature_columns_if_needed()
    return trainer._signature_columns


def collator_of(trainer: Any) -> Any:
    """Return the collator of a trainer, which makes batches of examples."""
    return getattr(trainer, "data_collator", None)


def callbacks_of(trainer: Any) -> list[Any]:
    """Return the list of callbacks of a trainer; an empty one if it has none."""
    return getattr(getattr(trainer, "callback_handler", None), "callbacks", [])


def datasets_of(trainer: Any) -> list[Any]:
    """Return the data sets of a trainer; one of them may hold several by name."""
    found: list[Any] = []
    for name in ("train_dataset", "eval_dataset"):
        given = getattr(trainer, name, None)
        found += given.values() if isinstance(given, dict) else [given]
    return [dataset for dataset in found if dataset is not None]


def derives_from(thing: Any, kind: str, *packages: str) -> bool:
    """Return True if a thing's class or a base is `kind` of one of these packages or modules."""
    below = tuple(f"{package}." for package in packages)
    return any(
        cls.__name__ == kind and f"{cls.__module__}.".startswith(below)
        for cls in type(thing).__mro__
    )


def iterables_of(stream: Any) -> list[Any]:
    """Return the iterables under a stream of `datasets`, through all its operations; else []."""
    found = [stream._ex_iterable] if hasattr(stream, "_ex_iterable") else []
    for each in found:  # grows meanwhile
        for value in vars(each).values():
            parts = value if isinstance(value, list | tuple) else [value]
            found += [
                part
                for part in parts
                if derives_from(part, "_BaseExamplesIterable", "datasets.iterable_dataset")
            ]
    return found


def at_work() -> Iterator[tuple[Any, TrainerAdapter]]:
    """Return an iterator of (trainer, adapter) at work in this thread, the innermost first."""
    return trainers_among(callers(function=STEPS))


def trainers_among(holders: Iterable[Any]) -> Iterator[tuple[Any, TrainerAdapter]]:
    """Yield (trainer, adapter) for each trainer among some objects."""
    for found in holders:
        if (adapter := adapter_of(found)) is not None:
            yield found, adapter
