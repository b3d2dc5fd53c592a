"""What somebody writes who packs without a library: an attention function of torch's `varlen_attn`
for transformers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from autopack.inspection import torches

NAME = "varlen_by_hand"


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention of states (rows, heads, columns, head size) within the documents that the
    bounds say."""
    assert cu_seq_lens_q is not None
    assert max_length_q is not None
    rows, size = query.shape[0], query.shape[-1]
    # Under autocast rotary embeddings leave queries and keys in float32.
    flat = (states.to(value.dtype).transpose(1, 2).flatten(0, 1) for states in (query, key, value))
    scale = size**-0.5 if scaling is None else scaling
    return torches.attend_varlen(*flat, cu_seq_lens_q, max_length_q, scale, (-1, 0)).unflatten(
        0, (rows, -1)
    ), None


@contextlib.contextmanager
def registered() -> Iterator[None]:
    """Let transformers know it by `NAME`."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)
    try:
        yield
    finally:
        del AttentionInterface._global_mapping[NAME]
