"""Replace a trainer's optimizer step, and run its documents in micro-batches of at most so many
tokens.

`Trainer.get_batch_samples` (transformers 4.46 and later) has all batches of a step on every rank
before any of them runs. They go on through the trainer's loop, which counts them as ever; the last
of them runs the whole step. Losses are added up by one of two rules; steps 1, 2, 4, 8 and so on try
whether it holds before anything of them is learned.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from autopack import registry
from autopack.auditing.running import preserved
from autopack.errors import AutopackError, UnsupportedModel
from autopack.inspection.positions import rotates
from autopack.integrations.accelerate import in_their_own_precision, says_when_to_step
from autopack.integrations.trainers import TRANSFORMERS, adapter_of
from autopack.packing.batches import Columns, Example, Per, cut, join, length_of, tokens_of
from autopack.packing.checks import check_ints
from autopack.packing.strategies import CostModel
from autopack.runtime.model import EnabledModel
from autopack.steps.step import AUTO, Memory, MicroBatch, Ranks, Step, step_of

logger = logging.getLogger(__name__)
_SEAMS = ("get_batch_samples", "training_step", "compute_loss")
_TOLERANCE, _COARSE = 1e-4, 1e-2
"""Relative differences of losses that may be rounding, in float32 and of weights in half precision.
"""
_MEASURED = 2
"""Number of the step whose memory says what fits: the first one makes the optimizer's states."""
_TRIED = 4
"""Number of documents whose losses are tried together and alone, in steps 1, 2, 4, 8 and so on."""
_COUNTS = ("_metrics", "_total_train_tokens")
"""Attributes in which trainers of TRL count what their losses see."""


class StepCutter:
    """Hooks on one trainer's methods that cut each optimizer step into other micro-batches.

    `steps`, `micro_batches` and `slowest` say how; `slowest` is the mean of the slowest rank's cost
    over the mean of all. A `lenient` one leaves steps that it cannot cut as they are, with a
    warning.
    """

    def __init__(self, trainer: Any, enabled: EnabledModel, max_tokens: Any, lenient: bool):
        """Replace the trainer's methods; raise `UnsupportedModel` if its steps cannot be cut."""
        self._memory = Memory(trainer.args.device) if max_tokens == AUTO else None
        if self._memory is None:
            check_ints(max_tokens=max_tokens)
        self.asked = self.max_tokens = max_tokens
        self.steps, self.micro_batches, self.tokens, self.slowest = 0, 0, 0, 0.0
        self._trainer, self._enabled = trainer, enabled
        self._lenient = lenient
        self._adapter = adapter_of(trainer) or TRANSFORMERS
        self._refuse_kind()
        self._batches: Sequence[Any] = ()
        self._adds_up = False
        self._per_batch: int | None = None
        self._share = 1.0
        self._before = {name: vars(trainer)[name] for name in _SEAMS if name in vars(trainer)}
        self._original = {name: getattr(trainer, name) for name in _SEAMS}
        vars(trainer).update({name: getattr(self, f"_{name}") for name in _SEAMS})

    def remove(self) -> None:
        """Put the trainer's own methods back, where no other code has replaced them since."""
        own = vars(self._trainer)
        for name in _SEAMS:
            if own.get(name) == getattr(self, f"_{name}"):
                del own[name]
                own.update({name: self._before[name]} if name in self._before else {})

    def __repr__(self) -> str:
        if not self.steps:
            return f"max_tokens={self.asked}, no step so far"
        found = " (auto)" if self.asked == AUTO else ""
        return (
            f"max_tokens={self.max_tokens}{found}: {self.micro_batches / self.steps:.1f} "
            f"micro-batches of {self.tokens / self.micro_batches:.0f} tokens a step, slowest rank "
            f"{self.slowest:.3f} x the mean"
        )

    # --- What stands at the trainer

    def _get_batch_samples(self, *args: Any, **kwargs: Any) -> tuple[list[Any], Any]:
        """Return the batches of a step as the trainer does; keep them for `_training_step`."""
        batches, items = self._original["get_batch_samples"](*args, **kwargs)
        self._batches = batches
        return batches, items

    def _training_step(
        self, model: Any, inputs: Any, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """Train on a step's micro-batches in the call for its last batch; return the loss, or 0."""
        if not any(inputs is each for each in self._batches):
            return self._original["training_step"](model, inputs, num_items_in_batch)
        total = torch.zeros((), device=self._trainer.args.device)
        if inputs is not self._batches[-1]:
            return total
        batches, self._batches = self._batches, ()
        try:
            cut_anew = self._step(model, batches, num_items_in_batch)
        except AutopackError as error:
            if not self._lenient:
                raise
            logger.warning("autopack leaves the steps of this run as they are: %s", error)
            self.remove()
            self._per_batch = None
            cut_anew = Step([MicroBatch(batch, 1, 0) for batch in batches], 1.0)
        accelerator = self._trainer.accelerator
        state = accelerator.gradient_state
        if self._memory is not None:
            self._memory.begin()
        always = state.plugin_kwargs.get("sync_each_batch", False)
        try:
            for number, each in enumerate(cut_anew.micro_batches, 1):
                last = number == len(cut_anew.micro_batches)
                with contextlib.nullcontext() if last or always else accelerator.no_sync(model):
                    self._share = self._factor_of(each)
                    state._set_sync_gradients(last)  # by which DeepSpeed is told to step
                    total = total + self._original["training_step"](
                        model, each.batch, num_items_in_batch
                    )
        except BaseException:  # half of a step counts for nothing
            model.zero_grad()
            raise
        finally:
            self._share = 1.0
        self.steps += 1
        self.micro_batches += len(cut_anew.micro_batches)
        self.tokens += sum(each.tokens for each in cut_anew.micro_batches)
        self.slowest += (cut_anew.slowest - self.slowest) / self.steps
        if self._memory is not None and self.steps == _MEASURED:
            longest = max(each.tokens for each in cut_anew.micro_batches)
            self.max_tokens = min(Ranks().gathered(self._memory.tokens_that_fit(longest)))
            logger.info(
                "autopack cuts steps by max_tokens=%s, which fits into memory", self.max_tokens
            )
        return total

    def _compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """Return the trainer's loss of a micro-batch, weighted by its share of the step."""
        found = self._original["compute_loss"](*args, **kwargs)
        if self._share == 1.0:
            return found
        if isinstance(found, tuple):
            return found[0] * self._share, *found[1:]
        return found * self._share

    # --- The step

    def _step(self, model: Any, batches: Sequence[Any], items: Any) -> Step:
        """Return this rank's micro-batches of a step, made of the batches of all ranks.

        Raises `AutopackError` on all ranks if one cannot cut its batches.
        """
        trainer, config, ranks = self._trainer, self._trainer.model.config, Ranks()
        problem: AutopackError | None = None
        columns, found = Columns({}, 1, False, {}), list[list[Example]]()
        try:
            columns, found = cut(
                [trainer._prepare_inputs(batch) for batch in batches],
                config,
                self._adapter.rows_each,
                self._enabled.traits.first_position,
            )
            numbered = "position_ids" in columns.per
            if columns.on_the_left and not (numbered or _ignores_left_padding(self._enabled)):
                raise _not_cut(
                    trainer,
                    "its batches are padded on the left, which moves its model's positions. Pad on "
                    "the right",
                )
        except AutopackError as error:
            problem = error
        of_ranks = ranks.gathered((problem and problem.message, {len(each) for each in found}))
        if problem is not None:
            raise problem
        elsewhere = next((text for text, _ in of_ranks if text is not None), None)
        if elsewhere is not None:
            raise _not_cut(trainer, f"another rank says: {elsewhere}")
        examples = [example for each in found for example in each]
        if (self.steps + 1).bit_count() == 1:  # a loss may begin to compare documents later on
            self._adds_up = self._losses_add_up(model, columns, examples, items, ranks)
        if self._memory is not None and self.steps < _MEASURED:
            # As many as the columns of a batch as it came, which fits.
            self.max_tokens = max(
                ranks.gathered(max(math.prod(tokens_of(batch).shape[:2]) for batch in batches))
            )
        sizes = set().union(*(each for _, each in of_ranks))
        self._per_batch = sizes.pop() if len(sizes) == 1 else None
        if self._per_batch is None and not self._adds_up:
            # Of batches of several sizes, an epoch's last ones, documents have several weights.
            tokens = [sum(length_of(example, columns) for example in each) for each in found]
            parts = zip(found, tokens, strict=True)
            return Step(
                [MicroBatch(join(each, columns), len(each), count) for each, count in parts], 1.0
            )
        moves = not self._adds_up or bool(
            getattr(trainer.args, "average_tokens_across_devices", False)
        )
        return step_of(
            examples, columns, self.max_tokens, CostModel.for_model(config), ranks, moves
        )

    def _factor_of(self, part: MicroBatch) -> float:
        """Return the factor of a micro-batch: for mean losses its share of a batch, else 1 or 0."""
        if self._adds_up:
            return float(part.documents > 0)
        return 1.0 if self._per_batch is None else part.documents / self._per_batch

    def _losses_add_up(
        self, model: Any, columns: Columns, examples: Sequence[Example], items: Any, ranks: Ranks
    ) -> bool:
        """Return True if the losses of some documents add up, False if the loss is their mean.

        Raises `UnsupportedModel` where neither holds on every rank.
        """
        chosen = _varied_documents(examples, columns, self.steps)
        model.train()
        # which sends buffers around, and here a rank may raise alone
        if isinstance(model, DistributedDataParallel):
            model = model.module
        losses = []
        with self._unnoticed() as renew, torch.no_grad():
            try:
                for part in (*([each] for each in chosen), chosen):
                    renew()
                    with self._trainer.compute_loss_context_manager():
                        loss = self._original["compute_loss"](
                            model, join(part, columns), num_items_in_batch=items
                        )
                    losses.append(float(loss))
            except Exception as error:  # of a loss that wants another number of documents
                # ranks that gather parameters wait elsewhere, and end with this one
                if not self._enabled.groups:
                    ranks.gathered((False, False))
                said = (
                    f"its loss raises {type(error).__name__} for documents in other batches than "
                    "its own"
                )
                raise _not_cut(self._trainer, f"{said}: {error}") from error
        *alone, together = losses
        is_half = any(each.dtype.itemsize < 4 for each in model.parameters())
        tolerance = _COARSE if is_half else _TOLERANCE
        # Of losses of tokens a mean over documents cannot be told from one over their targets.
        of_documents = (
            columns.per.get("labels") in (Per.ROW, Per.EXAMPLE) or self._adapter.rows_each > 1
        )
        is_close = partial(math.isclose, together, rel_tol=tolerance, abs_tol=1e-3 * tolerance)
        sums = items is not None and is_close(sum(alone))
        means = of_documents and is_close(sum(alone) / len(alone))
        found = ranks.gathered((sums, means))
        if all(sums for sums, _ in found):
            return True
        if all(means for _, means in found):
            return False
        raise _not_cut(
            self._trainer,
            "its loss is neither a sum over documents nor, of results of documents, their mean: "
            f"some give {together:.6g} together, and {', '.join(f'{each:.6g}' for each in alone)} "
            "alone, so it matters which documents share a batch",
        )

    @contextlib.contextmanager
    def _unnoticed(self) -> Iterator[Callable[[], None]]:
        """Leave model and trainer as found after a block; yield a function that renews buffers."""
        kept = {
            name: copy.deepcopy(value)
            for name, value in vars(self._trainer).items()
            if name in _COUNTS
        }
        base = self._enabled.anatomy.entries[0]
        try:
            with (
                preserved(base, self._enabled) as renew,
                in_their_own_precision(self._trainer.model.modules()),
            ):
                yield renew
        finally:
            vars(self._trainer).update(kept)

    # --- Refusals

    def _refuse_kind(self) -> None:
        """Raise `UnsupportedModel` for a trainer whose steps cannot be cut anew."""
        trainer, args, accelerator = self._trainer, self._trainer.args, self._trainer.accelerator
        own = type(trainer)._prepare_inputs.__module__
        parallel = getattr(accelerator, "parallelism_config", None)
        why = self._adapter.why_not_cut(trainer)
        if not hasattr(trainer, "get_batch_samples"):
            why = (
                "this release collects no batches of a step beforehand; transformers 4.46 and "
                "later do"
            )
        elif own.partition(".")[0] != "transformers":
            why = f"it makes its batches itself ({own})"
        elif getattr(trainer, "is_deepspeed_enabled", False) and not says_when_to_step():
            why = (
                "DeepSpeed counts the micro-batches of a step itself; update accelerate to 1.8 or "
                "later"
            )
        elif args.n_gpu > 1:
            why = (
                "torch.nn.DataParallel divides batches by rows; start one process per device with "
                "torchrun"
            )
        elif parallel is not None and parallel.total_size != parallel.data_parallel_size:
            why = "ranks of it share rows or layers"
        elif self._enabled.anatomy.has_row_dependent_rotary:
            why = "rotary frequencies of its model depend on the longest row of a batch"
        if why is not None:
            raise _not_cut(trainer, why)


def cut_steps(
    trainer: Any, enabled: EnabledModel, max_tokens: int | str, lenient: bool = False
) -> StepCutter | None:
    """Put a `StepCutter` on a trainer and return it; None if the same is there; raise if another.

    Raises `ValueError` for another number.
    """
    found = cutter_of(trainer)
    if found is None:
        return StepCutter(trainer, enabled, max_tokens, lenient)
    if found.asked != max_tokens:
        raise ValueError(
            f"the trainer is enabled with max_tokens={found.asked!r}; call "
            f"autopack.disable(trainer) before enabling it with max_tokens={max_tokens!r}"
        )
    return None


def cutter_of(trainer: Any) -> StepCutter | None:
    """Return the `StepCutter` on a trainer; None if it has none."""
    found = getattr(vars(trainer).get("training_step"), "__self__", None)
    return found if isinstance(found, StepCutter) else None


def _ignores_left_padding(enabled: EnabledModel) -> bool:
    """Return True if left padding moves no positions, or only differences between them count."""
    traits, model = enabled.traits, enabled.anatomy.entries[0]
    if traits.padding_matters:
        return False
    numbering = registry.numbering_of(model.config)
    return numbering.along_mask or numbering.after_pad_token or numbering.relative or rotates(model)


def _varied_documents(examples: Sequence[Example], columns: Columns, turn: int) -> list[Example]:
    """Return `_TRIED` documents that differ in row labels and lengths, others in each `turn`."""
    by_length = sorted(examples, key=lambda each: length_of(each, columns))
    of_rows = [name for name, per in columns.per.items() if per in (Per.ROW, Per.EXAMPLE)]
    by_labels = {str([each[0][name] for name in of_rows]): each for each in by_length}
    ordered = [*by_labels.values(), *by_length]
    return [ordered[(turn + number) % len(ordered)] for number in range(_TRIED)]


def _not_cut(trainer: Any, why: str) -> UnsupportedModel:
    """Return the error for a trainer whose optimizer steps cannot be cut anew."""
    return UnsupportedModel(
        f"max_tokens cuts the optimizer steps of {type(trainer).__name__} anew, and cannot cut "
        f"these: {why}. Leave out max_tokens.",
        code="step-not-cut",
    )
