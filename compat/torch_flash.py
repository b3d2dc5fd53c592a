"""A module of flash-attn's signature whose kernels are those that torch carries itself.

`aten_on_cpu` computes those kernels on a CPU, below torch's dispatcher: everything above them runs
there as it is."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch.nn import functional as F

from autopack.attention import choose
from autopack.attention.backends import varlen
from autopack.inspection.torches import attend_varlen
from compat.standins import flash_2_of, loadable, scores_within


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
    longest = operator.index(longest)  # as pybind11 does, which waits for a number on the device
    assert bounds.dtype == torch.int32
    size = q.shape[-1]
    scale, after = size**-0.5 if scale is None else scale, 0 if causal else window[1]
    # flash-attn pads heads to a multiple of 8 itself, and torch's kernels want that done.
    q, k, v = (F.pad(t, (0, -size % 8)) if size % 8 else t for t in (q, k, v))
    return attend_varlen(q, k, v, bounds, longest, scale, (window[0], after))[..., :size]


def _computed(given: Mapping[str, Any]) -> torch.Tensor:
    assert not given["softcap"], "torch's kernels have no softcap"
    q, k, v = states = given["q"], given["k"], given["v"]
    settings = given["softmax_scale"], given["causal"], given["window_size"]
    if "cu_seqlens_q" in given:
        # Not by value: that would make the host wait, in code whose waits are counted and timed.
        assert len(q) == len(k), "one set of documents for queries and keys"
        assert given["cu_seqlens_q"].shape == given["cu_seqlens_k"].shape
        return _attend(*states, given["cu_seqlens_q"], given["max_seqlen_q"], *settings)
    rows, length = q.shape[:2]
    bounds = torch.arange(0, rows * length + 1, length, dtype=torch.int32, device=q.device)
    flat_q, flat_k, flat_v = (t.reshape(-1, *t.shape[2:]) for t in (q, k, v))
    return _attend(flat_q, flat_k, flat_v, bounds, length, *settings).reshape(q.shape)


def _module() -> dict[str, ModuleType]:
    return flash_2_of(_computed)


@contextlib.contextmanager
def torch_kernels_as_flash_attn() -> Iterator[None]:
    """Load that module as flash-attn 2, by transformers' own loader."""
    from transformers import modeling_flash_attention_utils as flash

    with contextlib.ExitStack() as stack:
        stack.enter_context(loadable(_module()))
        stack.enter_context(
            mock.patch.object(flash, "is_flash_attn_2_available", return_value=True)
        )
        for name in vars(flash).copy():
            if name == "_loaded_implementation" or (name.startswith("_") and name.endswith("_fn")):
                stack.enter_context(mock.patch.object(flash, name, None))
        yield


@torch.autocast("cpu", enabled=False)  # a kernel computes in what it is given
def forward_on_cpu(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None, max_q: int, max_k: int, dropout_p: float, is_causal: bool, return_debug_mask: bool,
    *, scale: float | None = None, window_size_left: int | None = None, window_size_right: int | None = None,
    seqused_k: Any = None, alibi_slopes: Any = None, block_table: Any = None, num_splits: int | None = None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """`aten::_flash_attention_forward` of documents in a row: the output, its log-sum-exp (heads, tokens), and more."""
    assert seqused_k is alibi_slopes is block_table is None, "they are not for training"
    window = window_size_left, window_size_right
    scores, spread = _checked(
        query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, scale, window
    )
    output = torch.einsum("hqk,khd->qhd", scores.softmax(-1), spread).to(query.dtype)
    state, nothing = torch.zeros(2, dtype=torch.uint64), torch.empty(0)
    return output, scores.logsumexp(-1), state, nothing, nothing.clone()


@torch.autocast("cpu", enabled=False)
def backward_on_cpu(
    grad_out: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor,
    logsumexp: torch.Tensor, cum_seq_q: torch.Tensor, cum_seq_k: torch.Tensor, max_q: int, max_k: int, dropout_p: float,
    is_causal: bool, rng_state: torch.Tensor, unused: torch.Tensor, *, scale: float | None = None,
    window_size_left: int | None = None, window_size_right: int | None = None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """`aten::_flash_attention_backward`: it recomputes P = exp(S - lse) from the log-sum-exp that it is given."""
    window = window_size_left, window_size_right
    scores, spread = _checked(
        query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, scale, window
    )
    assert logsumexp.dtype == torch.float32
    assert logsumexp.shape == (query.shape[1], len(query))
    assert grad_out.dtype == out.dtype == query.dtype
    groups, scale = (
        query.shape[1] // key.shape[1],
        query.shape[-1] ** -0.5 if scale is None else scale,
    )
    grad, weights = grad_out.float(), torch.exp(scores - logsumexp.unsqueeze(-1))
    d_value = torch.einsum("hqk,qhd->khd", weights, grad)
    d_weights = torch.einsum("qhd,khd->hqk", grad, spread)
    d_scores = (
        weights * (d_weights - (grad * out.float()).sum(-1).transpose(0, 1).unsqueeze(-1)) * scale
    )
    d_query = torch.einsum("hqk,khd->qhd", d_scores, key.float().repeat_interleave(groups, dim=1))
    d_key = torch.einsum("hqk,qhd->khd", d_scores, query.float())
    d_key, d_value = (t.unflatten(1, (-1, groups)).sum(2) for t in (d_key, d_value))
    return d_query.to(query.dtype), d_key.to(key.dtype), d_value.to(value.dtype)


def _checked(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds_q: torch.Tensor | None,
    bounds_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout: float,
    causal: bool,
    scale: float | None,
    window: tuple[int | None, int | None],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits (heads, queries, keys) and values of every query head, in float32, of what the kernels
    do not refuse."""
    size = query.shape[-1]
    for name, states in (("query", query), ("key", key), ("value", value)):
        if states.dtype not in (torch.float16, torch.bfloat16) or states.dtype != query.dtype:
            raise RuntimeError(
                f"FlashAttention only supports fp16 and bf16 data type; {name} is {states.dtype}"
            )
        if states.dim() != 3 or states.stride(-1) != 1 or states.shape[-1] != size:
            raise RuntimeError(
                f"{name} must be (tokens, heads, {size}), contiguous in the last dimension"
            )
    if size % 8 or size > 256:
        raise RuntimeError(f"head sizes are multiples of 8, up to 256; found {size}")
    if query.shape[1] % key.shape[1]:
        raise RuntimeError("number of heads in key/value must divide number of heads in query")
    if dropout:
        raise RuntimeError("dropout is not for this stand-in")
    for bounds, states, longest in ((bounds_q, query, max_q), (bounds_k, key, max_k)):
        if bounds is None or bounds.dtype != torch.int32 or not bounds.is_contiguous():
            raise RuntimeError("cumulative lengths must be int32 and contiguous")
        if int(bounds[0]) or int(bounds[-1]) != len(states) or longest < int(bounds.diff().max()):
            raise RuntimeError(
                f"{bounds.tolist()} with a maximum of {longest} are not {len(states)} tokens"
            )
    assert bounds_q is not None
    assert bounds_k is not None
    q, k, v = (t.float() for t in (query, key, value))
    k, v = (t.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for t in (k, v))
    return scores_within(
        q, k, bounds_q, bounds_k, size**-0.5 if scale is None else scale, causal, window
    ), v


@contextlib.contextmanager
def aten_on_cpu() -> Iterator[None]:
    """Let torch's flash kernels, and with them the varlen backend, run on CPU tensors.

    The stand-ins are registered below the dispatcher: `varlen_attn` and its operators, autograd,
    and the schemas that arguments are checked against are torch's own."""

    def availability() -> tuple[bool, str]:
        return True, "stand-ins on a CPU"

    backend = replace(varlen.BACKEND, availability=availability, devices=None)
    with contextlib.ExitStack() as stack:
        library = stack.enter_context(torch.library._scoped_library("aten", "IMPL"))
        library.impl("_flash_attention_forward", forward_on_cpu, "CPU")
        library.impl("_flash_attention_backward", backward_on_cpu, "CPU")
        stack.enter_context(mock.patch.object(varlen, "refused_device", return_value=None))
        stack.enter_context(mock.patch.object(varlen, "availability", availability))
        stack.enter_context(mock.patch.dict(choose.BACKENDS, varlen=backend))
        yield
