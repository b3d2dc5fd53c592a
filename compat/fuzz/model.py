"""An enabled model beside an untouched twin of the same weights, and what that gives each document
alone.

What the twin gives is kept: the calls of one model share a few documents, so most of them cost one
forward."""

from __future__ import annotations

import contextlib
import copy
from dataclasses import dataclass, replace
from typing import Any

import torch

import autopack
from autopack import tiny
from autopack.auditing.asking import Labels, find_labels
from autopack.auditing.cases import Case, Input
from autopack.auditing.compare import Fields, scales_of
from autopack.auditing.fields import fields_of
from autopack.auditing.running import forget_lengths, noise_of, run_as_stock, weighted_sum
from autopack.calls.outputs import loss_of
from autopack.tiny.rules import ORDINARY
from compat.common import said
from compat.exactness import Undeclared, built
from compat.fuzz.case import Arranged, Spec
from compat.fuzz.packing import by_place, collated, ignoring, labels_of, placed
from compat.outcome import upstream_error


class NoStock(Exception):
    """Stock cannot run what autopack would have to be compared with; the message says why."""


@dataclass
class Asked:
    """The arguments of a call, where its documents lie, which they are, and their labels."""

    arguments: dict[str, Any]
    call: Input
    picks: list[int]
    labels: Labels | None


class Model:
    """A model of a `Spec`, enabled, beside its untouched twin, and what that gives each document
    alone."""

    def __init__(self, spec: Spec, verify: bool = False, enabled: bool = True):
        self.spec = spec
        try:
            dtype = getattr(torch, spec.dtype)
            self.stock = built(
                spec.model_type, spec.implementation, dtype, spec.task, **spec.overrides()
            )
            if spec.experts:
                self.stock.set_experts_implementation(spec.experts)
        except (Undeclared, tiny.CannotBuild) as error:
            raise NoStock(getattr(error, "reason", str(error))) from error
        except Exception as error:  # a class may raise anything at a value that it does not take
            raise NoStock(said(error)) from error
        for module, name, _ in noise_of(self.stock):
            setattr(module, name, 0.0)
        try:
            self.pool = Case(self.stock, spec.lengths, spec.seed, spec.alike)
        except Exception as error:
            raise NoStock(
                upstream_error(self.stock, None) or f"no documents can be drawn: {said(error)}"
            ) from error
        for half in self.pool.halves:
            # The least numbers may be special in code that the configuration does not tell (the
            # padding of MPNet).
            half.documents = [document.clamp(min=ORDINARY.start) for document in half.documents]
        self._let_it_write()
        self.model = copy.deepcopy(self.stock)
        self.outputs = dict(self.pool.outputs) if spec.outputs else {}
        self.without_router = {"output_router_logits": False} if self.pool.has_router else {}
        """Beside labels: a router's loss is no mean over documents."""
        self._checkpointing: dict[bool, str] = {}
        """How stock (False) and the enabled model (True) checkpoint now."""
        self._alone: dict[Any, tuple[Fields, torch.Tensor | None]] = {}
        self._scales: dict[Any, dict[str, float]] = {}
        # stock's call with a cache lets tokens see later ones (FSMT)
        self._masks_without_cache = False
        self._refuse_what_never_runs()
        self.labels = self._find_labels()
        if enabled:
            handle = autopack.enable(
                self.model,
                backend=spec.backend,
                unpad=spec.unpad,
                verify=verify,
                check_every=1 if spec.checked else None,
            )
            self._masks_without_cache = handle.enabled.traits.masks_without_cache

    def _let_it_write(self) -> None:
        """Run stock in training once: a forward may write to its own weights there (Gemma 3n bounds
        some of them)."""
        self.stock.train()
        # what it raises is told of calls that are judged
        with contextlib.suppress(Exception), torch.no_grad():
            run_as_stock(self.stock, self.pool.by_itself(0))
        self.stock.eval()

    def _refuse_what_never_runs(self) -> None:
        """Raise `NoStock` where stock runs none of the documents."""
        for number in range(len(self.pool.documents)):
            try:
                self.alone(number, 0, Arranged(), False)
                return
            except NoStock as error:
                found = error
        raise found

    def _find_labels(self) -> Labels | None:
        self.stock.eval()
        try:
            with torch.no_grad():
                alone = [
                    fields_of(run_as_stock(self.stock, self.pool.by_itself(n)))
                    for n in range(len(self.pool.documents))
                ]
            found, _ = find_labels(self.stock, self.pool, alone, ignore_boundaries=False)
        except Exception:
            return None  # calls without labels say what stock raises
        return ignoring(found, self.spec.seed) if found is not None and self.spec.ignored else found

    def parameters(self, model: Any) -> list[torch.nn.Parameter]:
        """What gradients are compared of."""
        return [p for p in model.parameters() if p.requires_grad and p.numel()]

    def alone(
        self, number: int, offset: int, arranged: Arranged, with_labels: bool
    ) -> tuple[Fields, Any]:
        """Fields and loss that stock gives one document by itself; raises `NoStock` where it
        raises."""
        options = self._options(arranged)
        key = number, offset, arranged.training, with_labels, *options
        if key not in self._alone:
            self._mode(self.stock, arranged.training, "")
            try:
                with torch.no_grad():
                    output = run_as_stock(
                        self.stock, self.by_itself(number, offset, with_labels) | options
                    )
            except Exception as error:
                raise NoStock(said(error)) from error
            fields = fields_of(output)
            if not all(bool(value.isfinite().all()) for value in fields.values()):
                raise NoStock("its results for a document alone are not finite")
            if not any(value.numel() for value in fields.values()):  # XLNet's halves of a batch
                raise NoStock("it gives a document alone nothing")
            self._alone[key] = fields, loss_of(output)
        return self._alone[key]

    def _options(self, arranged: Arranged) -> dict[str, Any]:
        """How stock is to run a document alone, where that decides what its tokens see."""
        return (
            {"use_cache": False}
            if self._masks_without_cache and arranged.use_cache is False
            else {}
        )

    def by_itself(self, number: int, offset: int, with_labels: bool) -> dict[str, Any]:
        """All arguments of stock for one document."""
        given = self.pool.by_itself(number) | self.outputs
        if offset:
            first = self.pool.base + offset
            given["position_ids"] = torch.arange(first, first + len(self.pool.documents[number]))[
                None
            ]
        if with_labels and self.labels is not None:
            given |= {**self.labels.alone[number], **self.without_router}
        return given

    def gradients(
        self, arranged: Arranged, names: frozenset[str] | None, shares: list[float]
    ) -> list[torch.Tensor]:
        """Gradients of the losses of a call's documents by these shares, or of the weighted sums of
        their named fields; by stock."""
        options, scales = self._options(arranged), self.scales(arranged, False)
        self._mode(self.stock, arranged.training, arranged.checkpointing)
        self.stock.zero_grad(set_to_none=True)
        parameters = self.parameters(self.stock)
        try:
            for (number, offset), share in zip(arranged.each, shares, strict=True):
                if not share:
                    continue
                given = self.by_itself(number, offset, names is None) | options
                output = run_as_stock(self.stock, given)
                total = loss_of(output)
                if names is not None:
                    _, call = placed(self.pool, Arranged(rows=((number,),)))
                    own = fields_of(output)
                    found, _, _ = call.sides.split(own, [own])
                    total = weighted_sum([{name: found[0][name] for name in names}], scales)
                backward(None if total is None else share * total)
        except Exception as error:
            raise NoStock(said(error)) from error
        wanted = taken(parameters)
        pairs = zip(parameters, self.parameters(self.stock), strict=True)
        if any(one is not other for one, other in pairs):  # FSMT, at a longer document
            raise NoStock("its forward makes itself other parameters")
        if not all(bool(gradient.isfinite().all()) for gradient in wanted):
            raise NoStock("its gradients for a document alone are not finite")
        return wanted

    def scales(self, arranged: Arranged, with_labels: bool) -> dict[str, float]:
        """The standard deviation of each field over those documents that stock runs."""
        key = arranged.training, with_labels
        if key not in self._scales:
            known: list[Fields] = []
            for number in range(len(self.pool.documents)):
                with contextlib.suppress(NoStock):
                    known.append(self.alone(number, 0, arranged, with_labels)[0])
            self._scales[key] = scales_of(known) if known else {}
        return self._scales[key]

    def call(self, arranged: Arranged) -> Asked:
        """What a call hands to a model, and where its documents lie."""
        picks = arranged.picks
        labels = (
            labels_of(self.labels, picks) if arranged.labels and self.labels is not None else None
        )
        if labels is not None and not any(count > 0 for count in labels.counts):
            labels = None  # nothing is predicted
        if arranged.form == "collator" and _collates(labels):
            arguments, call = collated(self.model, self.pool, arranged, labels)
        else:
            by_positions = replace(arranged, form="positions")
            arguments, call = placed(
                self.pool, by_positions if arranged.form == "collator" else arranged
            )
            if labels is not None:
                arguments |= labels.packed(call)
        arguments |= self.outputs
        if labels is not None:
            arguments |= self.without_router
        if arranged.use_cache is not None:
            arguments["use_cache"] = arranged.use_cache
        return Asked(arguments, call, picks, labels)

    def run(self, model: Any, asked: Asked, arranged: Arranged) -> Any:
        """Hand a call to a model, which stock or not keeps no frequencies of an earlier, longer
        one."""
        self._mode(model, arranged.training, arranged.checkpointing)
        forget_lengths(model)
        model.zero_grad(set_to_none=True)
        copied = {
            n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in asked.arguments.items()
        }
        by_position, by_name = by_place(model, copied, arranged.positional)
        with torch.set_grad_enabled(arranged.gradients):
            return model(*by_position, **by_name)

    def _mode(self, model: Any, training: bool, checkpointing: str) -> None:
        if model.training != training:
            model.train(training)
        for module in model.modules():
            # in evaluation it keeps what its last call had room for
            if type(module).__name__ == "NllbMoeTop2Router":
                module.expert_capacity = model.config.expert_capacity
        known = self._checkpointing.get(model is self.model, "")
        if checkpointing != known and model.supports_gradient_checkpointing:
            if checkpointing:
                model.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
            else:
                model.gradient_checkpointing_disable()
            self._checkpointing[model is self.model] = checkpointing


def backward(total: torch.Tensor | None) -> None:
    """Differentiate; raises `ValueError` where there is nothing to differentiate."""
    if total is None or not total.requires_grad:
        raise ValueError("nothing of the output can be differentiated")
    total.backward()


def taken(parameters: list[torch.nn.Parameter]) -> list[torch.Tensor]:
    """The gradients of parameters, zero where there is none."""
    return [torch.zeros_like(p) if p.grad is None else p.grad.detach().clone() for p in parameters]


def _collates(labels: Labels | None) -> bool:
    """Whether the collator takes labels as they are: whole numbers per token, or one class per
    document."""
    if labels is None:
        return True
    tensors = [tensor for each in labels.alone for tensor in each.values()]
    return len(labels.alone[0]) == 1 and not any(
        t.is_floating_point() or t.dim() > 2 for t in tensors
    )
