"""The leak auditor: checks that a model gives every document stock's results in every call.

The only reference for packed rows is the stock model's result for a document alone, in its default
call. Padded batches of an enabled model are compared with stock on the same batches. *Packed
against alone*: every field of the output. *Influence*: replace the tokens of one document and watch
the others. *Gradients*: of all parameters. *Loss*: the model's own loss of the documents' labels.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import MappingKey, tree_flatten_with_path
from transformers import PreTrainedModel

from autopack.auditing.asking import Labels, check_can_be_audited, find_labels
from autopack.auditing.cases import (
    ALIKE,
    FORMS,
    LONGER,
    ROUTER,
    Case,
    NoReference,
)
from autopack.auditing.compare import Arguments, Bounds, bounds_of
from autopack.auditing.measuring import Measuring
from autopack.auditing.padded import padded, routers
from autopack.auditing.report import LeakReport, ModeResult
from autopack.auditing.running import (
    can_be_doubled,
    dtype_of,
    first_that_moves,
    in_double,
    left_as_found,
)
from autopack.auditing.trainers import audit_trainer
from autopack.calls.prefixes import why_not
from autopack.integrations.trainers import adapter_of
from autopack.integrations.wrappers import unwrap
from autopack.layout import LEAST_SHARED
from autopack.registry import first_position
from autopack.runtime.marks import enabled_in


def audit(
    model: Any,
    *,
    lengths: tuple[int, ...] = (7, 12, 5, 9),
    modes: tuple[str, ...] | None = None,
    training: tuple[bool, ...] = (False, True),
    gradients: bool = True,
) -> LeakReport:
    """Return a report on a model's packed rows against stock; for a Trainer, a `TrainerReport`.

    Given a transformers Trainer, measure its training data: the documents of its data set, as they
    come through its columns, collator and sampler, and the loss of a step against the losses of its
    documents one by one. The other arguments apply to models alone.

    Args:
        model: A transformers model (or one wrapped by PEFT, DDP, accelerate, `torch.compile`),
            enabled or not, or a Trainer. Weights, gradients, training mode and random state are
            left as they were.
        lengths: Lengths in tokens of the random documents of a row; two or more.
        modes: Names among `autopack.auditing.cases.FORMS`; by default all that the model
            has: padded batches where it is enabled, the router's loss where it has one, longer
            documents where its configuration holds thresholds.
        training: Modes to run among eval (False) and train (True). Dropout and router noise are off
            in both. Of all modes, those that differ the most are run in both; named modes in each.
        gradients: True to compare all trainable parameters' gradients; costs 4 times their memory.

    Returns:
        A report with `.exact`, `.worst` (relative to the standard deviation of a field alone), the
        reasons why `.packed`, `.labels` and `.padded` calls are not exact, a table per call mode,
        the influence of each document on each other, as text, HTML and picture. Of a trainer it is
        a `TrainerReport`: `.exact`, and `.rows` of what was measured.
    """
    if adapter_of(model) is not None:
        return audit_trainer(model)
    base = unwrap(model)
    unknown = set(modes or ()) - set(FORMS)
    if unknown:
        raise ValueError(
            f"modes must be among {', '.join(FORMS)}; found {', '.join(sorted(unknown))}"
        )
    if len(lengths) < 2 or min(lengths) < 1:
        raise ValueError(
            f"lengths must name two or more documents of at least one token; found {lengths}"
        )
    if not training:
        raise ValueError(f"training must name False, True or both; found {training}")
    report = audited(base, bounds_of(dtype_of(base)), lengths, modes, training, gradients)
    if not report.results:
        why = "; ".join(f"{name!r}: {reason}" for name, reason in report.left_out.items())
        raise ValueError(f"modes must name one that this model has; found {why}")
    return report


def audited(base: PreTrainedModel, bounds: Bounds, *asked: Any) -> LeakReport:
    """Return a model's report judged by `bounds`: float64's if that is exact and float32's is not.

    `asked` are the further arguments of `Audit`.
    """
    check_can_be_audited(base)

    def run() -> LeakReport:
        return Audit(base, bounds, *asked).run()

    with left_as_found(base):
        report = run()
        if report.exact or report.dtype != "float32" or not can_be_doubled(base):
            return report
        with in_double(base):
            again = run()
    if not again.exact or report.measured - again.measured:
        return report
    again.notes["precision"] = (
        "measured in float64, since rounding of float32 decided a choice or a kink"
    )
    return again


_BEGINNING = LEAST_SHARED + 2
"""Number of common tokens of documents with one beginning: rows are worth taking together."""


class Audit(Measuring):
    """Audit of one model: the call modes that it runs, and the report of their results."""

    def __init__(
        self,
        model: PreTrainedModel,
        bounds: Bounds,
        lengths: tuple[int, ...],
        modes: tuple[str, ...] | None = None,
        training: tuple[bool, ...] = (False, True),
        gradients: bool = True,
        alike: bool = False,
    ):
        """Choose call modes; draw documents of these `lengths`, with one beginning if `alike`.

        Errors within the `bounds` count as rounding. `training` and `gradients` are as in `audit`.
        """
        enabled = enabled_in(model)
        report = LeakReport(
            f"{type(model).__name__} ({model.config.model_type})",
            str(getattr(model.config, "_attn_implementation", None) or "eager"),
            enabled is not None,
            str(dtype_of(model)).removeprefix("torch."),
            lengths,
            *bounds,
            [],
        )
        case = _alike_case(model, lengths) if alike else Case(model, lengths)
        super().__init__(model, case, report)
        longer = _threshold_lengths(model, lengths)
        if longer is not None:
            self.others[LONGER] = Case(model, longer)
        if enabled is not None and not self.case.is_pair and why_not(enabled) is None:
            self.others[ALIKE] = _alike_case(model, lengths)
        pads = enabled is not None and enabled.options.unpad
        there = {
            name: name in self.others if form.own_documents else pads or not form.is_padded
            for name, form in FORMS.items()
        } | {ROUTER: self.case.has_router}
        self.all, self.training, self.gradients = modes is None, training, gradients
        self.modes = [name for name in modes or FORMS if there[name]]
        report.left_out.update({name: "it has none" for name in modes or () if not there[name]})

    def run(self) -> LeakReport:
        """Run all modes; return the report with their results and the first module that mixes."""
        with torch.set_grad_enabled(self._choose_reference()):
            self.labels = self._find_labels()
            results = self._measure_modes()
            self.report.results.extend(sorted(results, key=lambda r: self.modes.index(r.mode)))
        worst = self.report.worst_packed
        if worst is not None and worst.failure is None:
            self.model.train(worst.training)
            case = self.case_of(worst.mode)
            call = case.call(FORMS[worst.mode])
            runs = [partial(self.model, **case.given(call, replaced)) for replaced in (None, 0)]
            place = first_that_moves(self.model, runs, call.sides, np.arange(call.sides.count) == 0)
            if place:
                self.report.notes["place"] = f"it begins in {place}"
            if worst.first:
                self.report.notes["first"] = worst.first
        return self.report

    def _choose_reference(self) -> bool:
        """Set options of documents' stock runs; return False if these run only without gradients.

        The options are none, or no cache where stock raises with one. Some attention has no
        backward on a device.
        """
        enabled, notes = self.enabled, self.report.notes
        without: Arguments = {"use_cache": False}
        ways = [({}, True), (without, True), ({}, False)]
        cases = [self.case, *self.others.values()]
        if enabled is not None and enabled.traits.masks_without_cache:
            ways = [(without, True), (without, False)]
            for case in cases:
                case.options_of_packed = without
            notes["documents alone"] = (
                "run with use_cache=False, as with labels: else they see later tokens"
            )
        first = ""
        self.model.train(self.training[0])  # all of it: results are kept by mode
        for options, differentiable in ways:
            for case in cases:
                case.options = options
            try:
                with torch.set_grad_enabled(differentiable):
                    self.alone(self.case, self.case.call(FORMS["default"]))
            except Exception as error:
                first = first or f"{type(error).__name__}: {error}"
                continue
            if first and differentiable:
                notes["documents alone"] = (
                    f"run with use_cache=False, because stock raises without: {first}"
                )
            elif first:
                notes["gradients"] = f"not measured, because stock has none: {first}"
            return differentiable
        return True  # it does not run at all, which every mode will say

    def _find_labels(self) -> Labels | None:
        """Return labels that the model's loss takes; None, and a note, if it takes none."""
        why: str | None = None
        for train in self.training:
            self.model.train(train)
            try:
                alone = self.alone(self.case, self.case.call(FORMS["default"]))
                labels, said = find_labels(
                    self.model, self.case, alone, ignore_boundaries=not self.report.enabled
                )
            except Exception as error:  # documents alone cannot be run: every mode will say so
                labels, said = None, f"{type(error).__name__}: {error}"
            if labels is not None:
                return labels
            why = why or said
        if why is not None:
            self.report.notes["loss"] = f"not measured, because {why}"
        return None

    def _measure_modes(self) -> Iterator[ModeResult]:
        """Yield modes' results, in eval and in train; put modes without reference in `left_out`."""
        trains = any(FORMS[name].trains for name in self.modes)
        replaces = any(FORMS[name].replaces for name in self.modes)
        gradients = self.gradients and torch.is_grad_enabled()
        for train in self.training:
            is_last, is_first = train == max(self.training), train == min(self.training)
            for name in self.modes:
                form = FORMS[name]
                if self.all and not (is_first or form.trains):
                    continue
                self.model.train(train)
                try:
                    differentiate = gradients and is_last and form.trains == trains
                    if name == ROUTER:
                        yield routers(self)
                    elif form.is_padded:
                        yield padded(self, name, differentiate)
                    else:
                        yield self.packed(
                            name, differentiate, is_first and form.replaces == replaces
                        )
                except NoReference as reason:
                    self.report.left_out[name] = str(reason)


def _alike_case(model: PreTrainedModel, lengths: tuple[int, ...]) -> Case:
    """Return a case of documents with one beginning, and at least `lengths` more tokens in each."""
    return Case(model, tuple(2 * _BEGINNING + n for n in lengths), shared_tokens=_BEGINNING)


LONGEST = 512
"""Largest threshold that the auditor crosses: its rows are to stay short."""
_SIZES = re.compile(
    r"(^|_)(ids?|index|size|dim|dims|rank|ranks|heads?|layers?|experts?|channels?|groups?|"
    r"labels?|classes|version|"
    r"embd|model|inner|ff|ffn|kv|state|states|width|depth|features?|hidden|vocab|planes|"
    r"topk|top_k|tok|init)$|^num_|^n_"
)
"""Names of numbers that measure a model and not a row."""
_LENGTHS = re.compile(
    r"window|chunk|floor|rope|position|length|len$|seq|block|context|ctx|sliding|stride|local|"
    r"distance|bucket|cutoff|thresh|span|limit|segment|period|scal"
)
"""Names of numbers that measure a row, whatever else is in them."""
_MOST = re.compile(r"max.*(pos|seq|len)|n_positions|n_ctx|num_positions|(context|seq|sequence)_len")
"""Names of the largest number of positions of a document."""


_NO_TEXT = re.compile("vision|audio|image|video|id2label|label2id")
"""Names of fields that do not concern text."""


def _threshold_lengths(model: PreTrainedModel, usual: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return lengths that cross thresholds beyond `usual`, up to `LONGEST`; None without such."""
    numbers = list(_named_numbers(model))
    of_rows = [n for name, n in numbers if _LENGTHS.search(name) or not _SIZES.search(name)]
    crossed = [n for n in of_rows if max(usual) <= n <= LONGEST]
    if not crossed:
        return None
    positions = [n for name, n in numbers if _MOST.search(name) and n >= max(usual)]
    most = min(positions, default=2 * LONGEST) - first_position(model.config)
    return 5, max(min(max(crossed) + 5, most), max(usual)), 9, 3


def _named_numbers(model: PreTrainedModel) -> Iterator[tuple[str, int]]:
    """Yield (name, value) of whole numbers in a configuration, and of lengths held by modules."""
    for path, value in tree_flatten_with_path(model.config.to_dict())[0]:
        names = [str(key.key) for key in path if isinstance(key, MappingKey)]
        if (
            type(value) in (int, float)
            and float(value).is_integer()
            and not any(map(_NO_TEXT.search, names))
        ):
            yield names[-1], int(value)
    for module in model.modules():
        for name, value in vars(module).items():
            if type(value) is int and _LENGTHS.search(name):
                yield name, value
