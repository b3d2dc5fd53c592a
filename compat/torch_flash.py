"""A module of flash-attn's signature whose kernels are those that torch carries itself.

`aten_on_cpu` computes those kernels on a CPU, below torch's dispatcher: everything above them runs
there as it is."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.nn import functional as F

from autopack.attention import choose
from autopack.inspection.torches import attend_varlen
from compat.standins import by_head, check_bounds, flash_2_of, loaded_as, scores_within


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


def _computed(
    q: Any, k: Any, v: Any, softmax_scale: Any, causal: Any, window_size: Any, softcap: Any,
    deterministic: Any, cu_seqlens_q: Any = None, cu_seqlens_k: Any = None, max_seqlen_q: Any = None,
    max_seqlen_k: Any = None,
) -> torch.Tensor:  # fmt: skip
    assert not softcap, "torch's kernels have no softcap"
    settings = softmax_scale, causal, window_size
    if cu_seqlens_q is not None:
        # Not by value: that would make the host wait, in code whose waits are counted and timed.
        assert len(q) == len(k), "one set of documents for queries and keys"
        assert cu_seqlens_q.shape == cu_seqlens_k.shape
        return _attend(q, k, v, cu_seqlens_q, max_seqlen_q, *settings)
    rows, length = shape = q.shape[:2]
    bounds = torch.arange(0, rows * length + 1, length, dtype=torch.int32, device=q.device)
    q, k, v = (t.flatten(0, 1) for t in (q, k, v))
    return _attend(q, k, v, bounds, length, *settings).unflatten(0, shape)


@contextlib.contextmanager
def torch_kernels_as_flash_attn() -> Iterator[None]:
    """Load that module as flash-attn 2, by transformers' own loader."""
    with loaded_as("flash_attention_2", flash_2_of(_computed)):
        yield


def _forward(given: Any) -> tuple[torch.Tensor, ...]:
    """`aten::_flash_attention_forward` of documents in a row: the output, its log-sum-exp (heads,
    tokens), and more."""
    unused = given.seqused_k, given.alibi_slopes
    assert unused == (None, None), "they are not for training"
    scores, _, spread = _checked(given)
    output = torch.einsum("hqk,khd->qhd", scores.softmax(-1), spread).to(given.query.dtype)
    state, nothing = torch.zeros(2, dtype=torch.uint64), torch.empty(0)
    return output, scores.logsumexp(-1), state, nothing, nothing.clone()


def _backward(given: Any) -> tuple[torch.Tensor, ...]:
    """`aten::_flash_attention_backward`: it recomputes P = exp(S - lse) from the log-sum-exp that
    it is given."""
    query, key, logsumexp = given.query, given.key, given.logsumexp
    scores, scale, spread = _checked(given)
    assert logsumexp.dtype == torch.float32
    assert logsumexp.shape == (query.shape[1], len(query))
    assert given.grad_out.dtype == given.out.dtype == query.dtype
    grad, weights = given.grad_out.float(), torch.exp(scores - logsumexp.unsqueeze(-1))
    d_value = torch.einsum("hqk,qhd->khd", weights, grad)
    d_weights = torch.einsum("qhd,khd->hqk", grad, spread)
    moved = (grad * given.out.float()).sum(-1).transpose(0, 1).unsqueeze(-1)
    d_scores = weights * (d_weights - moved) * scale
    d_query = torch.einsum("hqk,khd->qhd", d_scores, by_head(query, key).float())
    d_key = torch.einsum("hqk,qhd->khd", d_scores, query.float())
    d_key, d_value = (t.unflatten(1, (key.shape[1], -1)).sum(2) for t in (d_key, d_value))
    return tuple(each.to(query.dtype) for each in (d_query, d_key, d_value))


def _checked(given: Any) -> tuple[torch.Tensor, float, torch.Tensor]:
    """Logits (heads, queries, keys), their scale, and values of every query head, in float32, of
    what the kernels do not refuse."""
    query, key, value = states = given.query, given.key, given.value
    size = query.shape[-1]
    if query.dtype not in (torch.float16, torch.bfloat16):
        raise RuntimeError(f"FlashAttention only supports fp16 and bf16, not {query.dtype}")
    for each in states:
        if each.dtype != query.dtype or each.shape[2:] != (size,) or each.stride(-1) != 1:
            raise RuntimeError(
                f"states must be (tokens, heads, {size}) of {query.dtype}, contiguous in the last "
                "dimension"
            )
    if size % 8 or size > 256:
        raise RuntimeError(f"head sizes are multiples of 8, up to 256; found {size}")
    if given.dropout_p:
        raise RuntimeError("dropout is not for this stand-in")
    check_bounds("q", given.cum_seq_q, len(query), given.max_q)
    check_bounds("k", given.cum_seq_k, len(key), given.max_k)
    q, k, v = query.float(), by_head(query, key).float(), by_head(query, value).float()
    scale = size**-0.5 if given.scale is None else given.scale
    window = given.window_size_left, given.window_size_right
    bounds = given.cum_seq_q, given.cum_seq_k
    return scores_within(q, k, *bounds, scale, given.is_causal, window), scale, v


def _below(name: str, compute: Callable[[Any], Any]) -> Callable[..., Any]:
    """An implementation of an operator of aten; `compute` gets its arguments, by their names."""
    arguments = getattr(torch.ops.aten, name).default._schema.arguments
    defaults = {each.name: each.default_value for each in arguments}

    @torch.autocast("cpu", enabled=False)  # a kernel computes in what it is given
    def run(*args: Any, **kwargs: Any) -> Any:
        return compute(
            SimpleNamespace(**defaults | dict(zip(defaults, args, strict=False)) | kwargs)
        )

    return run


@contextlib.contextmanager
def aten_on_cpu() -> Iterator[None]:
    """Let torch's flash kernels, and with them the varlen backend, run on CPU tensors.

    The stand-ins are registered below the dispatcher: `varlen_attn` and its operators, autograd,
    and the schemas that arguments are checked against are torch's own."""

    def availability() -> tuple[bool, str]:
        return True, "stand-ins on a CPU"

    backend = replace(choose.VARLEN, availability=availability, devices=None)
    with contextlib.ExitStack() as stack:
        library = stack.enter_context(torch.library._scoped_library("aten", "IMPL"))
        for name, compute in (("forward", _forward), ("backward", _backward)):
            operator_name = f"_flash_attention_{name}"
            library.impl(operator_name, _below(operator_name, compute), "CPU")
        stack.enter_context(mock.patch.object(choose, "refused_device", return_value=None))
        stack.enter_context(mock.patch.object(choose, "varlen_here", availability))
        stack.enter_context(mock.patch.dict(choose.BACKENDS, varlen=backend))
        yield
