"""Batches of documents that share rows, for map-style data sets: seeded, per epoch and rank,
resumable."""

from __future__ import annotations

import hashlib
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

import numpy as np

from autopack.errors import InvalidPacking
from autopack.inspection.callers import callers
from autopack.packing.checks import check_ints, nothing_left, other_data, read
from autopack.packing.plans import Strategy, plan, read_groups
from autopack.packing.strategies import CostModel, permutation

logger = logging.getLogger(__name__)
_ACCELERATE = "accelerate.data_loader"
"""Module whose running methods ask a prepared sampler for batches."""


class PackedBatchSampler:
    """Batch sampler over a map-style data set: a batch is the documents of one row or several.

    Use it as `batch_sampler` of a `DataLoader`, with `PackingCollator()` as `collate_fn` to make
    the batch one row, or `PackingCollator(max_length=...)` with the same `max_length` to make it
    rows of that many tokens, at most as many as `rows_per_batch`.

    Every epoch has every document once, over all ranks together, and the same number of batches on
    every rank: some rows are split between documents so that the last step is complete. Only if
    there are too few documents for that does the last step repeat rows, as `DistributedSampler`
    does; `repeated` says how many documents, and a warning is logged. The same arguments and the
    same epoch give the same batches on every machine, and all epochs have the same number of them,
    on which trainers count.

    Ranks come from `num_replicas` and `rank`, else from torch.distributed if it is initialised,
    else from the `WORLD_SIZE` and `RANK` that launchers set, else there is one. *accelerate* cuts
    up prepared loaders itself, by a `BatchSamplerShard` that keeps every n-th batch. The sampler
    looks up the stack for one when it is iterated, and then yields the batches of all ranks, step
    by step, so that each process keeps its own. Its `dispatch_batches` is refused; Lightning needs
    `use_distributed_sampler=False`.

    Args:
        lengths: tokens of each document, as in `autopack.packing.plan`; or of each pair of
            preference data, whose batches are for the collator of their trainer.
        max_length: the most tokens of a row.
        rows_per_batch: rows of a batch; the last of an epoch may have fewer.
        strategy: as in `autopack.packing.plan`. `"sequential"` keeps its order in every epoch;
            `"best_fit"` is drawn anew.
        seed: with the epoch, determines all that is random.
        overflow: `"error"` refuses documents longer than a row; `"drop"` leaves them out;
            `"truncate"` yields them for a collator that cuts off their end
            (`PackingCollator(max_length=..., overflow="truncate")`).
        max_documents: the most documents of a row.
        cost: the cost of a row, so that all ranks have like work in every step. `None` leaves steps
            as the strategy made them. `"auto"` is `CostModel()` for `"best_fit"`, else `None`.
        num_replicas, rank: data-parallel processes, and the number of this one; given together.
        groups, prefixes: as in `autopack.packing.plan`. Rows may have more tokens than
            `max_length`, since the model computes no more: collate a batch into one row, by a
            collator without a `max_length`.

    Attributes:
        epoch, plan: the number of the epoch, and its `Plan`; rows `s * num_replicas` on are of one
            step if `rows_per_batch` is 1.
        repeated: documents that are there twice in this epoch.

    Raises `InvalidPacking` for lengths that cannot be packed, and if accelerate splits batches in a
    way that the sampler does not know; `ValueError` for options that are out of range, unknown, or
    contradict each other.
    """

    def __init__(
        self,
        lengths: Any,
        max_length: int,
        *,
        rows_per_batch: int = 1,
        strategy: Strategy = "best_fit",
        seed: int = 0,
        overflow: Literal["error", "truncate", "drop"] = "error",
        max_documents: int | None = None,
        cost: CostModel | Literal["auto"] | None = "auto",
        num_replicas: int | None = None,
        rank: int | None = None,
        groups: Any = None,
        prefixes: Any = None,
    ) -> None:
        if overflow == "split":
            raise ValueError(
                f"{overflow=} cuts documents, which indices cannot say: use autopack.pack"
            )
        check_ints(rows_per_batch=rows_per_batch)
        if cost == "auto":
            cost = None if strategy == "sequential" else CostModel()
        options: dict[str, Any] = {"strategy": strategy, "overflow": overflow, "cost": cost}
        plan([1], max_length, seed=seed, max_documents=max_documents, **options)  # checks them
        self._options = options | {"max_documents": max_documents and int(max_documents)}
        self.max_length, self.rows_per_batch = int(max_length), int(rows_per_batch)
        self.num_replicas, self.rank = _ranks(num_replicas, rank)
        self._lengths, self._seed = read(lengths), int(seed)
        self._grouped = read_groups(groups, prefixes, self._lengths)
        self._draw(0)
        counts = self.plan.counts
        if counts.dropped:
            message = "%d documents of %d are longer than %d tokens and are left out"
            logger.warning(message, counts.dropped, counts.documents, max_length)

    def _draw(self, epoch: int) -> None:
        """Set the plan and the rounds (a row for each rank) of an epoch, and start at step 0."""
        is_ordered, ranks = self._options["strategy"] == "sequential", self.num_replicas
        drawn = np.random.SeedSequence([self._seed, 0 if is_ordered else epoch])
        seed, of_steps = drawn.generate_state(2, np.uint64).tolist()
        self.epoch, self._start, self._step = epoch, 0, 0
        options = self._options | self._grouped
        self.plan = plan(self._lengths, self.max_length, seed=seed, ranks=ranks, **options)
        if not len(self.plan):
            raise nothing_left(self.plan.counts)
        rows = np.arange(len(self.plan))
        whole, over = divmod(len(rows), ranks)
        rounds = rows[: whole * ranks].reshape(-1, ranks)
        if not is_ordered:
            rounds = rounds[permutation(whole, of_steps)]
        if over:
            rounds = np.concatenate([rounds, np.resize(np.roll(rows, over), (1, ranks))])
        self._rounds, documents = rounds, len(self.plan.documents)
        self.repeated = int(np.diff(self.plan.bounds)[rounds].sum()) - documents
        if self.repeated:
            message = (
                "%d documents make too few rows for %d ranks: the last step repeats %d documents"
            )
            logger.warning(message, len(self._lengths), ranks, self.repeated)
        self._steps = -(-len(self._rounds) // self.rows_per_batch)

    def __len__(self) -> int:
        """Return the number of batches of an epoch: of this rank, or of all if accelerate asks."""
        return self._steps * len(self._asked_ranks())

    def __iter__(self) -> Iterator[list[int]]:
        # No generator: the caller is on the stack now, and may no longer be when the first batch is
        # asked for.
        ranks = self._asked_ranks()
        # A loader of accelerate tells its own samplers of its epoch, but not those behind two of
        # its wrappers, as a resumed trainer has.
        for asking in callers(_ACCELERATE):
            iteration = getattr(asking, "iteration", None)
            wrapper = getattr(asking, "batch_sampler", None)
            if isinstance(iteration, int) and self._is_wrapped_by(wrapper):
                self.set_epoch(iteration)
        self._step, self._start = self._start, 0
        return self._from_step(self._step, ranks)

    def _from_step(self, start: int, ranks: Sequence[int]) -> Iterator[list[int]]:
        """Yield lists of document numbers, a batch each, for these ranks from step `start` on.

        Counts the steps in `_step`. A rank's rows are one of each round; without costs, consecutive
        ones.
        """
        for step in range(start, self._steps):
            rows = self._rounds[step * self.rows_per_batch : (step + 1) * self.rows_per_batch].T
            if self._options["cost"] is None:
                rows = rows.T.reshape(self.num_replicas, -1)
            self._step = step + 1
            for rank in ranks:
                yield self.plan.select(rows[rank]).documents.tolist()

    def __repr__(self) -> str:
        return (
            f"PackedBatchSampler({self._options['strategy']}, epoch {self.epoch}: {self._steps:,} "
            f"steps of {self.rows_per_batch} x {self.max_length:,} tokens on each of "
            f"{self.num_replicas} ranks, this is rank {self.rank}; fill {self.plan.fill:.4f})"
        )

    @property
    def sampler(self) -> PackedBatchSampler:
        """This sampler itself: accelerate calls `set_epoch` of a batch sampler's `sampler`."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Draw the batches of another epoch, to start at its beginning.

        The present epoch stays at its step, so that a resumed one goes on.
        """
        check_ints(epoch=epoch)
        if epoch != self.epoch:
            if self._start:
                message = (
                    "set_epoch(%d) leaves the loaded state (epoch %d, step %d) before it was used"
                )
                logger.warning(message, epoch, self.epoch, self._start)
            self._draw(int(epoch))

    def state_dict(self, step: int | None = None) -> dict[str, Any]:
        """Return the epoch, step and options for `load_state_dict`: a dict that JSON can hold.

        `step` is the number of batches of this epoch that this rank has trained on. By default it
        is the number handed out, which is more if a loader asks ahead (`num_workers`, accelerate).
        """
        step = self._step if step is None else step
        check_ints(step=step)
        return {"epoch": self.epoch, "step": int(step), "made_of": self._made_of()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state, so that the next iteration yields the rest of its epoch.

        Raises `InvalidPacking` for the state of another sampler.
        """
        try:
            epoch, step, theirs = state["epoch"], state["step"], dict(state["made_of"])
            check_ints(epoch=epoch, step=step)
        except (KeyError, TypeError, ValueError) as error:
            raise other_data(
                f"wanted what PackedBatchSampler.state_dict gave, found {state!r}: {error!r}"
            ) from error
        if theirs != (ours := self._made_of()):
            raise other_data(
                f"the state is of another sampler, of {theirs}; make this one, {ours}, with "
                "the same"
            )
        before = dict(vars(self))
        self.set_epoch(epoch)
        if step > self._steps:
            vars(self).update(before)
            raise other_data(
                f"the state is at step {step} of an epoch of {self._steps} steps; pass one of them"
            )
        self._start = self._step = int(step)

    @cached_property
    def _digest(self) -> str:
        """Hash of the lengths and groups, by which a resumed run notices other data."""
        made = hashlib.blake2b(digest_size=8)
        for name, of_documents in {"lengths": self._lengths, **self._grouped}.items():
            made.update(f"{name} {of_documents.shape}".encode() + of_documents.tobytes())
        return made.hexdigest()

    def _made_of(self) -> dict[str, Any]:
        """Return the options and data hash that a plan depends on, to compare with a state's."""
        cost = self._options["cost"]
        return self._options | {
            "rows": "of 0.3",
            "lengths": self._digest,
            "max_length": self.max_length,
            "rows_per_batch": self.rows_per_batch,
            "seed": self._seed,
            "num_replicas": self.num_replicas,
            "cost": cost and [cost.linear, cost.quadratic],
        }

    def _asked_ranks(self) -> Sequence[int]:
        """Return the ranks whose batches to yield: this one, or all for a `BatchSamplerShard`."""
        accelerate: Any = sys.modules.get(_ACCELERATE)
        for asking in callers(_ACCELERATE):
            if isinstance(asking, accelerate.DataLoaderDispatcher) and self.num_replicas > 1:
                raise InvalidPacking(
                    "accelerate's dispatch_batches=True cuts up batches by rows, which packed rows "
                    "do not survive: pass dispatch_batches=False",
                    code="accelerate-batches",
                )
            if isinstance(asking, accelerate.BatchSamplerShard) and self._is_wrapped_by(asking):
                if asking.num_processes != self.num_replicas:
                    raise InvalidPacking(
                        f"accelerate shares out batches to {asking.num_processes} processes, and "
                        f"this sampler is made for {self.num_replicas}: pass "
                        f"num_replicas={asking.num_processes} and the rank, or neither",
                        code="accelerate-batches",
                    )
                return range(self.num_replicas)
        return (self.rank,)

    def _is_wrapped_by(self, sampler: Any) -> bool:
        """Return True if a batch sampler is this one, or wraps it at any depth."""
        while sampler is not None and sampler is not self:
            sampler = getattr(sampler, "batch_sampler", None)
        return sampler is self


def _ranks(num_replicas: int | None, rank: int | None) -> tuple[int, int]:
    """Return (number of ranks, this rank): as given, else of torch.distributed or environment."""
    if (num_replicas is None) != (rank is None):
        raise ValueError(f"num_replicas={num_replicas!r} and rank={rank!r}: wanted both or neither")
    if num_replicas is None or rank is None:
        distributed: Any = sys.modules.get("torch.distributed")
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            return distributed.get_world_size(), distributed.get_rank()
        try:
            num_replicas = int(os.environ.get("WORLD_SIZE", 1))
            rank = int(os.environ.get("RANK", -1))
        except ValueError as error:
            raise ValueError(
                f"WORLD_SIZE and RANK of the environment: wanted ints; {error}"
            ) from error
        if rank < 0 and num_replicas > 1:
            raise ValueError(
                f"WORLD_SIZE={num_replicas} is set and RANK is not: pass num_replicas and rank"
            )
        rank = max(rank, 0)
    check_ints(num_replicas=num_replicas, rank=rank)
    if rank >= num_replicas:
        raise ValueError(f"rank={rank}: wanted an int below num_replicas={num_replicas}")
    return int(num_replicas), int(rank)
