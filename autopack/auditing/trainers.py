"""The audit of a trainer: its own data, through its columns, collator, sampler, model and loss.

Measures are rows of a table. *Given*: the documents of the data set's examples. *Handed*: what the model gets has to be
these documents, each once in an epoch, after resuming too, with their own targets. *Loss*: loss and gradients of a step
have to be those of its documents one by one in stock's model, weighed by the tokens that count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import Subset

from autopack.auditing.asking import argument_names, first_label_counts
from autopack.auditing.compare import bounds_of, gradient_error, relative_error
from autopack.auditing.handed import Document, formula_of, given, handed, of_documents, of_labels, undeclared
from autopack.auditing.left_as_found import trainer_left_as_found
from autopack.auditing.report import Measured, TrainerReport
from autopack.auditing.running import dtype_of, stock_again, trained
from autopack.errors import UnsupportedModel, in_a_line
from autopack.integrations.boundaries import what_is_lost
from autopack.integrations.trainers import TRANSFORMERS, adapter_of
from autopack.integrations.wrappers import unwrap
from autopack.layout import IGNORED_LABEL
from autopack.packing.batches import Columns, Example, Per, cut, join
from autopack.registry import first_position
from autopack.runtime.model import EnabledModel

MOST = 256
"""Examples of a data set that are taken through a trainer."""
_OTHERWISE = (
    "not made of what its documents get alone: those of a batch change one another, in the model or by an added loss, "
    "or they are weighed otherwise than by the tokens that count"
)


def audit_trainer(trainer: Any) -> TrainerReport:
    """Measure what a trainer trains on, and leave it and its model as they were. See `autopack.audit`."""
    base, kind = unwrap(trainer.model), type(trainer).__name__
    ranks = max(trainer.args.world_size, trainer.args.n_gpu)
    if ranks > 1:
        raise UnsupportedModel(
            f"wanted one process and device for the audit of {kind}, found {ranks}; give it CUDA_VISIBLE_DEVICES=0",
            code="nothing-to-audit",
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


class Part(NamedTuple):
    """A batch as it comes to the model, its examples, and the documents that they are.

    `targets` are true of each document's labels that count; None where labels are none of tokens.
    """

    batch: Any
    columns: Columns
    examples: list[Example]
    documents: list[Document]
    targets: list[torch.Tensor] | None

    @property
    def counted(self) -> Any:
        """What counts of each document: the labels that do, or the document itself."""
        return self.targets or torch.ones(len(self.examples))


Answer = tuple[str, list[str]]
"""What a measure found, in words, and what is wrong."""


class TrainerAudit:
    """The audit of one trainer; `measured` yields its rows."""

    def __init__(self, trainer: Any, model: Any, enabled: EnabledModel | None, report: TrainerReport):
        self.trainer, self.model, self.enabled, self.report = trainer, model, enabled, report
        self.adapter = adapter_of(trainer) or TRANSFORMERS
        self.is_pair = bool(getattr(model.config, "is_encoder_decoder", False))
        with stock_again(model, enabled):
            self.shift = int(not self.is_pair and first_label_counts(model) is False)
        trainer.train_dataset, trainer.eval_dataset = _few(trainer.train_dataset), _few(trainer.eval_dataset)

    def measured(self) -> Iterator[Measured]:
        """Yield the result of each measure."""
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
                ("evaluation", "documents", lambda: self._documents(self.eval_given, self.evaluation)),
                ("evaluation", "labels", lambda: self._labels(self.eval_given, self.evaluation)),
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
    def given(self) -> list[Document]:
        return self._given_by(self.trainer.train_dataset)

    @cached_property
    def eval_given(self) -> list[Document]:
        return self._given_by(self.trainer.eval_dataset)

    @cached_property
    def epochs(self) -> list[list[Part]]:
        """The batches of two epochs."""
        loader = self._loader()
        return [self._parts(loader, epoch) for epoch in (0, 1)]

    @cached_property
    def evaluation(self) -> list[Part]:
        return self._parts(self.trainer.get_eval_dataloader())

    def _given_by(self, dataset: Any) -> list[Document]:
        rows = islice(iter(dataset), len(dataset) if hasattr(dataset, "__len__") else MOST)
        return [each for row in rows for each in given(row, self.is_pair, self.adapter.rows_each)]

    def _loader(self) -> Any:
        from transformers import set_seed

        set_seed(self.trainer.args.seed)  # as a process that begins, or resumes
        return self.trainer.get_train_dataloader()

    def _parts(self, loader: Any, epoch: int = 0) -> list[Part]:
        if hasattr(loader, "set_epoch"):
            loader.set_epoch(epoch)
        found, first = [], first_position(self.model.config)
        restores = not (self.shift or self.is_pair) and all(each.targets is None for each in self.given)
        for batch in islice(loader, MOST):
            columns, (examples,) = cut([batch], self.adapter.rows_each, self.is_pair, first=first)
            documents, targets = [handed(each, restores) for each in examples], None
            if self.adapter.rows_each == 1 and columns.per.get("labels") in (Per.TOKEN, Per.TARGET):
                targets = [each[0]["labels"] != IGNORED_LABEL for each in examples]
                for each in targets:
                    each[: self.shift] = False
            found.append(Part(batch, columns, examples, documents, targets))
        return found

    def _given(self) -> Answer:
        ends, lost = self.model.config.eos_token_id, self.adapter.why_documents_are_lost(self.trainer)
        wrong = [lost] if lost else undeclared(self.given, {*(ends if isinstance(ends, list) else [ends])})
        return f"{len(self.given)}", wrong

    def _columns(self) -> Answer:
        lost = what_is_lost(self.trainer)
        return ("dropped", [lost]) if lost else ("kept", [])

    def _documents(self, wanted: list[Document], parts: list[Part]) -> Answer:
        found, args = _documents_in(parts), self.trainer.args
        spare = args.train_batch_size - 1 if args.dataloader_drop_last else 0
        return f"{len(found)} of {len(wanted)}", of_documents(wanted, found, spare)

    def _labels(self, wanted: list[Document], parts: list[Part]) -> Answer:
        is_unsaid = self.is_pair and wanted[0].targets is None
        wrong = [] if is_unsaid else of_labels(wanted, _documents_in(parts), self.shift)
        over = 0
        for part in parts:
            if part.targets and self.enabled is None:
                counted = part.batch["labels"][:, self.shift :] != IGNORED_LABEL
                over += int(counted.sum() - torch.cat(part.targets).sum())
        if over:
            wrong.append(f"{over} count that no document has: at padding, or at first tokens, which others predict")
        return f"{over} beside those of documents", wrong

    def _resumed(self) -> Answer:
        from accelerate import skip_first_batches

        whole = self.epochs[1]
        done = (len(whole) + 1) // 2
        rest = self._parts(skip_first_batches(self._loader(), done), 1)
        wrong = of_documents(_documents_in(whole), _documents_in([*whole[:done], *rest]))
        return f"{len(rest)} of {len(whole)} batches left in epoch 1", wrong

    # --- Losses

    def _step(self) -> Answer:
        trainer, count = self.trainer, min(self.trainer.args.gradient_accumulation_steps, len(self.epochs[0]))
        parts = self.epochs[0][:count]
        given = iter([{**part.batch} for part in parts])
        batches, items = trainer.get_batch_samples(given, count, trainer.args.device)
        trainer.current_gradient_accumulation_steps = count
        losses = (trainer.training_step(trainer.model, batch, items) for batch in batches)
        return self._beside(losses, parts, items is not None)

    def _evaluated(self) -> Answer:
        part = self.evaluation[0]
        self.trainer.model.eval()
        with torch.no_grad():
            loss = self.trainer.prediction_step(self.trainer.model, {**part.batch}, True)[0]
            return self._beside([loss], [part], False)

    def _differentiated(self, losses: Iterable[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the sum of some losses, and its gradients where they are asked for."""
        parameters, total = trained(self.model), torch.zeros(())
        for parameter in parameters:
            parameter.grad = None
        for loss in losses:
            if loss.requires_grad:  # that of a training step is done with already
                loss.backward()
            total = total + loss.detach().cpu()
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        return total, grads if torch.is_grad_enabled() else []

    def _beside(self, losses: Iterable[torch.Tensor], parts: list[Part], counts: bool) -> Answer:
        """Compare the sum of losses, and its gradients, with documents alone: of their tokens, or by its own loss."""
        loss, gradients = self._differentiated(losses)
        total = float(sum(each.sum() for part in parts for each in part.counted))
        notes: list[list[float]] = []
        said, formula = [], None
        for own in (False, True)[parts[0].targets is None :]:
            alone = self._alone(parts, own, counts, notes)
            wanted, of_alone = self._differentiated(each / total for each in alone)
            off, of_gradients = relative_error(loss, wanted), gradient_error(gradients, of_alone)
            said.append(f"off by {off:.1e}{f', gradients by {of_gradients:.1e}' * bool(gradients)}")
            is_same = off <= self.report.loss_tolerance and of_gradients <= self.report.gradient_tolerance
            formula = formula or formula_of(float(loss), notes, len(parts), self.shift)
            if is_same and (formula is None or not own):
                return said[-1] + ", a loss of its own" * own, []
        return said[0], [f"it is {formula or _OTHERWISE}"]

    def _alone(self, parts: list[Part], own: bool, counts: bool, notes: list[list[float]]) -> Iterator[torch.Tensor]:
        """Yield the loss of each document alone in stock: the trainer's `own`, weighed, or the sum over its targets.

        Notes of the latter are sums and targets of labels that are shifted by 0, 1 and 2.
        """
        trainer, names = self.trainer, argument_names(self.model) - (set() if self.is_pair else {"labels"})
        for number, part in enumerate(parts):
            for example, kept in zip(part.examples, part.counted, strict=True):
                batch = join([example], part.columns)
                with stock_again(self.model, self.enabled), trainer.compute_loss_context_manager():
                    if own:
                        options = {"num_items_in_batch": kept.sum()} if counts else {}
                        yield trainer.compute_loss(trainer.model, batch, **options) * kept.sum()
                        continue
                    output = self.model(**{name: value for name, value in batch.items() if name in names})
                labels, logits = example[0]["labels"], output["logits"][0]
                each = [cross_entropy(logits[: len(labels) - s], labels[s:], reduction="none") for s in range(3)]
                targets = [float((labels[s:] != IGNORED_LABEL).sum()) for s in range(3)]
                columns = part.batch["labels"][:, self.shift :].numel() / len(part.examples)
                notes.append([number, columns, *(float(one.detach().sum()) for one in each), *targets])
                yield each[self.shift].sum()


def _documents_in(parts: list[Part]) -> list[Document]:
    return [each for part in parts for each in part.documents]


def _few(dataset: Any) -> Any:
    """Return the first examples of a data set, of several by name those of the first one. Raises `UnsupportedModel`."""
    if isinstance(dataset, dict):
        dataset = next(iter(dataset.values()))
    if dataset is None or (hasattr(dataset, "__len__") and len(dataset) <= MOST):
        return dataset
    if not hasattr(dataset, "__len__") and not hasattr(dataset, "take"):
        raise UnsupportedModel(
            f"wanted data of some length, or a stream with take(n), found {type(dataset).__name__}; give the trainer a "
            f"list of its first examples",
            code="nothing-to-audit",
        )
    return dataset.take(MOST) if hasattr(dataset, "take") else Subset(dataset, range(MOST))
