"""A module of flash-attn's signature whose kernels are those that torch carries itself."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from autopack.inspection.torches import attend_varlen
from compat.standins import loadable


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bounds: torch.Tensor,
    longest: int,
    scale: float | None,
    causal: bool,
    window: tuple[int, int],
) -> torch.Tensor:
    assert isinstance(longest, int), "flash-attn takes Python ints"
    assert bounds.dtype == torch.int32
    after = 0 if causal else window[1]
    return attend_varlen(q, k, v, bounds, longest, q.shape[-1] ** -0.5 if scale is None else scale, (window[0], after))


def _module() -> dict[str, ModuleType]:
    def flash_attn_func(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
        causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Any = None,
        deterministic: bool = False, return_attn_probs: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        rows, length = q.shape[:2]
        bounds = torch.arange(0, rows * length + 1, length, dtype=torch.int32, device=q.device)
        flat = [t.reshape(-1, *t.shape[2:]) for t in (q, k, v)]
        return _attend(*flat, bounds, length, softmax_scale, causal, window_size).view(rows, length, *q.shape[2:])

    def flash_attn_varlen_func(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int, max_seqlen_k: int, dropout_p: float = 0.0, softmax_scale: float | None = None,
        causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Any = None,
        deterministic: bool = False, return_attn_probs: bool = False, block_table: Any = None,
    ) -> torch.Tensor:  # fmt: skip
        assert not softcap, "torch's kernels have no softcap"
        return _attend(q, k, v, cu_seqlens_q, max_seqlen_q, softmax_scale, causal, window_size)

    package, padding = ModuleType("flash_attn"), ModuleType("flash_attn.bert_padding")
    package.flash_attn_func = flash_attn_func  # type: ignore[attr-defined]
    package.flash_attn_varlen_func = flash_attn_varlen_func  # type: ignore[attr-defined]
    package.flash_attn_with_kvcache = None  # type: ignore[attr-defined]
    padding.pad_input = padding.unpad_input = None  # type: ignore[attr-defined]
    package.bert_padding = padding  # type: ignore[attr-defined]
    return {"flash_attn": package, "flash_attn.bert_padding": padding}


@contextlib.contextmanager
def torch_kernels_as_flash_attn() -> Iterator[None]:
    """Load that module as flash-attn 2, by transformers' own loader."""
    from transformers import modeling_flash_attention_utils as flash

    with contextlib.ExitStack() as stack:
        stack.enter_context(loadable(_module()))
        stack.enter_context(mock.patch.object(flash, "is_flash_attn_2_available", return_value=True))
        for name in vars(flash).copy():
            if name == "_loaded_implementation" or (name.startswith("_") and name.endswith("_fn")):
                stack.enter_context(mock.patch.object(flash, name, None))
        yield
