"""Plain PyTorch loops around models of transformers, as they stand in people's own scripts.

A collator of their own pads, losses are made of logits or states, and nothing but torch trains.
Models are tiny, and have no dropout."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from compat.programs._drivers import Steps, batches, stepped


def train(told: dict[str, Any], folder: Path, output: Path) -> Steps:
    """Train by the loop that a run names."""
    options = {name: value for name, value in told.items() if name != "loop"}
    return list(LOOPS[told["loop"]](folder, **options))


def _load(folder: Path, auto: str = "AutoModelForCausalLM") -> tuple[Any, Any]:
    import torch
    import transformers

    torch.manual_seed(0)
    model = getattr(transformers, auto).from_pretrained(folder).train()
    return model, transformers.AutoTokenizer.from_pretrained(folder)


def _adamw(model: Any) -> Any:
    import torch

    return torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-3)


def _next_tokens(logits: Any, labels: Any, **options: Any) -> Any:
    """The loss of the next tokens, as one writes it."""
    import torch

    return torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), **options
    )


def _own_loop(
    folder: Path, compiled: bool = False, seq2seq: bool = False
) -> Iterator[dict[str, float]]:
    """The model's own loss; by AdamW, of T5 by Adafactor; `compiled` without a C compiler's
    kernels, to start soon."""
    import torch

    model, tokenizer = (
        _load(folder / "t5", "AutoModelForSeq2SeqLM") if seq2seq else _load(folder / "llama")
    )
    optimizer = torch.optim.Adafactor(model.parameters(), lr=1e-2) if seq2seq else _adamw(model)
    called = torch.compile(model, backend="aot_eager") if compiled else model
    for batch in batches(tokenizer):
        yield stepped(called(**batch).loss, model.parameters(), optimizer)


def _loss_of_logits(folder: Path) -> Iterator[dict[str, float]]:
    """A loss of the logits, SGD, and perplexity of the texts after each step."""
    import torch

    model, tokenizer = _load(folder / "llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batch in batches(tokenizer):
        labels = batch.pop("labels")
        found = stepped(_next_tokens(model(**batch).logits, labels), model.parameters(), optimizer)
        model.eval()
        with torch.no_grad():
            found["perplexity"] = float(model(**batch, labels=labels).loss.exp())
        model.train()
        yield found


def _accumulated(folder: Path) -> Iterator[dict[str, float]]:
    """Three batches for each step, each with its share of the tokens; gradients checkpointed; the
    embedding frozen."""
    import torch

    model, tokenizer = _load(folder / "llama")
    model.gradient_checkpointing_enable()
    model.get_input_embeddings().weight.requires_grad = False
    optimizer, given = _adamw(model), list(batches(tokenizer))
    for first in range(0, len(given), 3):
        group, losses = given[first : first + 3], []
        counted = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in group)
        for batch in group:
            logits = model(
                input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
            ).logits
            loss = (
                _next_tokens(logits, batch["labels"])
                * (batch["labels"][:, 1:] != -100).sum()
                / counted
            )
            loss.backward()
            losses.append(float(loss))
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield {"loss": sum(losses), "grad_norm": float(norm)}


def _head(folder: Path, pooling: str, frozen: bool = False) -> Iterator[dict[str, float]]:
    """A module of one's own: a backbone, what it makes of its states, and a linear layer."""
    import torch

    backbone, tokenizer = _load(folder / "bert", "AutoModel")

    class Classifier(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = backbone
            self.head = torch.nn.Linear(64, 3)

        def forward(self, input_ids: Any, attention_mask: Any) -> Any:
            states = self.backbone(
                input_ids=input_ids, attention_mask=attention_mask
            ).last_hidden_state
            if pooling == "mean":
                shown = attention_mask[..., None].to(states.dtype)
                return self.head((states * shown).sum(1) / shown.sum(1))
            return self.head(states.mean(1) if pooling == "all columns" else states[:, 0])

    model = Classifier()
    model.backbone.requires_grad_(not frozen)
    optimizer = _adamw(model)
    for batch in batches(tokenizer, classes=3):
        logits = model(batch["input_ids"], batch["attention_mask"])
        yield stepped(
            torch.nn.functional.cross_entropy(logits, batch["labels"]),
            model.parameters(),
            optimizer,
        )


def _distilled(folder: Path) -> Iterator[dict[str, float]]:
    """A frozen teacher's logits, at real tokens, and the student's own loss."""
    import torch

    model, tokenizer = _load(folder / "llama")
    teacher = _load(folder / "teacher")[0].eval().requires_grad_(False)
    optimizer = _adamw(model)
    for batch in batches(tokenizer):
        outputs = model(**batch)
        with torch.no_grad():
            wanted = teacher(
                input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
            ).logits
        shown = batch["attention_mask"].bool()
        ours, theirs = outputs.logits[shown].log_softmax(-1), wanted[shown].log_softmax(-1)
        loss = torch.nn.functional.kl_div(ours, theirs, reduction="batchmean", log_target=True)
        yield stepped(0.5 * loss + 0.5 * outputs.loss, model.parameters(), optimizer)


def _sharpness(folder: Path) -> Iterator[dict[str, float]]:
    """SAM: a second pass with weights moved along the gradient of the first."""
    import torch

    model, tokenizer = _load(folder / "llama")
    trained = list(model.parameters())
    optimizer = torch.optim.SGD(trained, lr=0.05)
    for batch in batches(tokenizer):
        model(**batch).loss.backward()
        norm = torch.nn.utils.get_total_norm(
            [each.grad for each in trained if each.grad is not None]
        )
        moved = [0.05 * each.grad / norm for each in trained if each.grad is not None]
        with torch.no_grad():
            torch._foreach_add_(trained, moved)
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        with torch.no_grad():
            torch._foreach_sub_(trained, moved)
        yield {"first": float(norm), "loss": float(loss)}
        optimizer.step()
        optimizer.zero_grad()


def _averaged(folder: Path) -> Iterator[dict[str, float]]:
    """A moving average of the weights in a copy, which is evaluated; and a loss that keeps the
    weights near it."""
    import torch

    model, tokenizer = _load(folder / "llama")
    average, optimizer = copy.deepcopy(model).eval(), _adamw(model)
    for batch in batches(tokenizer):
        pairs = list(zip(model.parameters(), average.parameters(), strict=True))
        distance = sum(((one - other.detach()) ** 2).sum() for one, other in pairs)
        found = stepped(model(**batch).loss + 0.1 * distance, model.parameters(), optimizer)
        with torch.no_grad():
            for one, other in pairs:
                other.lerp_(one, 0.1)
            found["average"] = float(average(**batch).loss)
        yield found


def _smoothed(folder: Path) -> Iterator[dict[str, float]]:
    """R-Drop's two passes of a batch, label smoothing, and a penalty of the logits at real
    tokens."""
    model, tokenizer = _load(folder / "llama")
    optimizer = _adamw(model)
    for batch in batches(tokenizer):
        labels = batch.pop("labels")
        logits = [model(**batch, use_cache=False).logits for _ in range(2)]
        losses = [_next_tokens(each, labels, label_smoothing=0.1) for each in logits]
        penalty = 1e-3 * logits[0][batch["attention_mask"].bool()].logsumexp(-1).pow(2).mean()
        yield stepped(sum(losses) / 2 + penalty, model.parameters(), optimizer)


LOOPS: dict[str, Callable[..., Iterator[dict[str, float]]]] = {
    "own loss": _own_loop,
    "loss of logits": _loss_of_logits,
    "accumulated": _accumulated,
    "head": _head,
    "distilled": _distilled,
    "sharpness": _sharpness,
    "averaged": _averaged,
    "smoothed": _smoothed,
}
