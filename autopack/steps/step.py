"""One optimizer step as micro-batches of at most so many tokens, dealt to the ranks by cost."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from autopack.errors import InvalidPacking
from autopack.packing.batches import Batch, Columns, Example, cut, join, length_of
from autopack.packing.checks import check_ints
from autopack.packing.strategies import CostModel
from autopack.steps.deal import deal

AUTO = "auto"
"""Value of `max_tokens` that asks for what fits."""
SHARE = 0.8
"""Share of the memory that is planned for: rows of other documents take a little more, and
allocators have gaps."""


class MicroBatch(NamedTuple):
    """A part of a step for one rank, with its number of documents; 0 marks an idle one."""

    batch: dict[str, Any]
    documents: int
    tokens: int


class Step(NamedTuple):
    """The micro-batches of one rank in one optimizer step.

    `slowest` is the cost of the rank with the most to do, over the mean of all ranks.
    """

    micro_batches: list[MicroBatch]
    slowest: float


class Ranks:
    """The processes that share a step: a group, all of them, or this one alone."""

    def __init__(self, group: Any = None):
        self.group = group
        running = dist.is_available() and dist.is_initialized()
        self.count = dist.get_world_size(group) if running else 1
        self.own = dist.get_rank(group) if running else 0

    def gathered(self, value: Any) -> list[Any]:
        """Return the `value` that each rank passes, by rank; every rank has to call it."""
        if self.count == 1:
            return [value]
        found: list[Any] = [None] * self.count
        dist.all_gather_object(found, value, group=self.group)
        return found


class Memory:
    """The memory that torch's allocator hands out on one device.

    Raises `ValueError` for a device whose memory torch does not count, as a CPU.
    """

    def __init__(self, device: torch.device):
        self._device, self._counts = device, torch.get_device_module(device)
        if not hasattr(self._counts, "max_memory_allocated"):
            raise ValueError(
                "max_tokens='auto' measures the memory of a device, which torch does not count on "
                f"{device.type}. Give a number of tokens."
            )

    def begin(self) -> None:
        """Forget the peak so far, and note how many bytes are held now."""
        self._counts.reset_peak_memory_stats(self._device)
        self._held = self._counts.memory_allocated(self._device)

    def tokens_that_fit(self, tokens: int) -> int:
        """Return the number of tokens, at least 1, that fit into `SHARE` of this process's memory.

        `tokens` of them took what was held at most since `begin`. Gradients count as bytes of
        tokens, so the number is rather too small than too large.
        """
        free, _ = self._counts.mem_get_info(self._device)
        total = free + self._counts.memory_reserved(self._device)
        taken = max(self._counts.max_memory_allocated(self._device) - self._held, 1)
        return max(1, int((SHARE * total - self._held) * tokens / taken))


def step_of(
    examples: Sequence[Example],
    columns: Columns,
    max_tokens: int,
    cost: CostModel,
    ranks: Ranks,
    moves: bool = True,
) -> Step:
    """Return this rank's micro-batches of a step, dealt from the documents of all ranks.

    Ranks send their lengths, and the documents that another one runs; `moves` says whether any may
    be sent. All have the same number of micro-batches.
    """
    lengths = [length_of(example, columns) for example in examples]
    of_ranks = ranks.gathered((lengths, {name: per.name for name, per in columns.per.items()}))
    if any(per != of_ranks[0][1] for _, per in of_ranks):
        raise InvalidPacking(
            "the ranks of a step have batches of other columns than one another, so their "
            "documents cannot be dealt anew. Have the collator return the same columns on every "
            "rank, or leave out max_tokens.",
            code="batch-not-cut",
        )
    every = [length for found, _ in of_ranks for length in found]
    homes = [rank for rank, (found, _) in enumerate(of_ranks) for _ in found]
    dealt = deal(every, homes, ranks.count, max_tokens, cost, moves)
    first = homes.index(ranks.own)
    held = dict(enumerate(examples, first))
    if moves and ranks.count > 1:
        held |= _exchanged(held, dealt, homes, ranks)
    # What only keeps step with others is the shortest document at hand.
    least = min(examples, key=lambda example: length_of(example, columns))
    micro_batches = [
        MicroBatch(
            join([held[number] for number in numbers] or [least], columns),
            len(numbers),
            sum(every[number] for number in numbers),
        )
        for numbers in dealt[ranks.own]
    ]
    costs = [float(cost([every[number] for row in rows for number in row]).sum()) for rows in dealt]
    return Step(micro_batches, max(costs) * len(costs) / sum(costs))


def _exchanged(
    held: dict[int, Example], dealt: list[list[list[int]]], homes: list[int], ranks: Ranks
) -> dict[int, Example]:
    """Exchange documents with other ranks; return the ones that this rank gets, by number."""
    away = {
        n: rank for rank, rows in enumerate(dealt) for row in rows for n in row if homes[n] != rank
    }
    values = next(iter(held.values()))[0].values()
    device = next(value.device for value in values if isinstance(value, torch.Tensor))
    # Pickled here, so that a rank unpacks nothing that is not its own.
    sent = {n: pickle.dumps(_copied(held[n], "cpu")) for n in away if n in held}
    return {
        number: _copied(pickle.loads(packed), device)
        for part in ranks.gathered(sent)
        for number, packed in part.items()
        if away[number] == ranks.own
    }


def _copied(example: Example, device: Any) -> Example:
    """Return an example with copies of its tensors on a device, which are no views of a batch."""
    return tuple(
        {n: v.to(device, copy=True) if isinstance(v, torch.Tensor) else v for n, v in row.items()}
        for row in example
    )


def micro_batches(
    batches: Iterable[Batch], max_tokens: int, *, model: Any = None, group: Any = None
) -> Iterator[dict[str, Any]]:
    """Yield a step's documents anew, in micro-batches of at most `max_tokens` real tokens.

    Divide the summed loss of each by the number of targets in all `batches` of all ranks, as
    `num_items_in_batch` does, and the gradients are the same as of `batches` themselves. A document
    of more tokens than `max_tokens` is alone in its micro-batch.

    Args:
        batches: The batches of one step on this rank, padded (R, C) with an `attention_mask`, or
            packed.
        max_tokens: The most real tokens of a micro-batch.
        model: The model that is trained, whose configuration tells the token of padding and the
            cost of long documents.
        group: The process group that shares the step. Documents move between its ranks, each of
            which gets equally many micro-batches. A rank without a document for one gets labels
            that are all ignored.

    Raises:
        InvalidPacking: Nothing says what in a batch belongs to which document.
    """
    config = getattr(model, "config", None)
    check_ints(max_tokens=max_tokens)
    columns, found = cut(list(batches), config)
    cost = CostModel() if config is None else CostModel.for_model(config)
    examples = [example for each in found for example in each]
    for each in step_of(examples, columns, max_tokens, cost, Ranks(group)).micro_batches:
        if not each.documents and "labels" in each.batch:
            each.batch["labels"] = torch.full_like(each.batch["labels"], -100)
        yield each.batch
