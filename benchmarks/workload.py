"""What benchmarks of training share: documents like FLAN's, a Llama, and a step."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np

from autopack.bench.subjects import Lengths, draw

FLAN_LIKE = Lengths(420, 1.0)
"""Lengths like those of FLAN_20k: lognormal in tokens, with the spread that the paper calls
large."""
SHORTEST, LONGEST = 16, 2048


LLAMA = {"layers": 4, "hidden": 512, "heads": 8, "vocabulary": 8192}
"""Options of `of_options`, by their defaults."""


def filling(
    tokens: int, lengths: Lengths, seed: int, shortest: int = SHORTEST, longest: int = LONGEST
) -> list[int]:
    """Return lengths of documents that fill a row of so many tokens; the last one is cut to fit."""
    drawn = draw(lengths, tokens // shortest + 1, longest, seed, shortest=shortest)
    ends = np.minimum(np.cumsum(drawn), tokens)
    found = np.diff(ends[: int(np.searchsorted(ends, tokens)) + 1], prepend=0).tolist()
    if len(found) > 1 and found[-1] < shortest:  # no document shorter than the shortest
        found[-2:] = [found[-2] + found[-1]]
    return found


def llama(
    layers: int,
    hidden: int,
    heads: int,
    vocabulary: int,
    *,
    seed: int = 0,
    base: bool = False,
    **more: Any,
) -> Any:
    """Return a random Llama on sdpa, in training mode, in the proportions of the released ones;
    `base` has no head."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

    sizes: dict[str, Any] = {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "vocab_size": vocabulary,
    }
    sizes |= {
        "intermediate_size": hidden * 43 // 16,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
    }
    attn, dtype = more.pop("attn", "sdpa"), more.pop("dtype", torch.float32)
    torch.manual_seed(seed)
    kind: Any = LlamaModel if base else LlamaForCausalLM
    return kind._from_config(
        LlamaConfig(**{**sizes, **more}), attn_implementation=attn, dtype=dtype
    ).train()


def of_options(options: argparse.Namespace, positions: int) -> Any:
    """Return the Llama that options ask for."""
    sizes = (options.layers, options.hidden, options.heads, options.vocabulary)
    return llama(*sizes, seed=options.seed, max_position_embeddings=positions)


def step(model: Any, call: dict[str, Any], optimizer: Any = None) -> Callable[[], Any]:
    """Return an arm that trains on a call, with an optimizer's step where there is one; it gives
    loss and gradients."""

    def run() -> tuple[Any, list[Any]]:
        model.zero_grad()
        loss = model(**call).loss
        loss.backward()
        if optimizer is not None:
            optimizer.step()
        return loss.detach(), [each.grad for each in model.parameters()]

    return run
