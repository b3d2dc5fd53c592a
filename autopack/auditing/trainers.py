"""Audit of a trainer: its own data, through its columns, collator, sampler, model and loss.

Measures are rows of a table. *Given*: the documents of the data set's examples. *Handed*: what the
model gets has to be these documents, each once in an epoch, after resuming too, with their own
targets. *Loss*: loss and gradients of a step have to equal the results of its documents one by one
in stock's model, weighed by the tokens that count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import Subset

from autopack.auditing import handed as words
from autopack.auditing.asking import argument_names, first_label_counts
from autopack.auditing.compare import bounds_of, gradient_error, relative_error
from autopack.auditing.handed import Content
from autopack.auditing.report import Measured, TrainerReport
from autopack.auditing.running import dtype_of, stock_again, trained, trainer_left_as_found
from autopack.errors import UnsupportedModel, in_a_line
from autopack.integrations.boundaries import what_is_lost
from autopack.integrations.trainers import TRANSFORMERS, adapter_of
from autopack.integrations.wrappers import unwrap
from autopack.layout import IGNORED_LABEL
from autopack.packing.batches import Columns, Example, Per, cut, join
from autopack.registry import first_position

MOST = 256
"""Examples of a data set that are taken through a trainer."""
_OTHERWISE = (
    "not made of what its documents get alone: those of a batch change one another, in the model "
    "or by an added loss, or they are weighed otherwise than by the tokens that count"
)


def audit_trainer(trainer: Any) -> TrainerReport:
    """Return a report on a trainer's data, labels and loss; restore the trainer and its model."""
    base, kind = unwrap(trainer.model), type(trainer).__name__
    ranks = max(trainer.args.world_size, trainer.args.n_gpu)
    if ranks > 1:
        raise _not_auditable(
            f"one process and device, found {ranks}; give it CUDA_VISIBLE_DEVICES=0"
        )
    dtype = dtype_of(base)
    results, gradients, losses = bounds_of(dtype)
    with trainer_left_as_found(trainer, base) as enabled:
        report = TrainerReport(
            f"{kind} of {type(base).__name__}",
            str(getattr(base.config, "_attn_implementation", "")),
            enabled is not None,
            str(dtype).removeprefix("torch."),
            (),
            results,
            max(gradients, 1e-5),  # losses go through float32 in any model
            min(losses, max(results, 1e-5)),
            [],
        )
        report.rows.extend(TrainerAudit(trainer, base, enabled, report).measured())
    return report


class HandedBatch(NamedTuple):
    """Batch as it comes to the model, with its examples and their documents.

    `counted` are true at each document's labels that count, or, where labels are none of tokens
    (`of_tokens`), one for each document.
    """

    batch: Any
    columns: Columns
    examples: list[Example]
    documents: list[Content]
    counted: list[Tensor]
    of_tokens: bool


Batches = list[HandedBatch]
Answer = tuple[str, list[str]]
"""Findings of a measure, in words, and complaints."""


class TrainerAudit:
    """Audit of one trainer; `measured` yields the rows of its report."""

    def __init__(self, trainer: Any, model: Any, enabled: Any, report: TrainerReport):
        """Ask if the loss shifts labels, and shorten the data sets that the trainer holds."""
        self.trainer, self.model, self.enabled, self.report = trainer, model, enabled, report
        self.adapter = adapter_of(trainer) or TRANSFORMERS
        self.is_pair = bool(getattr(model.config, "is_encoder_decoder", False))
        self.shift = int(not self.is_pair and first_label_counts(model) is False)
        trainer.train_dataset = _first_few(trainer.train_dataset)
        trainer.eval_dataset = _first_few(trainer.eval_dataset)

    def measured(self) -> Iterator[Measured]:
        """Yield one row per measure; an error in the user's code leaves it not measured."""
        measures: list[tuple[str, str, Callable[[], Answer]]] = [
            ("given", "documents", self._given),
            ("handed", "columns", self._columns),
            ("handed", "documents", lambda: self._documents(self.given, self.epochs[0])),
            ("handed", "labels", lambda: self._labels(self.given, self.epochs[0])),
            ("handed", "after resuming", self._resumed),
            ("loss", "of a step", self._step),
        ]
        if self.trainer.eval_dataset is not None:
            measures += [
                ("evaluation", "documents", lambda: self._documents(*self.evaluation)),
                ("evaluation", "labels", lambda: self._labels(*self.evaluation)),
                ("evaluation", "loss of a batch", self._evaluated),
            ]
        for measure, part, run in measures:
            try:
                found, says = run()
                yield Measured(measure, part, found, bool(says), says)
            except Exception as error:  # of a user's data set, collator, model or loss
                yield Measured(measure, part, "-", None, [in_a_line(error)])

    # --- Data

    @cached_property
    def given(self) -> list[Content]:
        """Documents of the training data's examples."""
        return self._given_by(self.trainer.train_dataset)

    @cached_property
    def epochs(self) -> list[Batches]:
        """Batches of the first two epochs of training."""
        loader = self._loader()
        return [self._batches(loader, epoch) for epoch in (0, 1)]

    @cached_property
    def evaluation(self) -> tuple[list[Content], Batches]:
        """Documents of the evaluation data, and the batches made of them."""
        batches = self._batches(self.trainer.get_eval_dataloader())
        return self._given_by(self.trainer.eval_dataset), batches

    def _given_by(self, dataset: Any) -> list[Content]:
        """Return the documents of a data set's examples."""
        rows = islice(iter(dataset), len(dataset) if hasattr(dataset, "__len__") else MOST)
        form = self.is_pair, self.adapter.rows_each
        return [each for row in rows for each in words.given(row, *form)]

    def _loader(self) -> Any:
        """Seed as a process that begins; return a new loader of training batches."""
        from transformers import set_seed

        set_seed(self.trainer.args.seed)  # as a process that begins, or resumes
        return self.trainer.get_train_dataloader()

    def _batches(self, loader: Any, epoch: int = 0) -> Batches:
        """Return a loader's batches of an epoch, cut into examples and documents."""
        if hasattr(loader, "set_epoch"):
            loader.set_epoch(epoch)
        found, first = [], first_position(self.model.config)
        shifts, rows_each = self.shift or self.is_pair, self.adapter.rows_each
        restores = not shifts and all(each.targets is None for each in self.given)
        for batch in islice(loader, MOST):
            columns, (examples,) = cut([batch], self.model.config, rows_each, first)
            documents = [words.handed(each, restores) for each in examples]
            of_tokens = columns.per.get("labels") in (Per.TOKEN, Per.TARGET) and rows_each == 1
            counted = list(torch.ones(len(examples), 1))
            if of_tokens:
                counted = [each[0]["labels"] != IGNORED_LABEL for each in examples]
                for each in counted:
                    each[: self.shift] = False
            found.append(HandedBatch(batch, columns, examples, documents, counted, of_tokens))
        return found

    def _given(self) -> Answer:
        """Return the number of the data's documents, and a complaint if they are not declared."""
        ends = {*np.atleast_1d(self.model.config.eos_token_id).tolist()}
        lost = self.adapter.why_documents_are_lost(self.trainer)
        return f"{len(self.given)}", [lost] if lost else words.undeclared(self.given, ends)

    def _columns(self) -> Answer:
        """Return "kept", or "dropped" and a complaint, of columns that declare documents."""
        lost = what_is_lost(self.trainer)
        return ("dropped", [lost]) if lost else ("kept", [])

    def _documents(self, wanted: list[Content], batches: Batches) -> Answer:
        """Return the numbers of batches' and `wanted` documents, and complaints on differences."""
        found, args = _documents_in(batches), self.trainer.args
        spare = args.train_batch_size - 1 if args.dataloader_drop_last else 0
        return f"{len(found)} of {len(wanted)}", words.of_documents(wanted, found, spare)

    def _labels(self, wanted: list[Content], batches: Batches) -> Answer:
        """Return the number of labels outside documents, and complaints on labels not `wanted`."""
        is_unsaid = self.is_pair and wanted[0].targets is None
        wrong = [] if is_unsaid else words.of_labels(wanted, _documents_in(batches), self.shift)
        over = 0
        for each in batches:
            if each.of_tokens and self.enabled is None:
                labels = each.batch["labels"][:, self.shift :]
                over += int((labels != IGNORED_LABEL).sum() - torch.cat(each.counted).sum())
        if over:
            wrong.append(f"{over} count at padding, or at first tokens, which others predict")
        return f"{over} beside those of documents", wrong

    def _resumed(self) -> Answer:
        """Return the number of batches after resuming, and complaints on lost or new documents."""
        from accelerate import skip_first_batches

        whole = self.epochs[1]
        done = (len(whole) + 1) // 2
        rest = self._batches(skip_first_batches(self._loader(), done), 1)
        found = _documents_in([*whole[:done], *rest])
        left = f"{len(rest)} of {len(whole)} batches left in epoch 1"
        return left, words.of_documents(_documents_in(whole), found)

    # --- Losses

    def _step(self) -> Answer:
        """Return the first training step's errors of loss and gradients, and complaints."""
        trainer = self.trainer
        step = self.epochs[0][: trainer.args.gradient_accumulation_steps]
        trainer.current_gradient_accumulation_steps = len(step)
        handed = iter([{**each.batch} for each in step])
        batches, items = trainer.get_batch_samples(handed, len(step), trainer.args.device)
        losses = (trainer.training_step(trainer.model, batch, items) for batch in batches)
        return self._against_alone(losses, step, items is not None)

    def _evaluated(self) -> Answer:
        """Return the first evaluation batch's error of the loss, and complaints."""
        batches = self.evaluation[1][:1]
        self.trainer.model.eval()
        with torch.no_grad():
            loss, *_ = self.trainer.prediction_step(self.trainer.model, {**batches[0].batch}, True)
            return self._against_alone([loss], batches, False)

    def _differentiated(self, losses: Iterable[Tensor]) -> tuple[Tensor, list[Any]]:
        """Return (sum of some losses, its gradients, or [] where gradients are disabled)."""
        parameters, total = trained(self.model), torch.zeros(())
        for parameter in parameters:
            parameter.grad = None
        for loss in losses:
            if loss.requires_grad:  # that of a training step is done with already
                loss.backward()
            total = total + loss.detach().cpu()
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        return total, grads if torch.is_grad_enabled() else []

    def _against_alone(self, losses: Iterable[Tensor], batches: Batches, counts: bool) -> Answer:
        """Return errors of the sum of losses against documents alone, and complaints.

        These have the loss of their tokens, or, if that differs, the trainer's own.
        """
        loss, gradients = self._differentiated(losses)
        total = float(sum(each.sum() for batch in batches for each in batch.counted))
        notes: list[list[float]] = []
        said, formula, report = [], None, self.report
        for own in (False, True)[not batches[0].of_tokens :]:
            alone = self._alone(batches, own, counts, notes)
            wanted, of_alone = self._differentiated(each / total for each in alone)
            off, of_gradients = relative_error(loss, wanted), gradient_error(gradients, of_alone)
            more = f", gradients by {of_gradients:.1e}" * bool(gradients)
            said.append(f"off by {off:.1e}{more}")
            formula = formula or words.formula_of(float(loss), notes, len(batches), self.shift)
            is_same = off <= report.loss_tolerance and of_gradients <= report.gradient_tolerance
            if is_same and (formula is None or not own):
                return said[-1] + ", a loss of its own" * own, []
        return said[0], [f"it is {formula or _OTHERWISE}"]

    def _alone(self, batches: Batches, own: bool, counts: bool, notes: list[Any]) -> Iterator[Any]:
        """Yield each document's loss alone, the trainer's `own` or stock's; append to `notes`.

        It is the trainer's `own`, weighed, or the sum over its targets. A note of such a sum holds
        the batch's number, columns per document, and sums and counts of labels shifted by 0, 1 and
        2.
        """
        trainer, names = self.trainer, argument_names(self.model)
        for number, each in enumerate(batches):
            for example, counted in zip(each.examples, each.counted, strict=True):
                batch = join([example], each.columns)
                with stock_again(self.model), trainer.compute_loss_context_manager():
                    if own:
                        options = {"num_items_in_batch": counted.sum()} if counts else {}
                        loss = trainer.compute_loss(trainer.model, batch, **options)
                        yield loss * counted.sum()
                        continue
                    labels = example[0]["labels"] if self.is_pair else batch.pop("labels")[0]
                    logits = self.model(**{n: batch[n] for n in batch if n in names})["logits"][0]
                pairs = [(logits[: len(labels) - s], labels[s:]) for s in range(3)]
                sums = [cross_entropy(*pair, reduction="sum") for pair in pairs]
                targets = [int((pair[1] != IGNORED_LABEL).sum()) for pair in pairs]
                columns = each.batch["labels"][:, self.shift :].numel() / len(each.examples)
                notes.append([number, columns, *(one.item() for one in sums), *targets])
                yield sums[self.shift]


def _documents_in(batches: Batches) -> list[Content]:
    return [document for each in batches for document in each.documents]


def _first_few(dataset: Any) -> Any:
    """Return at most `MOST` examples of a data set, or of the first one of a dict of data sets."""
    if isinstance(dataset, dict):
        dataset = next(iter(dataset.values()))
    is_sized = hasattr(dataset, "__len__")
    if dataset is None or (is_sized and len(dataset) <= MOST):
        return dataset
    if not is_sized and not hasattr(dataset, "take"):
        kind = type(dataset).__name__
        raise _not_auditable(f"data that end, found {kind}; give it a list of its first examples")
    return dataset.take(MOST) if hasattr(dataset, "take") else Subset(dataset, range(MOST))


def _not_auditable(wanted: str) -> UnsupportedModel:
    """Return the error for a trainer without something that the audit `wanted`."""
    return UnsupportedModel(f"the audit of a trainer wants {wanted}", code="nothing-to-audit")
