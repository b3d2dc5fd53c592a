"""What benchmarks of training share: documents like FLAN's, a Llama, and the check that arms compute the same."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from autopack.bench.subjects import Lengths, draw
from benchmarks import interleave

FLAN_LIKE = Lengths(420, 1.0)
"""Lengths like those of FLAN_20k: lognormal in tokens, with the spread that the paper calls large."""
SHORTEST, LONGEST = 16, 2048
LOSS_TOLERANCE, GRADIENT_TOLERANCE = 1e-5, 1e-4
"""Relative. Two orders of float32 sums over thousands of tokens; a leak changes the loss in the third digit."""


def parser(about: str | None, rounds: int) -> argparse.ArgumentParser:
    """Return a parser of the options of a Llama, beside those of all benchmarks."""
    found = interleave.parser(about, rounds)
    for name, value in {"layers": 4, "hidden": 512, "heads": 8, "vocabulary": 8192}.items():
        found.add_argument(f"--{name}", type=int, default=value)
    return found


def filling(tokens: int, lengths: Lengths, seed: int, shortest: int = SHORTEST, longest: int = LONGEST) -> list[int]:
    """Return lengths of documents that fill a row of so many tokens; the last one is cut to fit."""
    drawn = draw(lengths, tokens // shortest + 1, longest, seed, shortest=shortest)
    ends = np.minimum(np.cumsum(drawn), tokens)
    found = np.diff(ends[: int(np.searchsorted(ends, tokens)) + 1], prepend=0).tolist()
    if len(found) > 1 and found[-1] < shortest:  # no document shorter than the shortest
        found[-2:] = [found[-2] + found[-1]]
    return found


def llama(
    layers: int, hidden: int, heads: int, vocabulary: int, *, seed: int = 0, base: bool = False, **more: Any
) -> Any:
    """Return a random Llama on sdpa, in training mode, in the proportions of the released ones; `base` has no head."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

    sizes: dict[str, Any] = {"num_hidden_layers": layers, "hidden_size": hidden, "vocab_size": vocabulary}
    sizes |= {"intermediate_size": hidden * 43 // 16, "num_attention_heads": heads, "num_key_value_heads": heads}
    attn, dtype = more.pop("attn", "sdpa"), more.pop("dtype", torch.float32)
    torch.manual_seed(seed)
    kind: Any = LlamaModel if base else LlamaForCausalLM
    return kind._from_config(LlamaConfig(**{**sizes, **more}), attn_implementation=attn, dtype=dtype).train()


def of_options(options: argparse.Namespace, positions: int) -> Any:
    """Return the Llama that options ask for."""
    sizes = (options.layers, options.hidden, options.heads, options.vocabulary)
    return llama(*sizes, seed=options.seed, max_position_embeddings=positions)


def check(arms: Mapping[str, Callable[[], tuple[Any, Iterable[Any]]]]) -> tuple[dict[str, float], float]:
    """Return the loss of every arm, which gives it and the parameters with its gradients, and the largest error.

    Raises where an arm differs from the first.
    """
    losses: dict[str, float] = {}
    wanted: list[Any] = []
    worst = 0.0
    for name, run in arms.items():
        loss, parameters = run()
        losses[name] = float(loss)
        found = [each.grad.clone() for each in parameters if each.grad is not None]
        wanted = wanted or found
        first = next(iter(losses.values()))
        assert abs(losses[name] / first - 1) <= LOSS_TOLERANCE, f"loss of {name}: {losses}"
        for one, other in zip(found, wanted, strict=True):
            error = float((one - other).norm() / other.norm())
            assert error <= GRADIENT_TOLERANCE, f"gradients of {name} differ by {error:.1e}"
            worst = max(worst, error)
    return losses, worst
