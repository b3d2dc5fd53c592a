"""CPU stand-ins for the kernels of causal-conv1d, mamba-ssm and flash-linear-attention.

The signatures are those of causal_conv1d 1.5, mamba_ssm 2.2 and fla 0.4; each is computed token by
token in torch. A stand-in refuses what the kernel refuses (but not float32, which fla's delta rules
do), and notes the bounds of documents that arrived.

    python -m compat.scans --types mamba2 qwen3_next        what arrives, and whether documents stay apart
    python -m compat.scans --without-bounds                 the same with kernels that cannot be told of documents

transformers looks for kernels when a modeling file is imported, so this is to be run in a process
of its own."""

from __future__ import annotations

import argparse
import inspect
import json
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch.nn.functional import normalize, rms_norm, silu, softplus

from compat.kernels.compiled import convolved, scan

INFINITY = float("inf")
BOUNDS = {"seq_idx", "cu_seqlens"}


class Arrived:
    """What the stand-ins were called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[int] | None]] = []

    def note(self, name: str, bounds: list[int] | None) -> None:
        """Keep the name of a kernel and the documents that it was told of, as their lengths."""
        self.calls.append((name, bounds))


def _lengths(seq_idx: torch.Tensor) -> list[int]:
    assert seq_idx.dtype == torch.int32, f"seq_idx must be int32, found {seq_idx.dtype}"
    assert seq_idx.is_contiguous()
    return [
        n for row in seq_idx for n in torch.unique_consecutive(row, return_counts=True)[1].tolist()
    ]


def _fresh(seq_idx: torch.Tensor | None, t: int) -> Any:
    """Factor (rows,) that is 0 where token `t` starts a document."""
    return 1.0 if seq_idx is None else (seq_idx[:, t] == seq_idx[:, t - 1]).float()


def _convolve(
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


def _chunk_scan(
    x: Any,
    dt: Any,
    A: Any,
    B: Any,
    C: Any,
    D: Any,
    z: Any,
    dt_bias: Any,
    seq_idx: Any,
    dt_softplus: bool,
    limit: Any,
) -> torch.Tensor:
    rows, length, heads, _ = x.shape
    if seq_idx is not None:
        assert seq_idx.shape == (rows, length)
    dt = dt if dt_bias is None else dt + dt_bias
    dt = (softplus(dt) if dt_softplus else dt).clamp(*limit)
    B, C = (t.repeat_interleave(heads // t.shape[2], dim=2) for t in (B, C))
    state = x.new_zeros(rows, heads, x.shape[3], B.shape[3])
    tokens = []
    for t in range(length):
        if t:
            state = state * (_fresh(seq_idx, t) * torch.ones(rows))[:, None, None, None]
        update = torch.einsum("bh,bhp,bhn->bhpn", dt[:, t], x[:, t], B[:, t])
        state = state * torch.exp(dt[:, t] * A)[:, :, None, None] + update
        tokens.append(torch.einsum("bhpn,bhn->bhp", state, C[:, t]))
    out = torch.stack(tokens, dim=1)
    if D is not None:
        out = out + x * D[:, None]
    return out if z is None else out * silu(z)


def _delta_rule(
    q: Any, k: Any, v: Any, g: Any, beta: Any, scale: Any, normal: bool, cu_seqlens: Any
) -> torch.Tensor:
    if cu_seqlens is not None and q.shape[0] != 1:
        raise ValueError(
            f"The batch size is expected to be 1 rather than {q.shape[0]} when using `cu_seqlens`."
        )
    q, k = (t.repeat_interleave(v.shape[2] // t.shape[2], dim=2) for t in (q, k))
    if normal:
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
    return torch.stack(tokens, dim=1)


def _kernels(arrived: Arrived) -> dict[str, Callable[..., Any]]:
    def causal_conv1d_fn(
        x, weight, bias=None, seq_idx=None, initial_states=None, return_final_states=False, final_states_out=None,
        activation=None,
    ):  # fmt: skip
        arrived.note("causal_conv1d_fn", None if seq_idx is None else _lengths(seq_idx))
        return _convolve(x, weight, bias, seq_idx, activation)

    def mamba_chunk_scan_combined(
        x, dt, A, B, C, chunk_size, D=None, z=None, dt_bias=None, initial_states=None, seq_idx=None, cu_seqlens=None,
        dt_softplus=False, dt_limit=(0.0, INFINITY), return_final_states=False, return_varlen_states=False,
    ):  # fmt: skip
        assert cu_seqlens is None or return_varlen_states, "cu_seqlens keeps nothing apart here"
        arrived.note("mamba_chunk_scan_combined", None if seq_idx is None else _lengths(seq_idx))
        return _chunk_scan(x, dt, A, B, C, D, z, dt_bias, seq_idx, dt_softplus, dt_limit)

    def mamba_split_conv1d_scan_combined(
        zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, chunk_size, initial_states=None, seq_idx=None,
        dt_limit=(0.0, INFINITY), return_final_states=False, activation="silu", rmsnorm_weight=None, rmsnorm_eps=1e-6,
        outproj_weight=None, outproj_bias=None, headdim=None, ngroups=1, norm_before_gate=True,
    ):  # fmt: skip
        arrived.note(
            "mamba_split_conv1d_scan_combined", None if seq_idx is None else _lengths(seq_idx)
        )
        heads = D.shape[0]
        inner = heads * headdim
        z, channels, dt = zxbcdt.split([inner, conv1d_weight.shape[0], heads], dim=-1)
        channels = channels.transpose(1, 2)
        channels = _convolve(channels, conv1d_weight, conv1d_bias, seq_idx, activation).transpose(
            1, 2
        )
        states = (channels.shape[-1] - inner) // 2
        x, B, C = channels.split([inner, states, states], dim=-1)
        x, z = x.unflatten(-1, (heads, headdim)), z.unflatten(-1, (heads, headdim))
        B, C = B.unflatten(-1, (ngroups, -1)), C.unflatten(-1, (ngroups, -1))
        gated = z if rmsnorm_weight is None else None
        out = _chunk_scan(x, dt, A, B, C, D, gated, dt_bias, seq_idx, True, dt_limit).flatten(-2)
        if rmsnorm_weight is not None:
            out = out if norm_before_gate else out * silu(z.flatten(-2))
            grouped = out.unflatten(-1, (ngroups, -1))
            out = (
                rms_norm(grouped, grouped.shape[-1:], eps=rmsnorm_eps).flatten(-2) * rmsnorm_weight
            )
            out = out * silu(z.flatten(-2)) if norm_before_gate else out
        return (
            out
            if outproj_weight is None
            else torch.nn.functional.linear(out, outproj_weight, outproj_bias)
        )

    def selective_scan_fn(
        u,
        delta,
        A,
        B,
        C,
        D=None,
        z=None,
        delta_bias=None,
        delta_softplus=False,
        return_last_state=False,
    ):
        arrived.note("selective_scan_fn", None)
        out, _ = scan(u, delta, A, B[:, None], C[:, None], D, z, delta_bias, delta_softplus)
        return out if z is None else out * silu(z)

    def mamba_inner_fn(
        xz, conv1d_weight, conv1d_bias, x_proj_weight, delta_proj_weight, out_proj_weight, out_proj_bias, A, B=None,
        C=None, D=None, delta_bias=None, B_proj_bias=None, C_proj_bias=None, delta_softplus=True, checkpoint_lvl=1,
        b_rms_weight=None, c_rms_weight=None, dt_rms_weight=None, b_c_dt_rms_eps=1e-6,
    ):  # fmt: skip
        arrived.note("mamba_inner_fn", None)
        x, z = xz.chunk(2, dim=1)
        x = _convolve(x, conv1d_weight.squeeze(1), conv1d_bias, None, "silu")
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
        out = selective_scan_fn(x, dt, A, B, C, D, z, delta_bias, delta_softplus)
        return torch.nn.functional.linear(out.mT, out_proj_weight, out_proj_bias)

    def chunk_gated_delta_rule(
        q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
        cu_seqlens=None, **kwargs,
    ):  # fmt: skip
        arrived.note(
            "chunk_gated_delta_rule", None if cu_seqlens is None else cu_seqlens.diff().tolist()
        )
        return _delta_rule(q, k, v, g, beta, scale, use_qk_l2norm_in_kernel, cu_seqlens), None

    def chunk_kda(
        q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
        use_gate_in_kernel=False, cu_seqlens=None, **kwargs,
    ):  # fmt: skip
        arrived.note("chunk_kda", None if cu_seqlens is None else cu_seqlens.diff().tolist())
        return _delta_rule(q, k, v, g, beta, scale, use_qk_l2norm_in_kernel, cu_seqlens), None

    return {
        "causal_conv1d.causal_conv1d_fn": causal_conv1d_fn,
        "mamba_ssm.ops.triton.ssd_combined.mamba_chunk_scan_combined": mamba_chunk_scan_combined,
        "mamba_ssm.ops.triton.ssd_combined.mamba_split_conv1d_scan_combined": mamba_split_conv1d_scan_combined,
        "mamba_ssm.ops.selective_scan_interface.selective_scan_fn": selective_scan_fn,
        "mamba_ssm.ops.selective_scan_interface.mamba_inner_fn": mamba_inner_fn,
        "fla.ops.gated_delta_rule.chunk_gated_delta_rule": chunk_gated_delta_rule,
        "fla.ops.kda.chunk_kda": chunk_kda,
    }


def _without_bounds(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The same kernel, as an old release might have it."""
    signature = inspect.signature(kernel)

    def older(*args: Any, **kwargs: Any) -> Any:
        assert not BOUNDS & kwargs.keys()
        return kernel(*args, **kwargs)

    kept = [p for name, p in signature.parameters.items() if name not in BOUNDS]
    older.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
    return older


def install(bounds: bool = True) -> Arrived:
    """Make the stand-ins importable for the rest of the process; must come before any modeling file
    is imported."""
    arrived = Arrived()
    for path, kernel in _kernels(arrived).items():
        home, name = path.rsplit(".", 1)
        parts = home.split(".")
        for i in range(1, len(parts) + 1):
            module = sys.modules.setdefault(".".join(parts[:i]), ModuleType(".".join(parts[:i])))
            module.__path__ = []
            if i > 1:
                setattr(sys.modules[".".join(parts[: i - 1])], parts[i - 1], module)
        setattr(sys.modules[home], name, kernel if bounds else _without_bounds(kernel))
    return arrived


def measure(model_type: str, arrived: Arrived) -> dict[str, Any]:
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
    arrived.calls.clear()
    with autopack.enable(model, verify=False) as handle:
        logits = model(input_ids=ids, position_ids=positions(*rows)).logits
        calls = list(arrived.calls)
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--types", nargs="+", default=["mamba", "mamba2", "qwen3_next", "kimi_linear"]
    )
    parser.add_argument("--without-bounds", action="store_true")
    options = parser.parse_args()
    arrived = install(bounds=not options.without_bounds)
    for model_type in options.types:
        print(json.dumps(measure(model_type, arrived)), flush=True)


if __name__ == "__main__":
    main()
