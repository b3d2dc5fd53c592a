"""What models cost that no common attention serves: packed rows against one document at a time, and against padding.

    python -m benchmarks.ways
    python -m benchmarks.ways --json benchmarks/results/ways.json

One model for each way in which autopack keeps documents apart that is not the attention function of transformers:
biases of distances, halves of encoder-decoders and whole models that run on documents alone, layers that do. Random,
mostly four layers of 256, on documents of lognormal lengths. Forward and backward, in training mode without dropout.
Arms:

* `alone`: stock, a call for each document.
* `padded`: stock, all documents in one padded batch. Some of these models give other results there, and are timed all
  the same.
* `packed`: `autopack.enable(model)`, one packed row that `PackingCollator` makes.

Losses of `alone` and `packed` are compared first. The goal: `packed` is never slower than `alone`.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Iterator
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
"""Windows and blocks as they are to documents of some hundred tokens in practice (a tiny model's are a few tokens), and
sizes of types that take none of `SIZES` (None) or want others beside them."""
TOLERANCE = 1e-4
"""Largest relative difference of losses in float32."""


def documents(model: Any, task: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return examples with labels, of lognormal lengths, and for encoder-decoders targets half as long."""
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
    """What a decoder reads to predict a target: FSMT makes it of the encoder's tokens, and is told instead."""
    return [model.config.decoder_start_token_id or model.config.eos_token_id, *target[:-1]]


def packed(model: Any, examples: list[dict[str, Any]]) -> dict[str, Any]:
    """One packed row of the examples; of an encoder-decoder, one for each half."""
    import torch

    import autopack

    if not model.config.is_encoder_decoder:
        return autopack.PackingCollator.for_model(model)(examples)
    row: dict[str, list[int]] = {"input_ids": [], "attention_mask": [], "labels": [], "decoder_attention_mask": []}
    for number, example in enumerate(examples, start=1):
        row["input_ids"] += example["input_ids"]
        row["attention_mask"] += [number] * len(example["input_ids"])
        row["labels"] += example["labels"]
        row["decoder_attention_mask"] += [number] * len(example["labels"])
    if model.config.model_type == "fsmt":
        row["decoder_input_ids"] = [token for example in examples for token in shifted(model, example["labels"])]
    return {name: torch.tensor([values]) for name, values in row.items()}


def padded(model: Any, examples: list[dict[str, Any]]) -> dict[str, Any]:
    """The examples as rows, filled up on the right as transformers' collators do."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    def filled(values: list[list[int]], padding: int) -> torch.Tensor:
        return pad_sequence([torch.tensor(each) for each in values], batch_first=True, padding_value=padding)

    padding = model.config.pad_token_id or 0
    ids, labels = ([each[name] for each in examples] for name in ("input_ids", "labels"))
    batch = {"input_ids": filled(ids, padding), "attention_mask": filled([[1] * len(each) for each in ids], 0)}
    batch["labels"] = filled(labels, -100) if isinstance(labels[0], list) else torch.tensor(labels)
    if model.config.model_type == "fsmt":
        batch["decoder_input_ids"] = filled([shifted(model, each) for each in labels], padding)
    return batch


def counted(model: Any, labels: Any) -> int:
    """Return how many labels a document's loss is the mean of."""
    shifts = labels.ndim > 1 and shifts_labels(model)
    return int((labels[:, 1:] if shifts else labels).ne(-100).sum())


def measure(name: str, task: str, options: argparse.Namespace) -> dict[str, Any]:
    """The summaries of the arms, and the relative difference of the losses of `alone` and `packed`."""
    import autopack
    from autopack import tiny
    from autopack.registry import family_for

    overrides = {field: size for field, size in {**SIZES, **OWN.get(name, {})}.items() if size is not None}
    stock = tiny.build(name, task=task, **overrides).train()
    model = copy.deepcopy(stock)
    autopack.enable(model)
    examples = documents(stock, task, options)
    row, rows = packed(model, examples), padded(stock, examples)
    single = [padded(stock, [example]) for example in examples]
    counts = [counted(stock, batch["labels"]) for batch in single]

    def step(of: Any, batch: dict[str, Any], weight: float = 1.0) -> float:
        loss = of(**batch).loss
        (weight * loss).backward()
        return float(loss.detach())

    def alone() -> float:
        losses = [step(stock, batch, count / sum(counts)) for batch, count in zip(single, counts, strict=True)]
        stock.zero_grad()
        return sum(loss * count for loss, count in zip(losses, counts, strict=True)) / sum(counts)

    def one(of: Any, batch: dict[str, Any]) -> Callable[[], float]:
        def run() -> float:
            loss = step(of, batch)
            of.zero_grad()
            return loss

        return run

    arms: dict[str, Callable[[], Any]] = {"alone": alone, "packed": one(model, row)}
    expected, found = arms["alone"](), arms["packed"]()
    apart = abs(found - expected) / abs(expected)
    if not apart < TOLERANCE:
        raise SystemExit(f"{name}: packed rows have a loss of {found}, documents alone {expected}")
    try:
        one(stock, rows)()
    except Exception as error:  # whatever stock's own code raises for such a batch
        without = f"{type(error).__name__}: {error}".splitlines()[0]
    else:
        arms["padded"], without = one(stock, rows), None
    return {
        "task": task,
        "how": family_for(model).how,
        "apart": apart,
        "padded tokens per real one": rows["input_ids"].numel() / sum(len(each["input_ids"]) for each in examples),
        "stock refuses padding": without,
        "arms": interleave.interleave(arms, options.rounds, None),
    }


def describe(result: dict[str, Any]) -> Iterator[str]:
    """Yield the arms of each type as ratios to one document at a time."""
    width, settings = max(map(len, result["types"])), result["settings"]
    lengths = f"{settings['documents']} documents, lengths with a mean of {settings['mean']}"
    yield from (f"{lengths}; the medians of {settings['rounds']} rounds", "")
    yield f"{'':{width}}  speed of packed x alone  x padded  padded tokens per real one  apart"
    slower = []
    for name, found in result["types"].items():
        ratios = {arm: 1 / of["median"] for arm, of in interleave.speeds(found["arms"], "packed").items()}
        slower += [name] if ratios["alone"] < 1 else []
        padding = f"{ratios['padded']:8.2f}" if "padded" in ratios else "       -"
        tokens = f"{found['padded tokens per real one']:26.2f}"
        yield f"{name:{width}}  {ratios['alone']:23.2f}  {padding}  {tokens}  {found['apart']:.0e}"
    yield from ("", *(f"{name}: {found['how']}" for name, found in result["types"].items()))
    yield from ("", f"slower than one document at a time: {', '.join(slower) or 'none'}")


def main() -> None:
    parser = interleave.parser(__doc__, rounds=5)
    parser.add_argument("--types", nargs="+", choices=TYPES, default=list(TYPES))
    parser.add_argument("--documents", type=int, default=24)
    parser.add_argument("--mean", type=int, default=120)
    parser.add_argument("--longest", type=int, default=480)
    options = parser.parse_args()
    where = interleave.begin(options)
    types = {}
    for name in options.types:
        types[name] = measure(name, TYPES[name], options)
        print(f"{name}: done", flush=True)
    result = interleave.result_of("ways", options, where, sizes={**SIZES, "own": OWN}, types=types)
    interleave.write(options.json, result, describe(result))


if __name__ == "__main__":
    main()
