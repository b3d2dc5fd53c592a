"""CPU stand-ins for the kernels of causal-conv1d, mamba-ssm and flash-linear-attention.

The signatures are those of causal_conv1d 1.5, mamba_ssm 2.2 and fla 0.4; each is computed token by
token in torch. A stand-in refuses what the kernel refuses (but not float32, which fla's delta rules
do), and notes the bounds of documents that arrived.

    python -m compat.scans --types mamba2 qwen3_next        what arrives, and whether documents stay apart
    python -m compat.scans --without-bounds                 the same with kernels that cannot be told of documents

transformers looks for kernels when a modeling file is imported, so this is to be run in a process
of its own."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

import torch
from torch.nn.functional import linear, normalize, rms_norm, silu, softplus

from compat import study
from compat.kernels.compiled import convolved, scan
from compat.standins import of_signature

_PACKAGES = {"causal_conv1d": "causal-conv1d 1.5", "mamba_ssm": "mamba-ssm 2.2", "fla": "fla 0.4"}
BOUNDS = {"seq_idx", "cu_seqlens"}


ARRIVED: list[tuple[str, list[int] | None]] = []
"""Calls of the stand-ins: the name of each kernel, and the documents that it was told of, as their
lengths."""


def _lengths(seq_idx: torch.Tensor) -> list[int]:
    assert seq_idx.dtype == torch.int32, f"seq_idx must be int32, found {seq_idx.dtype}"
    assert seq_idx.is_contiguous()
    return [
        n for row in seq_idx for n in torch.unique_consecutive(row, return_counts=True)[1].tolist()
    ]


def causal_conv1d_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: Any,
    seq_idx: torch.Tensor | None,
    activation: str | None,
) -> torch.Tensor:
    rows, _, length = x.shape
    width = weight.shape[1]
    assert 2 <= width <= 4, "causal_conv1d only supports width between 2 and 4"
    assert activation in (None, "silu", "swish"), "activation must be None, silu, or swish"
    if seq_idx is not None:
        assert seq_idx.shape == (rows, length)
        assert x.stride(1) == 1, "seq_idx needs channels last"
    out = convolved(x, weight, bias, seq_idx)
    return out if activation is None else silu(out)


def mamba_chunk_scan_combined(
    x: Any, dt: Any, A: Any, B: Any, C: Any, D: Any, z: Any, dt_bias: Any, seq_idx: Any, dt_softplus: bool,
    dt_limit: Any,
) -> torch.Tensor:  # fmt: skip
    assert seq_idx is None or seq_idx.shape == x.shape[:2]
    dt = dt if dt_bias is None else dt + dt_bias
    dt = (softplus(dt) if dt_softplus else dt).clamp(*dt_limit)
    # `scan` has a number of each head for each of its channels
    dt, A, D = (t if t is None else t.repeat_interleave(x.shape[3], -1) for t in (dt, A, D))
    A, B, C = A[:, None].expand(-1, B.shape[3]), B.permute(0, 2, 3, 1), C.permute(0, 2, 3, 1)
    out, _ = scan(x.flatten(2).mT, dt.mT, A, B, C, D, None, None, False, seq_idx)
    out = out.mT.reshape(x.shape)
    return out if z is None else out * silu(z)


def chunk_gated_delta_rule(q, k, v, g, beta, scale, use_qk_l2norm_in_kernel, cu_seqlens):
    if cu_seqlens is not None and q.shape[0] != 1:
        raise ValueError(
            f"The batch size is expected to be 1 rather than {q.shape[0]} when using `cu_seqlens`."
        )
    q, k = (t.repeat_interleave(v.shape[2] // t.shape[2], dim=2) for t in (q, k))
    if use_qk_l2norm_in_kernel:
        q, k = normalize(q, dim=-1), normalize(k, dim=-1)
    q = q * (k.shape[-1] ** -0.5 if scale is None else scale)
    decay = g.exp() if g.dim() == 4 else g.exp()[..., None]
    starts = set() if cu_seqlens is None else set(cu_seqlens.tolist())
    state = q.new_zeros(*q.shape[:1], *q.shape[2:], v.shape[-1])
    tokens = []
    for t in range(q.shape[1]):
        state = torch.zeros_like(state) if t in starts else state * decay[:, t][..., None]
        seen = torch.einsum("bhk,bhkv->bhv", k[:, t], state)
        state = state + torch.einsum(
            "bhk,bhv->bhkv", k[:, t], (v[:, t] - seen) * beta[:, t][..., None]
        )
        tokens.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return torch.stack(tokens, dim=1), None


def mamba_split_conv1d_scan_combined(
    zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, seq_idx, dt_limit, activation, rmsnorm_weight,
    rmsnorm_eps, outproj_weight, outproj_bias, headdim, ngroups, norm_before_gate,
):  # fmt: skip
    heads = D.shape[0]
    inner = heads * headdim
    z, channels, dt = zxbcdt.split([inner, conv1d_weight.shape[0], heads], dim=-1)
    channels = causal_conv1d_fn(channels.mT, conv1d_weight, conv1d_bias, seq_idx, activation).mT
    states = (channels.shape[-1] - inner) // 2
    x, B, C = channels.split([inner, states, states], dim=-1)
    x, z = x.unflatten(-1, (heads, headdim)), z.unflatten(-1, (heads, headdim))
    B, C = B.unflatten(-1, (ngroups, -1)), C.unflatten(-1, (ngroups, -1))
    gated = z if rmsnorm_weight is None else None
    out = mamba_chunk_scan_combined(
        x, dt, A, B, C, D, gated, dt_bias, seq_idx, True, dt_limit
    ).flatten(-2)
    if rmsnorm_weight is not None:
        gate = silu(z.flatten(-2))
        out = (out if norm_before_gate else out * gate).unflatten(-1, (ngroups, -1))
        out = rms_norm(out, out.shape[-1:], eps=rmsnorm_eps).flatten(-2) * rmsnorm_weight
        out = out * gate if norm_before_gate else out
    return out if outproj_weight is None else linear(out, outproj_weight, outproj_bias)


def selective_scan_fn(u, delta, A, B, C, D, z, delta_bias, delta_softplus):
    out, _ = scan(u, delta, A, B[:, None], C[:, None], D, z, delta_bias, delta_softplus)
    return out if z is None else out * silu(z)


def mamba_inner_fn(
    xz, conv1d_weight, conv1d_bias, x_proj_weight, delta_proj_weight, out_proj_weight, out_proj_bias, A, D,
    delta_bias, delta_softplus, b_rms_weight, c_rms_weight, dt_rms_weight, b_c_dt_rms_eps,
):  # fmt: skip
    x, z = xz.chunk(2, dim=1)
    x = causal_conv1d_fn(x, conv1d_weight.squeeze(1), conv1d_bias, None, "silu")
    projected = x_proj_weight @ x
    dt, B, C = projected.split([delta_proj_weight.shape[1], A.shape[1], A.shape[1]], dim=1)
    dt = delta_proj_weight @ dt
    # The time step is normed after its projection, other than in the model.
    dt, B, C = (
        part
        if weight is None
        else rms_norm(part.mT, part.shape[1:2], weight.to(part.dtype), b_c_dt_rms_eps).mT
        for part, weight in ((dt, dt_rms_weight), (B, b_rms_weight), (C, c_rms_weight))
    )
    out = _noted("selective_scan_fn", selective_scan_fn)(
        x, dt, A, B, C, D, z, delta_bias, delta_softplus
    )
    return linear(out.mT, out_proj_weight, out_proj_bias)


_KERNELS: dict[str, Callable[..., Any]] = {
    "causal_conv1d.causal_conv1d_fn": causal_conv1d_fn,
    "mamba_ssm.ops.triton.ssd_combined.mamba_chunk_scan_combined": mamba_chunk_scan_combined,
    "mamba_ssm.ops.triton.ssd_combined.mamba_split_conv1d_scan_combined": mamba_split_conv1d_scan_combined,
    "mamba_ssm.ops.selective_scan_interface.selective_scan_fn": selective_scan_fn,
    "mamba_ssm.ops.selective_scan_interface.mamba_inner_fn": mamba_inner_fn,
    "fla.ops.gated_delta_rule.chunk_gated_delta_rule": chunk_gated_delta_rule,
    "fla.ops.kda.chunk_kda": chunk_gated_delta_rule,
}


def _noted(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(kernel)
    def stand_in(*args: Any, **given: Any) -> Any:
        seq_idx, cu_seqlens = given.get("seq_idx"), given.get("cu_seqlens")
        told = cu_seqlens.diff().tolist() if cu_seqlens is not None else None
        ARRIVED.append((name, told if seq_idx is None else _lengths(seq_idx)))
        return kernel(*args, **given)

    return stand_in


def _without_bounds(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The same kernel, as an old release might have it."""
    signature = inspect.signature(kernel)

    def older(*args: Any, **kwargs: Any) -> Any:
        assert not BOUNDS & kwargs.keys()
        return kernel(*args, **kwargs)

    kept = [p for name, p in signature.parameters.items() if name not in BOUNDS]
    older.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
    return older


def install(bounds: bool = True) -> None:
    """Make the stand-ins importable for the rest of the process; must come before any modeling file
    is imported."""
    for path, compute in _KERNELS.items():
        *parts, name = path.split(".")
        kernel = of_signature(_PACKAGES[parts[0]], name, _noted(name, compute))
        for i in range(1, len(parts) + 1):
            module = sys.modules.setdefault(".".join(parts[:i]), ModuleType(".".join(parts[:i])))
            module.__path__ = []
            if i > 1:
                setattr(sys.modules[".".join(parts[: i - 1])], parts[i - 1], module)
        setattr(module, name, kernel if bounds else _without_bounds(kernel))


def measure(model_type: str) -> dict[str, Any]:
    """Errors of an enabled tiny model on two packed rows, in training, and what arrived at the
    kernels."""
    import autopack
    from autopack import tiny
    from tests.conftest import alone, error, gradient_error, gradients, positions, weights_like

    rows = ((5, 1, 9, 3), (2, 12, 4))
    model = tiny.build(model_type)
    ids = tiny.tokens(model.config, 2, sum(rows[0]))
    expected = alone(model.train(), ids, *rows)
    weights = weights_like(expected)
    (expected * weights).sum().backward()
    wanted = gradients(model)
    ARRIVED.clear()
    with autopack.enable(model, verify=False) as handle:
        logits = model(input_ids=ids, position_ids=positions(*rows)).logits
        calls = list(ARRIVED)
        (logits * weights).sum().backward()
    return {
        "type": model_type,
        "mixers": [type(mixer).__name__ for mixer in handle.enabled.anatomy.mixers],
        "documents": [n for row in rows for n in row],
        "logits": error(logits, expected),
        "gradients": gradient_error(gradients(model), wanted),
        "calls": calls,
    }


def main() -> None:
    parser = study.parser_of(__doc__)
    parser.add_argument(
        "--types", nargs="+", default=["mamba", "mamba2", "qwen3_next", "kimi_linear"]
    )
    parser.add_argument("--without-bounds", action="store_true")
    options = parser.parse_args()
    install(bounds=not options.without_bounds)
    for model_type in options.types:
        print(json.dumps(measure(model_type)), flush=True)


if __name__ == "__main__":
    main()
