"""What benchmarks of training steps share: documents like FLAN's, a Llama, a step, and the check that arms agree."""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

MEAN, SIGMA = 420, 1.0
"""Documents like those of FLAN_20k: lognormal in tokens, of this mean, with the spread that the paper calls large."""
SHORTEST, LONGEST = 16, 2048
LOSS_TOLERANCE, GRADIENT_TOLERANCE = 1e-5, 1e-4
"""Relative. Two orders of float32 sums over thousands of tokens; a leak changes the loss in the third digit."""


def add_arguments(parser: argparse.ArgumentParser, rounds: int) -> None:
    """Add the options for the model, the rounds and the result; `rounds` is the default of --rounds."""
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=1, help="steps of each arm per round")
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="where to write the result; a .txt goes beside it")


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """The options that a result depends on."""
    return {name: value for name, value in vars(options).items() if name not in ("json", "peak_of")}


def lengths(seed: int) -> Iterator[int]:
    """Lengths of documents, without end."""
    generator = random.Random(seed)
    while True:
        drawn = round(generator.lognormvariate(math.log(MEAN) - SIGMA**2 / 2, SIGMA))
        yield min(max(drawn, SHORTEST), LONGEST)


def tokens(count: int, options: argparse.Namespace) -> Any:
    """Random tokens in one row, (1, count) int64."""
    import torch

    return torch.randint(options.vocabulary, (1, count), generator=torch.Generator().manual_seed(options.seed))


def padded(ids: Any, labels: Any, documents: list[int]) -> dict[str, Any]:
    """The documents of a row as a right-padded batch."""
    from torch.nn.utils.rnn import pad_sequence

    def pad(row: Any, value: int) -> Any:
        return pad_sequence(list(row[0].split(documents)), batch_first=True, padding_value=value)

    columns = {"input_ids": pad(ids, 0), "attention_mask": pad(ids.new_ones(ids.shape), 0), "labels": pad(labels, -100)}
    return {**columns, "use_cache": False}


def build(options: argparse.Namespace, positions: int) -> Any:
    """A random Llama in the proportions of the released ones."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=options.layers,
        hidden_size=options.hidden,
        intermediate_size=options.hidden * 43 // 16,
        num_attention_heads=options.heads,
        num_key_value_heads=options.heads,
        vocab_size=options.vocabulary,
        max_position_embeddings=positions,
    )
    torch.manual_seed(options.seed)
    return LlamaForCausalLM._from_config(config, attn_implementation="sdpa", dtype=torch.float32).train()


def check(prepared: dict[str, tuple[Any, dict[str, Any]]]) -> tuple[dict[str, float], float]:
    """The loss of every arm, and the largest relative error of a gradient; raises where arms differ from the first."""
    losses, wanted, worst = {}, None, 0.0
    for name, (model, call) in prepared.items():
        loss = model(**call).loss
        loss.backward()
        gradients = [p.grad for p in model.parameters()]
        losses[name] = loss.item()
        if wanted is None:
            wanted = loss.item(), [g.clone() for g in gradients]
        assert abs(losses[name] / wanted[0] - 1) <= LOSS_TOLERANCE, f"loss of {name}: {losses}"
        for found, gradient in zip(gradients, wanted[1], strict=True):
            error = ((found - gradient).norm() / gradient.norm()).item()
            assert error <= GRADIENT_TOLERANCE, f"gradients of {name} differ by {error:.1e}"
            worst = max(worst, error)
        model.zero_grad()
    return losses, worst


def backward(model: Any, call: dict[str, Any]) -> None:
    """Forward and backward, reading nothing but the loss."""
    model(**call).loss.backward()


def step(
    model: Any, call: dict[str, Any], steps: int, backward: Callable[[Any, dict[str, Any]], None] = backward
) -> Callable[..., None]:
    """An arm: so many optimizer steps on this call, or on another that is given."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

    def run(call: dict[str, Any] = call) -> None:
        for _ in range(steps):
            backward(model, call)
            optimizer.step()
            optimizer.zero_grad()

    return run
