"""What models cost that no common attention serves: packed rows against one document at a time, and
against padding.

    python -m benchmarks.ways
    python -m benchmarks.ways --json benchmarks/results/ways.json

One model for each way in which autopack keeps documents apart that is not the attention function of
transformers: biases of distances, halves of encoder-decoders and whole models that run on documents
alone, layers that do. Random, mostly four layers of 256, on documents of lognormal lengths. Forward
and backward, in training mode without dropout. Arms:

* `alone`: stock, a call for each document.
* `padded`: stock, all documents in one padded batch. Some of these models give other results there,
  and are timed all the same.
* `packed`: `autopack.enable(model)`, one packed row that `PackingCollator` makes.

Losses of `alone` and `packed` are compared first. The goal: `packed` is never slower than `alone`.
"""

from __future__ import annotations

import argparse
import copy
from functools import partial
from typing import Any

from autopack.bench.subjects import Lengths, draw
from autopack.inspection.source import shifts_labels
from benchmarks import interleave

TYPES = {
    "bloom": "causal-lm",
    "mpt": "causal-lm",
    "llama4_text": "causal-lm",
    "xlnet": "causal-lm",
    "reformer": "causal-lm",
    "cpmant": "causal-lm",
    "deepseek_v4": "causal-lm",
    "mra": "masked-lm",
    "yoso": "masked-lm",
    "nystromformer": "masked-lm",
    "funnel": "masked-lm",
    "perceiver": "sequence-classification",
    "canine": "sequence-classification",
    "led": "seq2seq",
    "longt5": "seq2seq",
    "pegasus_x": "seq2seq",
    "fsmt": "seq2seq",
    "prophetnet": "seq2seq",
    "nllb-moe": "seq2seq",
    "t5gemma2": "seq2seq",
}
"""A model type for each way, and the task that it is asked in."""
SIZES = {"hidden_size": 256, "num_hidden_layers": 4}
OWN: dict[str, dict[str, Any]] = {
    "led": {"attention_window": [64] * 4},
    "longt5": {"local_radius": 63},
    "pegasus_x": {"block_size": 64},
    "xlnet": {"d_head": 64},
    "funnel": {"num_hidden_layers": None, "block_sizes": [2, 2]},
    "prophetnet": {"num_hidden_layers": None, "num_encoder_layers": 4, "num_decoder_layers": 4},
    "reformer": {"hidden_size": None, "num_hidden_layers": None},
    "t5gemma2": {"hidden_size": None, "num_hidden_layers": None},
    "perceiver": {"hidden_size": None, "num_hidden_layers": None},
    "nllb-moe": {"output_router_logits": False},
}
"""Windows and blocks as they are to documents of some hundred tokens in practice (a tiny model's
are a few tokens), and sizes of types that take none of `SIZES` (None) or want others beside
them."""


def documents(model: Any, task: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return examples with labels, of lognormal lengths, and for encoder-decoders targets half as
    long."""
    from autopack import tiny

    number, found = options.documents, []
    drawn = draw(Lengths(options.mean, 0.7), number, options.longest, options.seed, shortest=8)
    for place, length in enumerate(drawn.tolist()):
        ids = labels = tiny.tokens(model.config, length, seed=place).tolist()
        if task == "seq2seq":
            labels = tiny.tokens(model.config, max(4, length // 2), seed=number + place).tolist()
        elif task == "sequence-classification":
            labels = place % model.config.num_labels
        found.append({"input_ids": ids, "labels": labels})
    return found


def shifted(model: Any, target: list[int]) -> list[int]:
    """What a decoder reads to predict a target: FSMT makes it of the encoder's tokens, and is told
    instead."""
    return [model.config.decoder_start_token_id or model.config.eos_token_id, *target[:-1]]


def packed(model: Any, examples: list[dict[str, Any]]) -> dict[str, Any]:
    """One packed row of the examples; of an encoder-decoder, one for each half."""
    import torch

    import autopack

    if not model.config.is_encoder_decoder:
        return autopack.PackingCollator.for_model(model)(examples)
    row: dict[str, list[int]] = {
        "input_ids": [],
        "attention_mask": [],
        "labels": [],
        "decoder_attention_mask": [],
    }
    for number, example in enumerate(examples, start=1):
        row["input_ids"] += example["input_ids"]
        row["attention_mask"] += [number] * len(example["input_ids"])
        row["labels"] += example["labels"]
        row["decoder_attention_mask"] += [number] * len(example["labels"])
    if model.config.model_type == "fsmt":
        row["decoder_input_ids"] = [
            token for example in examples for token in shifted(model, example["labels"])
        ]
    return {name: torch.tensor([values]) for name, values in row.items()}


def padded(model: Any, examples: list[dict[str, Any]]) -> dict[str, Any]:
    """The examples as rows, filled up on the right as transformers' collators do."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    def filled(values: list[list[int]], padding: int) -> torch.Tensor:
        return pad_sequence(
            [torch.tensor(each) for each in values], batch_first=True, padding_value=padding
        )

    padding = model.config.pad_token_id or 0
    ids, labels = ([each[name] for each in examples] for name in ("input_ids", "labels"))
    batch = {
        "input_ids": filled(ids, padding),
        "attention_mask": filled([[1] * len(each) for each in ids], 0),
    }
    batch["labels"] = filled(labels, -100) if isinstance(labels[0], list) else torch.tensor(labels)
    if model.config.model_type == "fsmt":
        batch["decoder_input_ids"] = filled([shifted(model, each) for each in labels], padding)
    return batch


def counted(model: Any, labels: Any) -> int:
    """Return how many labels a document's loss is the mean of."""
    shifts = labels.ndim > 1 and shifts_labels(model)
    return int((labels[:, 1:] if shifts else labels).ne(-100).sum())


def race_of(options: argparse.Namespace, *, name: str) -> interleave.Race:
    """Return the race of a model type."""
    import autopack
    from autopack import tiny
    from autopack.registry import family_for

    task = TYPES[name]
    overrides = {
        field: size for field, size in {**SIZES, **OWN.get(name, {})}.items() if size is not None
    }
    stock = tiny.build(name, task=task, **overrides).train()
    model = copy.deepcopy(stock)
    autopack.enable(model)
    examples = documents(stock, task, options)
    row, rows = packed(model, examples), padded(stock, examples)
    single = [padded(stock, [example]) for example in examples]
    counts = [counted(stock, batch["labels"]) for batch in single]

    def run(of: Any, batches: list[dict[str, Any]], shares: list[float]) -> Any:
        of.zero_grad()
        total = 0.0
        for batch, share in zip(batches, shares, strict=True):
            loss = share * of(**batch).loss
            loss.backward()
            total += loss.detach()
        return total

    shares = [count / sum(counts) for count in counts]
    arms = {
        "alone": partial(run, stock, single, shares),
        "packed": partial(run, model, [row], [1.0]),
    }
    real = sum(len(each["input_ids"]) for each in examples)
    facts = {"padded tokens per real one": round(rows["input_ids"].numel() / real, 2)}
    try:
        run(stock, [rows], [1.0])
    except Exception as error:  # whatever stock's own code raises for such a batch
        facts["stock refuses padding:"] = f"{type(error).__name__}: {error}".splitlines()[0]
    else:
        arms["padded"] = partial(run, stock, [rows], [1.0])
    return interleave.Race(
        arms,
        "packed",
        {"alone": 1.0},
        wrong=("padded",),
        facts={**facts, "way": family_for(model).how},
    )


if __name__ == "__main__":
    races = {name: partial(race_of, name=name) for name in TYPES}
    interleave.main("ways", __doc__, races, documents=24, mean=120, longest=480)
