"""What causal-conv1d 1.7.0 and mamba-ssm 2.3.2 compile from C++ and CUDA, in torch, with the checks
of those sources.

The checks are those of `csrc/causal_conv1d.cpp` and `csrc/selective_scan/selective_scan.cpp`; the
arithmetic is the plain definition, in float32."""

from __future__ import annotations

import collections
import sys
from collections.abc import Callable
from types import ModuleType

import torch
from torch.nn import functional as F

Tensor = torch.Tensor
LAUNCHED: collections.Counter[str] = collections.Counter()
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def _check(holds: bool, what: str) -> None:
    if not holds:
        raise RuntimeError(f"the compiled kernel wants {what}")


def _check_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, seq_idx: Tensor | None
) -> bool:
    rows, channels, tokens = x.shape
    _check(x.dtype in _FLOATS and weight.dtype in _FLOATS, "float32, float16 or bfloat16")
    _check(x.stride(2) == 1 or x.stride(1) == 1, "tokens or channels one after the other")
    _check(
        2 <= weight.shape[1] <= 4 and weight.shape[0] == channels,
        "a width of 2 to 4, and a weight per channel",
    )
    last = x.stride(1) == 1 and x.stride(2) > 1
    if last:
        _check(channels % 8 == 0, "channels in a multiple of 8")
        _check(
            x.stride(2) % 8 == 0 and x.stride(0) % 8 == 0,
            f"strides in multiples of 8, found {x.stride()}",
        )
    if bias is not None:
        _check(
            bias.dtype == weight.dtype and bias.stride(-1) == 1 and bias.shape == (channels,),
            "a bias like weights",
        )
    if seq_idx is not None:
        _check(last, "channels last beside seq_idx")
        _check(
            seq_idx.dtype == torch.int32 and seq_idx.is_contiguous(),
            "a seq_idx of int32, contiguous",
        )
        _check(seq_idx.shape == (rows, tokens), "a seq_idx of one number per token")
        LAUNCHED["causal_conv1d with seq_idx"] += 1
    return last


def _within(seq_idx: Tensor | None, lag: int, like: Tensor) -> Tensor:
    """(rows, 1, tokens): 1 where the token `lag` before is of the same document, and there is
    one."""
    if seq_idx is None:
        seq_idx = like.new_zeros(like.shape[0], like.shape[2], dtype=torch.int32)
    return (F.pad(seq_idx, (lag, 0), value=-(2**31))[:, : like.shape[2]] == seq_idx)[
        :, None
    ].float()


def convolved(x: Tensor, weight: Tensor, bias: Tensor | None, seq_idx: Tensor | None) -> Tensor:
    width, tokens = weight.shape[1], x.shape[2]
    taps = (
        F.pad(x.float(), (lag, 0))[..., :tokens]
        * _within(seq_idx, lag, x)
        * weight[:, width - 1 - lag, None].float()
        for lag in range(width)
    )
    return sum(taps, torch.zeros(()) if bias is None else bias.float()[:, None])


def causal_conv1d_fwd(
    x: Tensor, weight: Tensor, bias: Tensor | None, seq_idx: Tensor | None, initial_states: Tensor | None,
    out: Tensor, final_states_out: Tensor | None, silu: bool,
) -> None:  # fmt: skip
    _check_convolution(x, weight, bias, seq_idx)
    _check(
        initial_states is None and final_states_out is None, "no states here: no packed row has any"
    )
    LAUNCHED["causal_conv1d_fwd"] += 1
    found = convolved(x, weight, bias, seq_idx)
    out.copy_(F.silu(found) if silu else found)


def causal_conv1d_bwd(
    x: Tensor, weight: Tensor, bias: Tensor | None, dout: Tensor, seq_idx: Tensor | None,
    initial_states: Tensor | None, dfinal_states: Tensor | None, dx: Tensor, dweight: Tensor, dbias: Tensor | None,
    dinitial_states: Tensor | None, silu: bool,
) -> None:  # fmt: skip
    """Below torch's autograd, where these are called: written out."""
    if _check_convolution(x, weight, bias, seq_idx):
        # A copy with channels last is made of a gradient that has another layout.
        strides = (
            dout.stride()
            if dout.stride(1) == 1
            else dout.transpose(1, 2).contiguous().transpose(1, 2).stride()
        )
        _check(
            strides[2] % 8 == 0 and strides[0] % 8 == 0,
            f"strides of dout in multiples of 8, found {strides}",
        )
    LAUNCHED["causal_conv1d_bwd"] += 1
    gradient = dout.float()
    if silu:
        before = convolved(x, weight, bias, seq_idx)
        slope = torch.sigmoid(before)
        gradient = gradient * slope * (1 + before * (1 - slope))
    width, tokens = weight.shape[1], x.shape[2]
    into = torch.zeros_like(gradient)
    for lag in range(width):
        seen = gradient * _within(seq_idx, lag, x)
        into += F.pad(seen, (0, lag))[..., lag:] * weight[:, width - 1 - lag, None].float()
        dweight[:, width - 1 - lag] += (seen * F.pad(x.float(), (lag, 0))[..., :tokens]).sum((0, 2))
    dx.copy_(into)
    if dbias is not None:
        dbias += gradient.sum((0, 2))


def scan(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None,
    delta_bias: Tensor | None, softplus: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The output before its gate, and the last state (rows, channels, states)."""
    rows, channels, tokens = u.shape
    step = delta.float() if delta_bias is None else delta.float() + delta_bias[:, None]
    step = F.softplus(step) if softplus else step
    into, out_of = (
        t.float()[None, :, :, None].expand(rows, -1, -1, tokens)
        if t.dim() == 2
        else t.float().repeat_interleave(channels // t.shape[1], 1)
        for t in (B, C)
    )
    state, outputs = u.new_zeros(rows, channels, A.shape[1], dtype=torch.float32), []
    for t in range(tokens):
        kept = torch.exp(step[..., t, None] * A)
        state = kept * state + (step[..., t] * u[..., t].float())[..., None] * into[..., t]
        outputs.append((state * out_of[..., t]).sum(-1))
    output = torch.stack(outputs, -1)
    return output if D is None else output + D[:, None] * u.float(), state


def _check_scan(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None,
    delta_bias: Tensor | None,
) -> None:  # fmt: skip
    rows, channels, tokens = u.shape
    _check(
        u.dtype in _FLOATS and A.dtype == torch.float32,
        "states in a float of 16 or 32 bits, and A in float32",
    )
    _check(
        A.shape[0] == channels and A.shape[1] <= 256,
        "a row of A per channel, and 256 states at most",
    )
    for name, given in (("u", u), ("delta", delta), ("z", z)):
        if given is not None:
            _check(given.shape == u.shape and given.dtype == u.dtype, f"{name} like u")
            _check(given.stride(-1) == 1 or tokens == 1, f"tokens of {name} one after the other")
    for name, given in (("B", B), ("C", C)):
        if given.dim() == 2:
            _check(given.shape == A.shape and given.dtype == A.dtype, f"a fixed {name} like A")
        else:
            _check(
                given.dtype == u.dtype and given.shape[::2] == (rows, A.shape[1]),
                f"{name} (rows, groups, states, -)",
            )
            _check(
                given.shape[3] == tokens and (given.stride(-1) == 1 or tokens == 1),
                f"tokens of {name} in order",
            )
    for name, given in (("D", D), ("delta_bias", delta_bias)):
        if given is not None:
            _check(
                given.dtype == torch.float32 and given.shape == (channels,),
                f"{name} in float32, one per channel",
            )
            _check(given.stride(-1) == 1 or channels == 1, f"{name} contiguous")


def selective_scan_fwd(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None,
    delta_bias: Tensor | None, softplus: bool,
) -> list[Tensor]:  # fmt: skip
    _check_scan(u, delta, A, B, C, D, z, delta_bias)
    LAUNCHED["selective_scan_fwd"] += 1
    output, state = scan(u, delta, A, B, C, D, z, delta_bias, softplus)
    chunks = -(-u.shape[2] // 2048)
    states = torch.zeros(*u.shape[:2], chunks, 2 * A.shape[1])
    states[:, :, -1, 1::2] = state
    found = [output.to(u.dtype), states]
    return found if z is None else [*found, (output * F.silu(z.float())).to(u.dtype)]


def selective_scan_bwd(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None,
    delta_bias: Tensor | None, dout: Tensor, x: Tensor | None, out: Tensor | None, dz: Tensor | None,
    softplus: bool, recompute_out_z: bool,
) -> list[Tensor | None]:  # fmt: skip
    _check_scan(u, delta, A, B, C, D, z, delta_bias)
    _check(dout.shape == u.shape and dout.dtype == u.dtype, "dout like u")
    _check(dout.stride(-1) == 1 or u.shape[2] == 1, "tokens of dout one after the other")
    LAUNCHED["selective_scan_bwd"] += 1
    given = (u, delta, A, B, C, D, delta_bias, z)
    with torch.enable_grad():
        leaves = [None if t is None else t.detach().float().requires_grad_() for t in given]
        u_, delta_, A_, B_, C_, D_, bias_, z_ = leaves
        output, _ = scan(u_, delta_, A_, B_, C_, D_, z_, bias_, softplus)  # type: ignore[arg-type]
        gated = output if z_ is None else output * F.silu(z_)
        wanted = [leaf for leaf in leaves if leaf is not None]
        grads = iter(torch.autograd.grad(gated, wanted, dout.float()))
    found = [None if leaf is None else next(grads) for leaf in leaves]
    du, ddelta, dA, dB, dC, dD, dbias, of_gate = found
    assert du is not None
    assert ddelta is not None
    result: list[Tensor | None] = [du.to(u.dtype), ddelta.to(u.dtype), dA, dB, dC, dD, dbias]
    if z is not None:
        assert of_gate is not None
        dz = torch.empty_like(z) if dz is None else dz
        result.append(dz.copy_(of_gate))
        if recompute_out_z:
            result.append(gated.detach().to(u.dtype))
    return result


def _refuse(*_: object) -> None:
    raise NotImplementedError("one step of generation is not here: no packed row takes it")


def install() -> None:
    """Make them importable by the names of the compiled modules."""
    modules: dict[str, dict[str, Callable[..., object]]] = {
        "causal_conv1d_cuda": {
            "causal_conv1d_fwd": causal_conv1d_fwd,
            "causal_conv1d_bwd": causal_conv1d_bwd,
            "causal_conv1d_update": _refuse,
        },
        "selective_scan_cuda": {"fwd": selective_scan_fwd, "bwd": selective_scan_bwd},
    }
    for name, functions in modules.items():
        module = ModuleType(name)
        vars(module).update(functions)
        sys.modules[name] = module
