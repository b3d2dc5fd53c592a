"""Pairs of preference data, which go through a trainer two sequences at a time: their lengths, and what a pair counts.

Trainers of pairs (TRL's for DPO and rewards) make a batch (2 B, T) of them, chosen ones first. An enabled model runs it
as one packed row; what is left to plan is which pairs share a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np

from autopack.errors import InvalidPacking
from autopack.integrations.trainers import ADAPTERS, adapter_of, refuse_shared_batches
from autopack.packing.checks import PAIRS, check_int
from autopack.packing.lengths import to_numpy

FORMS = (
    ("prompt_ids", "chosen_ids", "rejected_ids"),
    ("chosen_ids", "rejected_ids"),
    ("chosen_input_ids", "rejected_input_ids"),
)
"""Columns of tokenized pairs: a prompt that both sequences begin with, or whole sequences."""
BLOCK = 10_000
"""Pairs that are read at a time."""


def pair_lengths(dataset: Any, collator: Callable[[list[Any]], Any], *, max_length: int | None = None) -> np.ndarray:
    """Tokens of both sequences of each pair, (pairs, 2) int64: the chosen one and the rejected one.

    For `PackedBatchSampler`, which then makes batches of pairs by their tokens, with the squares of a cost counted by
    sequence. Lengths are what `collator` leaves of them: the columns of the data set say how many tokens there are, and
    the collator is called with the longest pairs, one at a time, to see that it makes as many of them.

    Args:
        dataset: tokenized pairs, as TRL's trainers hold them once they are made (`trainer.train_dataset`): a
            `datasets.Dataset`, or anything with a length and examples that are mappings. Its columns are `prompt_ids`,
            `chosen_ids` and `rejected_ids` (DPO), `chosen_ids` and `rejected_ids` (rewards), or `chosen_input_ids` and
            `rejected_input_ids` (ORPO, CPO).
        collator: what makes batches of them (`trainer.data_collator`).
        max_length: tokens at which the collator cuts each sequence, if it has no attribute `max_length` that says so.

    Raises `InvalidPacking` for data without these columns (text, packed rows), without a length, with sequences that
    hold no token, and where the collator makes other lengths of a pair; `ValueError` for a `max_length` below 1.
    """
    check_int("max_length", max_length, 1, optional=True)
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")) or isinstance(dataset, (Mapping, str)):
        found = f"found {type(dataset).__name__}"
        raise InvalidPacking(f"wanted a data set with a length, {found}; of a stream, take what fits into memory")
    if not len(dataset):
        raise InvalidPacking("wanted at least one pair, found an empty data set")
    form = _form(dataset)
    sizes = _sizes(dataset, form)  # (pairs, columns)
    made = sizes[:, -2:] + (sizes[:, :1] if len(form) == 3 else 0)
    cut = getattr(collator, "max_length", None) if max_length is None else max_length
    made = made if cut is None else np.minimum(made, cut)
    if not made.all():
        index, which = (int(of[0]) for of in np.nonzero(made == 0))
        raise InvalidPacking(f"pair {index}: found no tokens in {form[which - 2]!r}; leave such pairs out")
    longest = {0, *np.argmax(made, axis=0).tolist(), *np.argmax(sizes, axis=0).tolist()}
    for index in sorted(longest):
        collated = [len(tokens) for tokens in _sequences(dataset, index, collator)] or None
        if collated != made[index].tolist():
            wanted = f"{form} and max_length={cut} say {made[index].tolist()}"
            raise InvalidPacking(
                f"pair {index}: {_name(collator)} makes sequences of {collated} tokens of it, and {wanted}. Pass the "
                f"collator and the data set of the trainer, and max_length= if it cuts at a length that it does not say"
            )
    return made


def pair_prefixes(dataset: Any, collator: Callable[[list[Any]], Any], *, max_length: int | None = None) -> np.ndarray:
    """Tokens that both sequences of each pair begin with, (pairs,) int64: those of the prompt, or what they share.

    For `PackedBatchSampler(pair_lengths(...), prefixes=pair_prefixes(...))`, whose rows have room for as many pairs as
    a model has to compute that computes a prompt once for both (`autopack.enable(model, share=...)`). Arguments and
    errors are those of `pair_lengths`; a collator that leaves the prompt out, or cuts off its beginning, is one too.
    """
    lengths = pair_lengths(dataset, collator, max_length=max_length)
    form = _form(dataset)
    if len(form) == 3:
        prompts = _sizes(dataset, form)[:, 0]
    else:
        pairs = ([dataset[index][name] for name in form] for index in range(len(dataset)))
        prompts = np.array([_in_common(*pair) for pair in pairs], np.int64)
    found = np.minimum(prompts, lengths.min(axis=1))
    for index in {0, int(found.argmax()), int(lengths.sum(axis=1).argmax())}:
        sequences = _sequences(dataset, index, collator)
        common = _in_common(*sequences) if len(sequences) == 2 else 0
        if common < found[index]:
            raise InvalidPacking(
                f"pair {index}: {_name(collator)} makes sequences of it that begin with {common} tokens in common, and "
                f"{form} say {found[index]}. Pass the collator and the data set of the trainer, and leave prefixes out "
                f"where it cuts off the beginning of a prompt"
            )
    return found


def _in_common(one: Any, other: Any) -> int:
    """How many tokens two sequences begin with in common."""
    shorter = min(len(one), len(other))
    differs = np.asarray(one)[:shorter] != np.asarray(other)[:shorter]
    return int(differs.argmax()) if differs.any() else shorter


def weigh_pairs(trainer: Any) -> WeighedPairs:
    """Makes every pair of a step count alike in a trainer of pairs, however many pairs its batches have.

    Such a trainer takes the mean over the pairs of each batch, and the mean of these means over micro-batches (gradient
    accumulation) and processes. Batches by tokens have unequally many pairs, and a pair of a batch of few would count
    more. Here each batch's loss is multiplied by its share of the step's pairs, so that the step is the mean over all
    of them. A loss that is no mean over pairs (`"aot"`, `"sft"`, a router's) is averaged over batches, each as much as
    it has pairs. Metrics that the trainer logs beside the loss stay means over batches; they are gathered of unequally
    many pairs of several processes, of which the trainer by itself wants as many of each. Evaluation stays as it is.

    For TRL's `DPOTrainer`, `RewardTrainer`, `ORPOTrainer` and `CPOTrainer` and what derives from them. Call it before
    `trainer.train()`, in any order with `autopack.enable(trainer)`. Returns what takes it back by `.remove()`; also a
    context manager. Raises `ValueError` for other trainers, for parallelism that cuts batches, where the trainer is
    told that its loss counts accumulation itself (`loss_is_scaled_for_ga`), and where it is weighed already.
    """
    return WeighedPairs(trainer)


class WeighedPairs(AbstractContextManager["WeighedPairs"]):
    """What `weigh_pairs` did to a trainer."""

    def __init__(self, trainer: Any):
        adapter = adapter_of(trainer)
        rows = None if adapter is None else adapter.rows_of_pair
        if rows is None:
            wanted = ", ".join(each.kind for each in ADAPTERS if each.rows_of_pair)
            raise ValueError(f"wanted a trainer of pairs ({wanted} of TRL), found {type(trainer).__name__}")
        if "compute_loss" in vars(trainer):
            raise ValueError("found a compute_loss on the trainer itself: it is weighed already, or by somebody else")
        if getattr(trainer, "loss_is_scaled_for_ga", None):
            raise ValueError("found loss_is_scaled_for_ga: the trainer's loss is no mean over the pairs of a batch")
        if trainer.args.n_gpu > 1:
            raise ValueError("found torch.nn.DataParallel, which cuts batches; start one process per device")
        refuse_shared_batches(trainer)
        self._trainer, self._rows = trainer, rows
        self._batches, self._loss = trainer.get_batch_samples, trainer.compute_loss
        trainer.get_batch_samples, trainer.compute_loss = self._get_batch_samples, self._compute_loss

    def remove(self) -> None:
        """Give the trainer its own loss back."""
        for name, ours in (("get_batch_samples", self._get_batch_samples), ("compute_loss", self._compute_loss)):
            if vars(self._trainer).get(name) == ours:
                delattr(self._trainer, name)

    def __exit__(self, *error: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(of {type(self._trainer).__name__})"

    def _pairs(self, batch: Mapping[str, Any]) -> int:
        tokens = batch["input_ids" if self._rows == 2 else "chosen_input_ids"]
        return len(tokens) // self._rows

    def _get_batch_samples(self, *args: Any, **kwargs: Any) -> tuple[list[Any], Any]:
        """The micro-batches of a step, and how many pairs one has on average, over all processes.

        A step hands that number to its loss, and nobody else does: evaluation has none.
        """
        import torch

        batches, _ = self._batches(*args, **kwargs)
        if not batches:  # the end of an epoch, which other processes may reach at another step
            return batches, None
        accelerator = self._trainer.accelerator
        number = torch.tensor(sum(map(self._pairs, batches)), device=accelerator.device)
        total = int(accelerator.gather(number).sum())
        return batches, total / (len(batches) * accelerator.num_processes)

    def _compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: float | None = None
    ) -> Any:
        share = 1.0 if num_items_in_batch is None else self._pairs(inputs) / num_items_in_batch
        accelerator = self._trainer.accelerator
        with _gathering(accelerator) if accelerator.num_processes > 1 else nullcontext():
            found = self._loss(model, inputs, return_outputs=return_outputs)
        return (found[0] * share, *found[1:]) if return_outputs else found * share


@contextmanager
def _gathering(accelerator: Any) -> Iterator[None]:
    """Have an accelerator gather values of unequally many pairs; a collective itself wants as many of each rank."""
    import torch

    gather = accelerator.gather

    def gather_all(values: Any) -> Any:
        if not isinstance(values, torch.Tensor) or not values.ndim:
            return gather(values)
        counts = gather(torch.tensor(len(values), device=values.device)).tolist()
        padded = values.new_zeros(max(counts), *values.shape[1:])
        padded[: len(values)] = values
        parts = gather(padded).split(max(counts))
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    accelerator.gather = gather_all
    try:
        yield
    finally:
        del accelerator.gather


def _form(dataset: Any) -> tuple[str, ...]:
    """The columns of tokenized pairs that a data set has."""
    names = getattr(dataset, "column_names", None)
    if names is None:
        names = list(dataset[0]) if isinstance(dataset[0], Mapping) else []
    form = next((form for form in FORMS if {*form} <= {*names}), None)
    if form is not None:
        return form
    wanted = "wanted tokenized pairs (columns chosen_ids and rejected_ids)"
    if {*names} & {"image", "images"}:
        way = "those with images are tokenized batch by batch, and have no lengths before"
    elif {*names} & {name for pair in PAIRS for name in pair}:
        way = "make the trainer first and pass its train_dataset, which it has tokenized"
    else:
        way = "these are no pairs"
    raise InvalidPacking(f"{wanted}, found {sorted(map(str, names))}; {way}")


def _sizes(dataset: Any, form: Sequence[str]) -> np.ndarray:
    """How many tokens each example has in these columns, (examples, columns) int64."""
    makes_examples = dict(getattr(dataset, "format", None) or {}).get("type") == "custom"  # when they are read
    if hasattr(dataset, "with_format") and hasattr(dataset, "select_columns") and not makes_examples:
        import pyarrow as pa
        import pyarrow.compute as pc

        tables = dataset.select_columns(list(form)).with_format("arrow").iter(batch_size=BLOCK)
        try:
            found = [[pc.list_value_length(table.column(name)).to_numpy() for name in form] for table in tables]
        except pa.ArrowException as error:
            raise InvalidPacking(f"columns {form}: wanted a list of tokens per pair; {error}") from error
        sizes = np.concatenate([np.stack(part, axis=1) for part in found])
        if np.isnan(sizes).any():
            index = int(np.isnan(sizes).any(axis=1).argmax())
            raise InvalidPacking(f"pair {index}: found no value in one of {form}; leave such pairs out")
        return sizes.astype(np.int64)
    examples = (dataset[index] for index in range(len(dataset)))
    return np.array([[len(example[name]) for name in form] for example in examples], np.int64)


def _sequences(dataset: Any, index: int, collator: Callable[[list[Any]], Any]) -> list[np.ndarray]:
    """The tokens of the sequences that a collator makes of this pair alone; none where that cannot be told."""
    try:
        batch = collator([dict(dataset[index])])
    except Exception as error:
        raise InvalidPacking(
            f"pair {index}: {_name(collator)} makes no batch of it ({type(error).__name__}: {error}). Pass that of a "
            f"trainer of pairs, trainer.data_collator"
        ) from error
    found: list[np.ndarray] = []
    for which in ("", "chosen_", "rejected_"):
        ids, mask = f"{which}input_ids", f"{which}attention_mask"
        if isinstance(batch, Mapping) and ids in batch and mask in batch:
            rows = zip(to_numpy(batch[ids]), to_numpy(batch[mask]), strict=True)
            found += [np.asarray(row)[np.asarray(real).astype(bool)] for row, real in rows]
    return found


def _name(collator: Any) -> str:
    return getattr(collator, "__name__", type(collator).__name__)
