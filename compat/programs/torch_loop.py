"""Plain PyTorch loops around models of transformers, as they stand in people's own scripts.

Losses are made of logits or states, and nothing but torch trains. Models are tiny, and have no
dropout."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers

from compat.programs._drivers import Steps
from compat.programs.transformers_trainer import loaded

Step = dict[str, float]


def train(told: dict[str, Any], folder: Path, output: Path) -> Steps:
    """Train by the loop that a run names."""
    options = {name: value for name, value in told.items() if name != "loop"}
    return list(LOOPS[told["loop"]](folder, **options))


def stepped(loss: Any, model: Any, optimizer: Any) -> Step:
    """One step by a loss, with gradients clipped."""
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return {"loss": float(loss), "grad_norm": float(norm)}


def adamw(model: Any) -> Any:
    """The optimizer of most loops."""
    return torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-3)


def _own_loss(folder: Path, compiled: bool = False) -> Iterator[Step]:
    """The model's own loss; `compiled` without a C compiler's kernels, to start soon."""
    model, batches = loaded("causal", folder / "llama")
    optimizer = adamw(model.train())
    called = torch.compile(model, backend="aot_eager") if compiled else model
    for batch in batches:
        yield stepped(called(**batch).loss, model, optimizer)


def _loss_of_logits(folder: Path) -> Iterator[Step]:
    """A loss of the logits, SGD, and perplexity of the texts after each step."""
    model, batches = loaded("causal", folder / "llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batch in batches:
        labels = batch.pop("labels")
        logits = model.train()(**batch).logits[:, :-1].flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten())
        found = stepped(loss, model, optimizer)
        with torch.no_grad():
            found["perplexity"] = float(model.eval()(**batch, labels=labels).loss.exp())
        yield found


class Classifier(torch.nn.Module):
    """A module of one's own: a backbone, what it makes of its states, and a linear layer."""

    def __init__(self, backbone: Any, pooling: str):
        super().__init__()
        self.backbone, self.pooling = backbone, pooling
        self.head = torch.nn.Linear(64, 3)

    def forward(self, input_ids: Any, attention_mask: Any, labels: Any, **_: Any) -> Any:
        states = self.backbone(input_ids, attention_mask).last_hidden_state
        found = states[:, 0]
        if self.pooling == "mean":
            shown = attention_mask[..., None].to(states.dtype)
            found = (states * shown).sum(1) / shown.sum(1)
        if self.pooling == "all columns":
            found = states.mean(1)
        return torch.nn.functional.cross_entropy(self.head(found), labels)


def _head(folder: Path, pooling: str, frozen: bool = False) -> Iterator[Step]:
    """A head of one's own on a backbone."""
    _, batches = loaded("classes", folder / "bert")
    backbone = transformers.AutoModel.from_pretrained(folder / "bert")
    model = Classifier(backbone.train(), pooling)
    model.backbone.requires_grad_(not frozen)
    optimizer = adamw(model)
    for batch in batches:
        yield stepped(model(**batch), model, optimizer)


def _averaged(folder: Path) -> Iterator[Step]:
    """A moving average of the weights in a copy, which is evaluated."""
    model, batches = loaded("causal", folder / "llama")
    average, optimizer = copy.deepcopy(model), adamw(model.train())
    for batch in batches:
        found = stepped(model(**batch).loss, model, optimizer)
        with torch.no_grad():
            for one, other in zip(model.parameters(), average.parameters(), strict=True):
                other.lerp_(one, 0.1)
            found["average"] = float(average(**batch).loss)
        yield found


LOOPS: dict[str, Callable[..., Iterator[Step]]] = {
    "own loss": _own_loss,
    "loss of logits": _loss_of_logits,
    "head": _head,
    "averaged": _averaged,
}
