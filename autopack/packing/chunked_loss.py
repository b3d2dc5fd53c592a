"""The loss of causal language models without a second copy of the logits, for large vocabularies.

transformers' `ForCausalLMLoss` makes a float32 copy of all logits, and torch's cross entropy another one, which it
keeps for backward. Here both are made for a few tokens at a time, once in forward and once more in backward, and
nothing is kept but the logits themselves: recomputing costs less than writing and reading what would be kept (the
argument of FlashAttention, arXiv 2205.14135, section 3.1, with the vocabulary in the place of the keys).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd.forward_ad import unpack_dual

from autopack.calls.loss_site import meet
from autopack.errors import InvalidPacking, UnsupportedVersion
from autopack.inspection import releases
from autopack.layout import IGNORED_LABEL

_stock: Any = releases.shifting_loss()
if _stock is None:
    raise UnsupportedVersion(
        "autopack.chunked_loss needs transformers 4.47 or newer: before, models have no loss_function that can be set"
    )

_CHUNK = 2**22
"""Logits of a chunk: 16 MiB in float32."""


@functools.wraps(_stock, assigned=(), updated=())
def chunked_loss(
    logits: torch.Tensor,
    labels: torch.Tensor | None,
    vocab_size: int,
    num_items_in_batch: torch.Tensor | int | None = None,
    ignore_index: int = IGNORED_LABEL,
    shift_labels: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """The loss of transformers' causal language models, in less memory: `model.loss_function = autopack.chunked_loss`.

    Set it on the transformers model itself, enabled or not. The loss and its gradients are those of
    `ForCausalLMLoss` up to float32 rounding. Beside the logits, forward needs one chunk of them, and backward their
    gradient, in their own dtype; one that is to be differentiated again (`create_graph=True`) is made of all logits at
    once. Compiled code, transforms of `torch.func` and forward-mode derivatives, logits on several devices (`DTensor`)
    and other subclasses of tensors get transformers' own loss.

    Args:
        logits: (..., T, V) floats; computed with in float32, as transformers does.
        labels: (..., T) ints, `ignore_index` where a token is no target; unused where `shift_labels` are given.
        vocab_size: V.
        num_items_in_batch: what the sum over targets is divided by; their number if left out.
        ignore_index: the label of what is no target.
        shift_labels: (..., T) ints, the label of the next token at each token.
        kwargs: ignored, as transformers does.

    Returns a float32 scalar. Raises `InvalidPacking` where a label is no token of the vocabulary, on a CPU; on a GPU
    the kernel asserts, as torch's cross entropy does.
    """
    is_plain = type(logits) is torch.Tensor and not torch.compiler.is_compiling()
    if not is_plain or torch._C._are_functorch_transforms_active() or unpack_dual(logits).tangent is not None:
        return _stock(logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **kwargs)
    if shift_labels is None:
        assert labels is not None
        shift_labels = torch.nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    meet(shift_labels)
    targets = shift_labels.reshape(-1).to(logits.device)
    total = _CrossEntropy.apply(logits.reshape(-1, vocab_size), targets, ignore_index)
    if num_items_in_batch is None:
        return total / (targets != ignore_index).sum()
    return total / torch.as_tensor(num_items_in_batch, device=total.device)


# Whoever asks gets the annotations above; what is wrapped tells autopack that this loss shifts labels as that one does.
chunked_loss.__signature__ = inspect.signature(chunked_loss, follow_wrapped=False)  # type: ignore[attr-defined]


class _CrossEntropy(torch.autograd.Function):
    """The sum of cross entropies of logits (N, V) and targets (N), in float32."""

    @staticmethod
    def forward(logits: torch.Tensor, targets: torch.Tensor, ignored: int) -> torch.Tensor:
        counted = targets != ignored
        classes = targets.where(counted, 0)
        if classes.device.type == "cpu" and len(classes) and not 0 <= classes.min() <= classes.max() < logits.shape[1]:
            raise InvalidPacking(
                f"wanted labels from 0 to {logits.shape[1] - 1}, or {ignored} where a token is no target; found "
                f"{int(classes.min())} to {int(classes.max())}"
            )
        total = torch.zeros((), dtype=torch.float32, device=logits.device)
        for rows in _chunks(logits):
            found = logits[rows].log_softmax(-1, dtype=torch.float32).gather(-1, classes[rows, None])[:, 0]
            total -= found.where(counted[rows], 0.0).sum()
        return total

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, torch.Tensor, int], output: torch.Tensor) -> None:
        logits, targets, ctx.ignored = inputs
        ctx.save_for_backward(logits, targets)

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        logits, targets = ctx.saved_tensors
        counted = targets != ctx.ignored
        classes = targets.where(counted, 0)
        scale = upstream.where(counted, 0.0)[:, None]
        if torch.is_grad_enabled():  # to be differentiated again, so of differentiable parts
            part = logits.softmax(-1, dtype=torch.float32)
            minus = part.new_full((len(part), 1), -1.0)
            return (part.scatter_add(-1, classes[:, None], minus) * scale).to(logits.dtype), None, None
        gradient = torch.empty_like(logits)
        for rows in _chunks(logits):
            part = logits[rows].softmax(-1, dtype=torch.float32)
            part.scatter_add_(-1, classes[rows, None], part.new_full((len(part), 1), -1.0))
            gradient[rows] = part.mul_(scale[rows])
        return gradient, None, None


def _chunks(logits: torch.Tensor) -> Iterator[slice]:
    size = max(1, _CHUNK // logits.shape[1])
    return (slice(start, start + size) for start in range(0, len(logits), size))
