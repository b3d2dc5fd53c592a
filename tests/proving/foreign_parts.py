"""Toys of modules that people put into models: such as treat every token by itself, and such as mix them.

Each has `make(width_in, width_out)` and says by `mixes` which it is, and by `shows` in what form of call that can be
seen. Nothing here needs another library.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Form:
    """How a part is called: rows of tokens, in which dtype and mode."""

    rows: int = 2
    tokens: int = 24
    dtype: torch.dtype = torch.float64
    train: bool = True


class Part(nn.Module):
    """A linear layer of one's own, and what the others are made from: states (rows, tokens, width_in) come in."""

    mixes: ClassVar[bool] = False
    shows: ClassVar[Form] = Form()

    def __init__(self, width_in: int, width_out: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width_out, width_in) / width_in**0.5)
        self.bias = nn.Parameter(0.1 * torch.randn(width_out))

    @classmethod
    def make(cls, width_in: int, width_out: int) -> Part:
        """A part with random weights, always the same ones."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return cls(width_in, width_out)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return states @ self.weight.T + self.bias


# Token by token.


class FusedNorm(Part):
    """An RMSNorm and a linear layer in one."""

    def __init__(self, width_in: int, width_out: int):
        super().__init__(width_in, width_out)
        self.scale = nn.Parameter(1 + 0.1 * torch.randn(width_in))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return super().forward(self.scale * states * torch.rsqrt(states.square().mean(-1, keepdim=True) + 1e-6))


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        gate, up = ctx.saved_tensors
        sigmoid = gate.sigmoid()
        return gradient * up * sigmoid * (1 + gate * (1 - sigmoid)), gradient * gate * sigmoid


class FusedSwiglu(Part):
    """A gated feed-forward network in one module, with a backward of its own."""

    def __init__(self, width_in: int, width_out: int):
        super().__init__(2 * width_in, width_out)
        self.gate_up = nn.Parameter(torch.randn(4 * width_in, width_in) / width_in**0.5)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        gate, up = (states @ self.gate_up.T).chunk(2, -1)
        return super().forward(_Swiglu.apply(gate, up))


class Adapter(Part):
    """A linear layer with a low-rank one beside it, behind dropout."""

    def __init__(self, width_in: int, width_out: int):
        super().__init__(width_in, width_out)
        self.base = nn.Linear(width_in, width_out).requires_grad_(False)
        self.down, self.up = nn.Linear(width_in, 4, bias=False), nn.Linear(4, width_out, bias=False)
        self.dropout = nn.Dropout(0.1)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.base(states) + 2.0 * self.up(self.down(self.dropout(states)))


class _Rounded(torch.autograd.Function):
    """Rounds to eight bits by a given scale; its backward does as if it had not."""

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return (states / scale).round().clamp(-128, 127) * scale

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None


class EightBits(Part):
    """A linear layer in eight bits: a scale for each channel of the weight, and one for each token."""

    def __init__(self, width_in: int, width_out: int):
        super().__init__(width_in, width_out)
        scale = self.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("codes", (self.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)
        del self.weight

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.rounded(states) @ (self.codes.to(states.dtype) * self.scale).T + self.bias

    def rounded(self, states: torch.Tensor) -> torch.Tensor:
        return _Rounded.apply(states, states.detach().abs().amax(-1, keepdim=True).clamp(min=1e-9) / 127)


class Flattens(Part):
    """A layer that knows no rows: it works on (rows * tokens, width)."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        flat = states.reshape(-1, states.shape[-1])
        return F.gelu(super().forward(flat)).reshape(*states.shape[:-1], -1)


class InPieces(Part):
    """A layer that works on 16 tokens of a row at a time, to save memory."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return torch.cat([F.gelu(super(InPieces, self).forward(piece)) for piece in states.split(16, 1)], 1)


class Routed(Part):
    """Four experts, of which every token gets the one it scores highest; none is ever full."""

    def __init__(self, width_in: int, width_out: int):
        super().__init__(width_in, width_out)
        self.router = nn.Parameter(torch.randn(4, width_in) / width_in**0.5)
        self.experts = nn.Parameter(torch.randn(4, width_out, width_in) / width_in**0.5)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        scores = (states @ self.router.T).softmax(-1)
        score, expert = scores.max(-1)
        everything = torch.einsum("eoi,rti->rteo", self.experts, states)
        taken = everything.gather(2, expert[..., None, None].expand(*expert.shape, 1, everything.shape[-1])).squeeze(2)
        return self.kept(expert)[..., None] * score[..., None] * taken + super().forward(states)

    def kept(self, expert: torch.Tensor) -> torch.Tensor:
        """1 where an expert has room for a token."""
        return torch.ones_like(expert)


# Mixing.


def _mean(states: torch.Tensor) -> torch.Tensor:
    return states + states.mean(1, keepdim=True)


class SequenceNorm(Part):
    """A norm over the tokens of a row, channel by channel."""

    mixes = True

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return super().forward((states - states.mean(1, keepdim=True)) / (states.std(1, keepdim=True) + 1e-3))


class EightBitsPerTensor(EightBits):
    """Eight bits with one scale for all tokens of the call."""

    mixes = True

    def rounded(self, states: torch.Tensor) -> torch.Tensor:
        return _Rounded.apply(states, states.detach().abs().amax().clamp(min=1e-9) / 127)


class OutlierChannels(EightBits):
    """Eight bits but for channels in which any token is large: these are left as they are, for all tokens."""

    mixes = True

    def rounded(self, states: torch.Tensor) -> torch.Tensor:
        large = (states.detach().abs() > 5.0).flatten(0, -2).any(0)
        return torch.where(large, states, super().rounded(states.masked_fill(large, 0.0)))


class Cumulative(Part):
    """A mean of all tokens so far."""

    mixes = True

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        counts = torch.arange(1, states.shape[1] + 1, dtype=states.dtype, device=states.device)[:, None]
        return super().forward(states + states.cumsum(1) / counts)


class Shifted(Part):
    """Every token gets half of the one before it."""

    mixes = True

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return super().forward(states + 0.5 * F.pad(states, (0, 0, 1, 0))[:, :-1])


class AcrossRows(Part):
    """A mean over the rows of the batch, column by column."""

    mixes = True

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return super().forward(states + states.mean(0, keepdim=True))


class BatchStatistics(Part):
    """A batch norm: statistics of all tokens in training, running ones otherwise."""

    mixes = True

    def __init__(self, width_in: int, width_out: int):
        super().__init__(width_in, width_out)
        self.norm = nn.BatchNorm1d(width_in)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return super().forward(self.norm(states.flatten(0, -2)).view_as(states))


class _AveragesBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: torch.Tensor) -> torch.Tensor:
        return states.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient - gradient.mean(1, keepdim=True)


class AveragesBack(Part):
    """Forward token by token; its backward takes the mean over tokens off gradients."""

    mixes = True

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return super().forward(_AveragesBack.apply(states))


class _ClipsBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(states, weight)
        return states @ weight.T

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        states, weight = ctx.saved_tensors
        own = gradient.flatten(0, -2).T @ states.flatten(0, -2)
        return gradient @ weight, own / own.norm().clamp(min=1.0)


class ClipsBack(Part):
    """Token by token but for the gradient of its weight, which is clipped for all tokens together."""

    mixes = True

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return _ClipsBack.apply(states, self.weight) + self.bias


class BeyondSixtyFour(Part):
    """Mixes rows of more than 64 tokens."""

    mixes, shows = True, Form(tokens=65)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return super().forward(_mean(states) if states.shape[1] > 64 else states)


class EverySixteen(Part):
    """Mixes rows whose number of tokens is a multiple of 16."""

    mixes, shows = True, Form(tokens=32)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return super().forward(_mean(states) if states.shape[1] % 16 == 0 else states)


class ThreeRows(Part):
    """Mixes batches of three rows and more."""

    mixes, shows = True, Form(rows=3)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return super().forward(_mean(states) if states.shape[0] >= 3 else states)


class FourthRow(Part):
    """Mixes the tokens of every row but the first three."""

    mixes, shows = True, Form(rows=4)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.cat([states[:3], _mean(states[3:])]))


class SinglePrecision(Part):
    """Mixes in float32 alone."""

    mixes, shows = True, Form(dtype=torch.float32)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return super().forward(_mean(states) if states.dtype == torch.float32 else states)


class Evaluation(Part):
    """Mixes in evaluation alone."""

    mixes, shows = True, Form(train=False)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return super().forward(states if self.training else _mean(states))


class Capacity(Routed):
    """Experts that take 32 tokens of a call each, the first ones; what comes later gets nothing of them."""

    mixes, shows = True, Form(tokens=130)
    capacity: ClassVar[int] = 32

    def kept(self, expert: torch.Tensor) -> torch.Tensor:
        chosen = F.one_hot(expert.flatten(), 4)
        place = (chosen.cumsum(0) * chosen).sum(-1).view_as(expert)
        return (place <= self.capacity).to(expert.dtype)


TOKEN_WISE: tuple[type[Part], ...] = (
    Part, FusedNorm, FusedSwiglu, Adapter, EightBits, Flattens, InPieces, Routed,
)  # fmt: skip
MIXING: tuple[type[Part], ...] = (
    SequenceNorm, EightBitsPerTensor, OutlierChannels, Cumulative, Shifted, AcrossRows, BatchStatistics, AveragesBack,
    ClipsBack, BeyondSixtyFour, EverySixteen, ThreeRows, FourthRow, SinglePrecision, Evaluation, Capacity,
)  # fmt: skip
