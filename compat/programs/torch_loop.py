"""Plain PyTorch loops around models of transformers, as they stand in people's own scripts.

A collator of their own pads, losses are made of logits or states, and nothing but torch trains. Models are tiny, and
have no dropout.
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from compat.programs._drivers import Run, save_encoder, write_steps
from compat.programs._words import save_model, text

NAME = "plain PyTorch"
PACKAGE = "torch"
STAND_INS = ()
APART: frozenset[str] = frozenset()
_STEPS, _ROWS = 9, 4
Step = dict[str, float]


def prepare(folder: Path) -> None:
    """Write a tiny Llama and a larger one, a tiny BERT, and a tiny T5."""
    save_model(folder / "llama", "llama")
    save_model(folder / "teacher", "llama", hidden_size=96)
    save_encoder(folder / "bert")
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
    save_model(folder / "t5", "t5", "AutoModelForSeq2SeqLM", **sizes, decoder_start_token_id=0)


def command(run: str, folder: Path, output: Path) -> list[str]:
    """This module, as a script."""
    return ["-m", "compat.programs.torch_loop", run, str(folder), str(output)]


def _load(folder: Path, auto: str = "AutoModelForCausalLM") -> tuple[Any, Any]:
    import torch
    import transformers

    torch.manual_seed(0)
    model = getattr(transformers, auto).from_pretrained(folder)
    model.train()
    return model, transformers.AutoTokenizer.from_pretrained(folder)


def _batches(tokenizer: Any, classes: int = 0) -> Iterator[dict[str, Any]]:
    """Batches of random texts, padded on the right, with labels: the tokens, or one class for each row."""
    import torch

    draw = random.Random(0)
    for _ in range(_STEPS):
        batch = dict(tokenizer([text(draw, 40) for _ in range(_ROWS)], padding=True, return_tensors="pt"))
        batch.pop("token_type_ids", None)
        hidden = batch["attention_mask"] == 0
        labels = batch["input_ids"].masked_fill(hidden, -100)
        drawn = [draw.randrange(max(1, classes)) for _ in range(_ROWS)]
        yield {**batch, "labels": torch.tensor(drawn) if classes else labels}


def _step(loss: Any, parameters: list[Any], optimizer: Any, most: float = 1.0) -> Step:
    import torch

    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(parameters, most)
    optimizer.step()
    optimizer.zero_grad()
    return {"loss": float(loss), "grad_norm": float(norm)}


def _next_tokens(logits: Any, labels: Any) -> Any:
    """The loss of the next tokens, as one writes it."""
    import torch

    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def _own_loop(folder: Path, output: Path) -> None:
    """The model's own loss, AdamW."""
    import torch

    model, tokenizer = _load(folder / "llama")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    trained = list(model.parameters())
    write_steps(output, [_step(model(**batch).loss, trained, optimizer) for batch in _batches(tokenizer)])


def _loss_of_logits(folder: Path, output: Path) -> None:
    """A loss of the logits, SGD, and perplexity of other texts after each step."""
    import torch

    model, tokenizer = _load(folder / "llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    steps = []
    for batch in _batches(tokenizer):
        labels = batch.pop("labels")
        found = _step(_next_tokens(model(**batch).logits, labels), list(model.parameters()), optimizer)
        model.eval()
        with torch.no_grad():
            found["perplexity"] = float(model(**batch, labels=labels).loss.exp())
        model.train()
        steps.append(found)
    write_steps(output, steps)


def _accumulated(folder: Path, output: Path) -> None:
    """Three batches for each step, each with its share of the tokens; gradients checkpointed; the embedding frozen."""
    import torch

    model, tokenizer = _load(folder / "llama")
    model.gradient_checkpointing_enable()
    model.get_input_embeddings().weight.requires_grad = False
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    batches, steps = list(_batches(tokenizer)), []
    for first in range(0, len(batches), 3):
        group = batches[first : first + 3]
        counted = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in group)
        losses = []
        for batch in group:
            logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
            wanted = batch["labels"][:, 1:]
            loss = _next_tokens(logits, batch["labels"]) * (wanted != -100).sum() / counted
            loss.backward()
            losses.append(float(loss))
        norm = torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        steps.append({"loss": sum(losses), "grad_norm": float(norm)})
    write_steps(output, steps)


def _compiled(folder: Path, output: Path) -> None:
    """`torch.compile` of the model; without a C compiler's kernels, so that it starts soon."""
    import torch

    model, tokenizer = _load(folder / "llama")
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    trained = list(model.parameters())
    write_steps(output, [_step(compiled(**batch).loss, trained, optimizer) for batch in _batches(tokenizer)])


def _head(folder: Path, output: Path, pooling: str, frozen: bool = False) -> None:
    """A module of one's own: a backbone, what it makes of its states, and a linear layer."""
    import torch

    backbone, tokenizer = _load(folder / "bert", "AutoModel")

    class Classifier(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = backbone
            self.head = torch.nn.Linear(64, 3)

        def forward(self, input_ids: Any, attention_mask: Any) -> Any:
            states = self.backbone(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
            if pooling == "mean":
                shown = attention_mask[..., None].to(states.dtype)
                return self.head((states * shown).sum(1) / shown.sum(1))
            return self.head(states.mean(1) if pooling == "all columns" else states[:, 0])

    model = Classifier()
    if frozen:
        model.backbone.requires_grad_(False)
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer, steps = torch.optim.AdamW(trained, lr=1e-3), []
    for batch in _batches(tokenizer, classes=3):
        logits = model(batch["input_ids"], batch["attention_mask"])
        steps.append(_step(torch.nn.functional.cross_entropy(logits, batch["labels"]), trained, optimizer))
    write_steps(output, steps)


def _first_state(folder: Path, output: Path) -> None:
    _head(folder, output, "first")


def _mean_of_states(folder: Path, output: Path) -> None:
    _head(folder, output, "mean")


def _mean_of_all_columns(folder: Path, output: Path) -> None:
    _head(folder, output, "all columns")


def _frozen_backbone(folder: Path, output: Path) -> None:
    _head(folder, output, "mean", frozen=True)


def _distilled(folder: Path, output: Path) -> None:
    """A frozen teacher's logits, at real tokens, and the student's own loss."""
    import torch

    model, tokenizer = _load(folder / "llama")
    teacher, _ = _load(folder / "teacher")
    teacher.eval().requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    steps = []
    for batch in _batches(tokenizer):
        outputs = model(**batch)
        with torch.no_grad():
            wanted = teacher(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        shown = batch["attention_mask"].bool()
        ours, theirs = outputs.logits[shown].log_softmax(-1), wanted[shown].log_softmax(-1)
        loss = torch.nn.functional.kl_div(ours, theirs, reduction="batchmean", log_target=True)
        steps.append(_step(0.5 * loss + 0.5 * outputs.loss, list(model.parameters()), optimizer))
    write_steps(output, steps)


def _sharpness(folder: Path, output: Path) -> None:
    """SAM: a second pass with weights moved along the gradient of the first."""
    import torch

    model, tokenizer = _load(folder / "llama")
    trained = list(model.parameters())
    optimizer, steps = torch.optim.SGD(trained, lr=0.05), []
    for batch in _batches(tokenizer):
        model(**batch).loss.backward()
        norm = torch.nn.utils.get_total_norm([each.grad for each in trained if each.grad is not None])
        moved = [0.05 * each.grad / norm for each in trained if each.grad is not None]
        with torch.no_grad():
            for each, by in zip(trained, moved, strict=True):
                each.add_(by)
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        with torch.no_grad():
            for each, by in zip(trained, moved, strict=True):
                each.sub_(by)
        steps.append({"first": float(norm), "loss": float(loss)})
        optimizer.step()
        optimizer.zero_grad()
    write_steps(output, steps)


def _averaged(folder: Path, output: Path) -> None:
    """A moving average of the weights in a copy, which is evaluated; and a loss that keeps the weights near it."""
    import torch

    model, tokenizer = _load(folder / "llama")
    average = copy.deepcopy(model).eval()
    optimizer, steps = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for batch in _batches(tokenizer):
        pairs = list(zip(model.parameters(), average.parameters(), strict=True))
        distance = sum(((one - other.detach()) ** 2).sum() for one, other in pairs)
        found = _step(model(**batch).loss + 0.1 * distance, list(model.parameters()), optimizer)
        with torch.no_grad():
            for one, other in pairs:
                other.lerp_(one, 0.1)
            found["average"] = float(average(**batch).loss)
        steps.append(found)
    write_steps(output, steps)


def _smoothed(folder: Path, output: Path) -> None:
    """R-Drop's two passes of a batch, label smoothing, and a penalty of the logits at real tokens."""
    import torch

    model, tokenizer = _load(folder / "llama")
    optimizer, steps = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for batch in _batches(tokenizer):
        labels = batch.pop("labels")
        logits = [model(**batch, use_cache=False).logits for _ in range(2)]
        losses = [
            torch.nn.functional.cross_entropy(
                each[:, :-1].transpose(1, 2), labels[:, 1:], ignore_index=-100, label_smoothing=0.1
            )
            for each in logits
        ]
        shown = batch["attention_mask"].bool()
        penalty = 1e-3 * logits[0][shown].logsumexp(-1).pow(2).mean()
        steps.append(_step(sum(losses) / 2 + penalty, list(model.parameters()), optimizer))
    write_steps(output, steps)


def _seq2seq(folder: Path, output: Path) -> None:
    """T5, labels alone for its decoder, Adafactor."""
    import torch

    model, tokenizer = _load(folder / "t5", "AutoModelForSeq2SeqLM")
    optimizer = torch.optim.Adafactor(model.parameters(), lr=1e-2)
    trained = list(model.parameters())
    write_steps(output, [_step(model(**batch).loss, trained, optimizer) for batch in _batches(tokenizer)])


RUNS: dict[str, Run] = {
    "the model's loss": _own_loop,
    "loss of logits, evaluation": _loss_of_logits,
    "accumulation by tokens, checkpointing, frozen embedding": _accumulated,
    "torch.compile": _compiled,
    "own head, first state": _first_state,
    "own head, mean of real tokens": _mean_of_states,
    "own head, mean of all columns": _mean_of_all_columns,
    "own head, frozen backbone": _frozen_backbone,
    "distillation": _distilled,
    "SAM": _sharpness,
    "moving average of weights": _averaged,
    "R-Drop, label smoothing, z-loss": _smoothed,
    "T5, Adafactor": _seq2seq,
}
"""What each run is called, and its loop."""

if __name__ == "__main__":
    RUNS[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
