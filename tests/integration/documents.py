"""Documents for the integration tests: run packed into one row, and run alone, with everything that must agree."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from autopack import tiny

LENGTHS = (7, 12, 5, 9)

FLOAT32 = 1e-5
"""Two orders of float32 sums differ by 1e-7 of their scale, and by 1e-6 after a few layers; leaks start at 1e-2."""
BFLOAT16 = 3e-2
"""bfloat16 keeps 8 bits (4e-3 per operation) over a few layers."""
LEAK = 0.1
"""What a leak exceeds in these models, whose parameters are large."""


@dataclass
class Run:
    """What a model computes: logits (tokens, vocabulary), loss, gradients by parameter name."""

    logits: torch.Tensor
    loss: float
    gradients: dict[str, torch.Tensor]

    def error(self, wanted: Run) -> float:
        """The largest of the relative errors of logits, loss and gradients."""
        assert self.gradients.keys() == wanted.gradients.keys()
        errors = [
            ((self.logits - wanted.logits).abs().max() / wanted.logits.std()).item(),
            abs(self.loss - wanted.loss) / abs(wanted.loss),
        ]
        for name, gradient in wanted.gradients.items():
            difference = (self.gradients[name] - gradient).norm()
            # A gradient of nothing but zeros (a fresh LoRA's A) has no scale of its own.
            errors.append((difference / gradient.norm()).item() if gradient.any() else difference.item())
        return max(errors)


def documents(config: Any, lengths: Iterable[int] = LENGTHS, seed: int = 0) -> list[torch.Tensor]:
    """Random documents, each of shape (1, tokens)."""
    lengths = list(lengths)
    return list(tiny.tokens(config, 1, sum(lengths), seed=seed).split(lengths, dim=1))


def packed(documents: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """One packed row, as collators make it: positions restart, labels are the tokens."""
    ids = torch.cat(documents, dim=1)
    positions = torch.cat([torch.arange(document.shape[1]) for document in documents])[None]
    return {"input_ids": ids, "position_ids": positions, "labels": ids.clone()}


def targets(documents: list[torch.Tensor]) -> int:
    """How many tokens are predicted: all but the first of each document."""
    return sum(document.shape[1] - 1 for document in documents)


def run_packed(model: torch.nn.Module, documents: list[torch.Tensor], **arguments: Any) -> Run:
    """Forward and backward over one packed row."""
    return _run(model, [packed(documents)], targets(documents), arguments)


def run_alone(model: torch.nn.Module, documents: list[torch.Tensor], **arguments: Any) -> Run:
    """Forward and backward over every document by itself; the loss is the mean over the tokens of all."""
    calls = [{"input_ids": document, "labels": document} for document in documents]
    return _run(model, calls, targets(documents), arguments)


def _run(model: torch.nn.Module, calls: list[dict[str, torch.Tensor]], count: int, arguments: dict[str, Any]) -> Run:
    model.zero_grad()
    logits, loss = [], 0.0
    for call in calls:
        output = model(**call, num_items_in_batch=count, **arguments)
        output.loss.backward()
        logits.append(output.logits[0].detach())
        loss += output.loss.item()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return Run(torch.cat(logits), loss, gradients)


def perturb(model: torch.nn.Module, scale: float = 0.1) -> None:
    """Move the trainable parameters away from where they start: a fresh adapter adds nothing."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
