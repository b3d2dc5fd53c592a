"""What the ranks of a cell train on, and what one process of stock code makes of the same
documents, each alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from autopack import tiny
from autopack.auditing.running import noise_of
from autopack.inspection.source import shifts_labels
from compat.common import gradients_apart

LEARNING_RATE = 1e-3
MOMENTUM = 0.9
SHARES: tuple[tuple[tuple[int, ...], ...], ...] = (
    ((7, 12, 5, 9), (11, 8), (6, 6, 6), (13,)),
    ((6,), (8, 5, 10), (9, 7), (5, 7, 6, 9)),
    ((9, 6, 6), (12,), (6, 5, 7), (5, 8)),
)
"""Lengths of the documents of each rank, by step; a rank with one document brings a call that packs
nothing.

None is so short that a part of a model is left out, which FSDP2 does not serve on several ranks.
"""


@dataclass(frozen=True)
class Spec:
    """A tiny model: a type and a task."""

    type: str
    task: str = "causal-lm"

    @classmethod
    def of(cls, name: str) -> Spec:
        """From `type` or `type:task`."""
        kind, _, task = name.partition(":")
        return cls(kind, task or "causal-lm")

    def __str__(self) -> str:
        return self.type if self.task == "causal-lm" else f"{self.type}:{self.task}"

    @property
    def of_documents(self) -> bool:
        """Whether labels are one per document."""
        return self.task == "sequence-classification"

    def build(self, seed: int = 0, **changes: Any) -> Any:
        """The model, in training mode without dropout; parameters that no loss reaches are frozen,
        as DDP wants it."""
        changes.setdefault("attn_implementation", "eager")
        model = tiny.build(self.type, task=self.task, seed=seed, **changes).train()
        model.config.use_cache = self.type != "blt"  # stock cannot make a cache for it in training
        for module, name, _ in noise_of(model):
            setattr(module, name, 0.0)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name not in _unused(self, model))
        return model


_known_unused: dict[Spec, set[str]] = {}


def _unused(spec: Spec, model: Any) -> set[str]:
    if spec not in _known_unused:
        ids = tiny.tokens(model.config, 1, 5)
        model(input_ids=ids, labels=ids[:, 0] % 2 if spec.of_documents else ids).loss.backward()
        _known_unused[spec] = {
            name for name, parameter in model.named_parameters() if parameter.grad is None
        }
        model.zero_grad()
    return _known_unused[spec]


@dataclass(frozen=True)
class Document:
    """Tokens (1, tokens), and labels (1, tokens) or (1,)."""

    ids: torch.Tensor
    labels: torch.Tensor
    targets: int

    def alone(self) -> dict[str, torch.Tensor]:
        """A call with nothing else in it."""
        return {"input_ids": self.ids, "labels": self.labels}


def documents(spec: Spec, model: Any, step: int, share: int) -> list[Document]:
    """The documents of one share of a step. The labels of its second one are all left out of the
    loss of tokens."""
    found = []
    for number, length in enumerate(SHARES[step][share]):
        ids = tiny.tokens(model.config, 1, length, seed=100 * step + 10 * share + number)
        if spec.of_documents:
            found.append(Document(ids, torch.tensor([(length + number) % 2]), 1))
        elif number == 1:
            found.append(Document(ids, torch.full_like(ids, -100), 0))
        else:
            found.append(Document(ids, ids.clone(), length - shifts_labels(model)))
    return found


def packed(spec: Spec, given: list[Document]) -> dict[str, torch.Tensor]:
    """One packed row of documents; a document by itself is an ordinary call."""
    if len(given) == 1:
        return given[0].alone()
    return {
        "input_ids": torch.cat([each.ids for each in given], dim=1),
        "position_ids": torch.cat([torch.arange(each.ids.shape[1]) for each in given])[None],
        "labels": torch.cat([each.labels for each in given], dim=-1),
    }


@dataclass
class Step:
    """What a step gives: the mean loss over all targets, gradients and parameters by name."""

    loss: float
    gradients: dict[str, torch.Tensor]
    parameters: dict[str, torch.Tensor]

    def error(self, wanted: Step, start: dict[str, torch.Tensor]) -> float:
        """The largest relative error: of the loss, of a gradient, of what a parameter has moved
        since the start."""
        if missing := wanted.gradients.keys() - self.gradients.keys():
            raise AssertionError(f"no gradients of {sorted(missing)[:4]}")
        errors = [abs(self.loss - wanted.loss) / abs(wanted.loss)]
        errors.append(gradients_apart(self.gradients, wanted.gradients))
        # Some engines give zeros to parameters that are not used.
        errors += [
            gradient.norm().item()
            for n, gradient in self.gradients.items()
            if n not in wanted.gradients
        ]
        found, moved = (
            torch.cat([(of[name].float() - start[name]).flatten() for name in wanted.gradients])
            for of in (self.parameters, wanted.parameters)
        )
        errors.append(((found - moved).norm() / moved.norm()).item())
        return max(errors)


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    """The optimizer of every cell; its momentum is what a resumed run would lack."""
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)


def reference(
    spec: Spec, shares: int, dtype: torch.dtype = torch.float32
) -> tuple[dict[str, torch.Tensor], list[Step]]:
    """The parameters at the start, and all steps of a plain model that gets each document alone.

    With a lower `dtype` forward and backward run in it, on a copy of the parameters that are kept
    in float32."""
    model = spec.build()
    optimizer, steps = optimizer_of(model), []
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    for step in range(len(SHARES)):
        given = [each for share in range(shares) for each in documents(spec, model, step, share)]
        total, loss_of_all = sum(each.targets for each in given), 0.0
        optimizer.zero_grad()
        runs = model if dtype == torch.float32 else _copy(spec, model, dtype)
        for each in given:
            if each.targets:
                loss = runs(**each.alone()).loss * each.targets / total
                loss.backward()
                loss_of_all += loss.item()
        if runs is not model:
            for own, other in zip(model.parameters(), runs.parameters(), strict=True):
                own.grad = None if other.grad is None else other.grad.float()
        gradients = {
            name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
        }
        optimizer.step()
        parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
        steps.append(Step(loss_of_all, gradients, parameters))
    return start, steps


def _copy(spec: Spec, model: Any, dtype: torch.dtype) -> Any:
    copied = spec.build()
    copied.load_state_dict(model.state_dict())
    return copied.to(dtype)
