"""Prove a module by itself, where it stands: its output at a token depends on that token alone.

A model of modules that look at one token each, around modules that are known to keep documents
apart, is exact. So a layer that third-party code has put into a known model (its own linear layer
or norm, a fused kernel, a quantised layer, an adapter) need not be proven together with it. It is
run on random states, a large one as a narrower copy of itself. One token is replaced, and nothing
else may move, forward and backward. A stretch of tokens must give the same by itself as among
others, at lengths on both sides of all whole numbers that the module holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autopack.auditing.left_as_found import without_noise
from autopack.auditing.running import DRAWN
from autopack.inspection.randomness import Pinned, draws_by_itself, normal_numbers
from autopack.integrations import accelerate
from autopack.proving.narrow import narrowed

_LENGTHS = (2, 5, 16, 23, 33, 65, 130, 257)
_FEW_LENGTHS = (5, 16, 33, 65)
"""Lengths in tokens for large modules, which run fewer of them."""
_LARGE, _MOST = 1_000_000, 300_000_000
"""Most parameters of a module that is not large, and of one that can run by itself."""
_BOUNDS = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Largest relative difference of a stretch of tokens by itself: two shapes round differently."""
_HUGE = 16_000_000
"""Size above which a tensor on the meta device does not get random numbers one by one."""
_NO_STATES = "no states were found that it takes by itself"
_SAME = 64
"""Largest change of a token, in roundings, when another is replaced: shapes are the same."""


@dataclass(frozen=True)
class Form:
    """The form of a module's call: its arguments, and the number of tokens in them."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tokens: int


def why_not_token_wise(module: nn.Module, form: Form | None = None, widths: Sequence[int] = ()) -> str | None:
    """Return the reason, in one clause, why a module may not treat tokens alone, or None.

    `form` is its like's call in a model that may be narrower; without it, the module is called with
    one tensor of states (rows, tokens, width). `widths` are the possible widths of states here. The
    module is left as it was found.
    """
    count = sum(p.numel() for p in module.parameters())
    if any(type(p).__module__.startswith("torch.distributed.") or hasattr(p, "ds_id") for p in module.parameters()):
        return "its parameters are shared out over ranks, so that it cannot be run by itself"
    if count > _MOST:
        return f"it has {count:,} parameters, too many to be run by itself"
    narrow = _of_a_narrow_one(module, form, widths) if count > _LARGE else _NO_STATES
    if narrow not in (None, _NO_STATES):
        return narrow
    try:
        module = _real(module)
        with torch.set_grad_enabled(narrow is not None), without_noise(module):  # type: ignore[arg-type]
            if narrow is None:
                return _as_wide_as_it_is(module, form, widths)
            return _tried(module, form, widths, _FEW_LENGTHS if count > _LARGE else _LENGTHS)
    except Exception as error:  # somebody else's code may raise anything
        return f"it raised {type(error).__name__}: {error} when it was run by itself"


def _real(module: nn.Module) -> nn.Module:
    """Return the module, or one like it with real values of its tensors.

    It gets random values if it has none (on the meta device, or offloaded), and float32 for float16
    on a CPU, whose backward takes minutes there.
    """
    tensors = [*module.parameters(), *module.buffers()]
    half = any(tensor.dtype is torch.float16 and tensor.device.type == "cpu" for tensor in tensors)
    made = {id(tensor): _drawn(tensor) for tensor in tensors if tensor.is_meta}
    return accelerate.without_hooks(module, made).float() if made or half else module


def _drawn(tensor: torch.Tensor) -> torch.Tensor:
    """Return values for a tensor without any; a huge one repeats one row, drawn at once."""
    if not isinstance(tensor, nn.Parameter) or not tensor.is_floating_point():
        return torch.zeros_like(tensor, device="cpu")
    shape = tensor.shape if tensor.numel() <= _HUGE else tensor.shape[-1:]
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    values = 1 + values / 10 if tensor.dim() < 2 else values / shape[-1] ** 0.5
    return nn.Parameter(values.expand(tensor.shape).contiguous(), tensor.requires_grad)


def _of_a_narrow_one(module: nn.Module, form: Form | None, widths: Sequence[int]) -> str | None:
    """Return the verdict on a narrower copy; `_NO_STATES` if none runs."""
    found = narrowed(module, widths)
    if found is None:
        return _NO_STATES
    try:
        with torch.enable_grad(), without_noise(found[0]):  # type: ignore[arg-type]
            return _tried(found[0], form, found[1], _LENGTHS)
    except Exception:  # its code has sizes of another kind, so it is run as wide as it is
        return _NO_STATES


def _as_wide_as_it_is(module: nn.Module, form: Form | None, widths: Sequence[int]) -> str | None:
    """Return the reason why a module mixes a few tokens at its own width, or None.

    Its narrow copy is token-wise; this runs without gradients.
    """
    module.eval()
    width, evaluated = _width(module, form, widths)
    if width is None:
        return _NO_STATES
    # What it gives in evaluation, and in training for other states of one token: where the others get the same, it
    # mixes tokens in neither. Else (what is no noise differs) it is looked at in both.
    for outputs, trains in ((evaluated, True), (None, True), (evaluated, False)):
        module.train(trains)
        probe = _Probe(module, form, width, 1, 5)
        found = probe.outputs() if outputs is None else outputs
        axes = [_axis(output, 1, 5) for output in found]
        if None in axes:
            return "it gives something that is not one for each token"
        weights = [torch.ones_like(output) for output in found]
        slopes = probe._slopes(probe.given, found, weights)
        reason = probe._replaced(probe.given, found, weights, slopes, axes, 2, 4.0)
        both = outputs is evaluated and trains
        if both and reason is None:
            return None
        if not both and reason is not None:
            return f"{reason} (at its own width, where a narrower copy does not)"
    return None


def _tried(module: nn.Module, form: Form | None, widths: Sequence[int], lengths: Sequence[int]) -> str | None:
    width, _ = _width(module, form, widths)
    if width is None:
        return _NO_STATES
    shares = DRAWN.values() if draws_by_itself(module) else ()
    for train, share in ((True, None), (False, None), *((True, share) for share in shares)):
        module.train(train)
        for length in sorted({*lengths, *_own_numbers(module)}):
            for rows in (1, 3) if length in (5, 33) else (1,):
                with nullcontext() if share is None else Pinned(share):
                    reason = _Probe(module, form, width, rows, length).why_not()
                if reason is not None:
                    mode = "training" if train else "evaluation"
                    return f"{reason} ({rows} x {length} tokens, in {mode})"
    return None


def _own_numbers(module: nn.Module) -> set[int]:
    """Return lengths on both sides of a module's whole numbers, which may be thresholds."""
    sizes = {size for tensor in (*module.parameters(), *module.buffers()) for size in tensor.shape}
    found: set[int] = set()
    for part in module.modules():
        for name, value in vars(part).items():
            if not name.startswith("_"):
                found.update(n for n in _whole(value) if 3 <= n <= 256 and n not in sizes)
    return {length for n in sorted(found)[:6] for length in (n, n + 1)}


def _whole(value: Any) -> Iterator[int]:
    if isinstance(value, (list, tuple)) and len(value) < 20:
        for part in value:
            yield from _whole(part)
    elif isinstance(value, int) and not isinstance(value, bool):
        yield value


def _width(module: nn.Module, form: Form | None, widths: Sequence[int]) -> tuple[int | None, list[torch.Tensor]]:
    """Return the width of states that a module takes, and its outputs for five such tokens."""
    own = [getattr(module, name, None) for name in ("in_features", "normalized_shape", "hidden_size", "embedding_dim")]
    named = [each[-1] if isinstance(each, (tuple, list)) else each for each in own if each]
    shapes = [size for parameter in module.parameters() for size in reversed(parameter.shape)]
    seen = [size for tensor in _tensors(form) for size in tensor.shape[-1:]] if form is not None else []
    for width in dict.fromkeys([*named, *shapes, *widths, *seen, 64]):
        if isinstance(width, int) and width > 0:
            try:
                with torch.no_grad():
                    return width, _Probe(module, form, width, 1, 5).outputs()
            except Exception:  # another width, then
                continue
    return None, []


def _tensors(form: Form) -> list[torch.Tensor]:
    return [v for v in (*form.args, *form.kwargs.values()) if isinstance(v, torch.Tensor) and v.is_floating_point()]


class _Probe:
    """One module on one shape of random states."""

    def __init__(self, module: nn.Module, form: Form | None, width: int, rows: int, tokens: int):
        self.module, self.rows, self.tokens = module, rows, tokens
        held = [t for t in (*module.parameters(), *module.buffers()) if t.is_floating_point()]
        self.dtype = held[0].dtype if held else torch.float32
        if self.dtype not in _BOUNDS:
            self.dtype = torch.float32  # weights in eight bits
        self.device = held[0].device if held else torch.device("cpu")
        self.form = form or Form((torch.zeros(1, 7, width),), {}, 7)
        self.narrow = max([t.shape[-1] for t in _tensors(self.form)], default=width)
        self.width = width
        self.generator = torch.Generator().manual_seed(tokens * 10 + rows)
        self.given = [self._drawn(v) for v in (*self.form.args, *self.form.kwargs.values())]

    def _drawn(self, value: Any) -> Any:
        """Return an argument for this probe's number of tokens, and the axis of the tokens.

        Arguments without tokens stay as they are, with None as the axis.
        """
        if not isinstance(value, torch.Tensor):
            return value, None
        form = self.form
        axis = next((a for a in range(value.dim()) if value.shape[a] == form.tokens), None)
        if axis is None:
            return value.to(self.device, self.dtype if value.is_floating_point() else None), None
        shape = list(value.shape)
        if value.is_floating_point() and shape[-1] == self.narrow and axis != value.dim() - 1:
            shape[-1] = self.width
        shape[axis] = self.tokens
        shape[0] = self.rows if axis > 0 else self.rows * self.tokens
        if value.is_floating_point():
            made = normal_numbers(shape, self.generator).to(self.device, self.dtype)
        else:
            index = torch.randint(form.tokens, (shape[axis],), generator=self.generator)
            made = value.cpu().index_select(axis, index).expand(shape).contiguous().to(self.device)
        return made, axis

    def outputs(self, given: Sequence[tuple[Any, int | None]] | None = None) -> list[torch.Tensor]:
        """Return the tensors in the module's outputs, in order."""
        values = [value for value, _ in (self.given if given is None else given)]
        count = len(self.form.args)
        kwargs = dict(zip(self.form.kwargs, values[count:], strict=True))
        found = list(_flat(self.module(*values[:count], **kwargs)))
        if not found:
            raise ValueError("it gives no tensor")
        return found

    def why_not(self) -> str | None:
        given = [(v.clone().requires_grad_() if self._is_state(v, a) else v, a) for v, a in self.given]
        outputs = self.outputs(given)
        other = next((type(o) for o in outputs if type(o).__module__.partition(".")[0] != "torch"), None)
        if other is not None:
            return f"it gives tensors of the type {other.__qualname__}, which may do anything where they are taken"
        axes = [_axis(output, self.rows, self.tokens) for output in outputs]
        if None in axes:
            shape = tuple(outputs[axes.index(None)].shape)
            return f"it gives something that is not one for each token, of shape {shape}"
        weights = [normal_numbers(o.shape, self.generator).to(o) for o in outputs]
        slopes = self._slopes(given, outputs, weights)
        for token, scale in dict.fromkeys(((self.tokens // 2, 1.0), (0, 40.0), (self.tokens - 1, 1.0))):
            reason = self._replaced(given, outputs, weights, slopes, axes, token, scale)
            if reason is not None:
                return reason
        return self._by_itself(given, outputs, weights, axes)

    @staticmethod
    def _is_state(value: Any, axis: int | None) -> bool:
        return isinstance(value, torch.Tensor) and value.is_floating_point() and axis is not None

    def _slopes(self, given: Any, outputs: Any, weights: Any) -> list[torch.Tensor | None]:
        """Return the gradients of the given states."""
        return _gradients(outputs, weights, [v for v, a in given if self._is_state(v, a)])

    def _replaced(
        self, given: Any, outputs: Any, weights: Any, slopes: Any, axes: Any, token: int, scale: float
    ) -> str | None:
        """Replace one token of the first row and of its output gradients; compare all others."""
        other = []
        for value, axis in given:
            if isinstance(value, torch.Tensor) and axis is not None:
                value = value.detach().clone()
                place = _at(value, axis, token)
                if value.is_floating_point():
                    place.copy_(scale * normal_numbers(place.shape, self.generator).to(place))
                    value.requires_grad_()
                else:
                    place.copy_(_at(value, axis, (token + 1) % self.tokens))
            other.append((value, axis))
        changed = self.outputs(other)
        turned = [w.clone() for w in weights]
        for weight, axis in zip(turned, axes, strict=True):
            _at(weight, axis, token).mul_(-scale)
        found = self._slopes(other, changed, turned)
        pairs = [("another token's result", a, b, axis) for a, b, axis in zip(outputs, changed, axes, strict=True)]
        of_states = [axis for value, axis in given if self._is_state(value, axis)]
        for before, after, axis in zip(slopes, found, of_states, strict=True):
            if before is not None and after is not None:
                pairs.append(("another token's gradient", before, after, axis))
        for what, before, after, axis in pairs:
            if before.shape != after.shape:
                return f"replacing one token changes the shape of what it gives, to {tuple(after.shape)}"
            moved, deviation = _moved(before, after), _deviation(before)
            _at(moved, axis, token).zero_()
            if not math.isfinite(deviation):
                return "it gives what is no number"
            worst = float(moved.max()) / deviation
            if not worst <= _SAME * torch.finfo(self.dtype).eps:
                return f"replacing one token changes {what} by {worst:.1e} of the deviation"
        return None

    def _by_itself(self, given: Any, outputs: Any, weights: Any, axes: Any) -> str | None:
        """Compare stretches of tokens by themselves, and their sums of parameters' gradients."""
        cut = max(1, self.tokens // 3)
        parameters = [p for p in self.module.parameters() if p.requires_grad and p.is_floating_point()]
        # By outputs of their own: kernels that save memory (Liger's) write over what their backward needs.
        whole = _gradients(self.outputs(given), weights, parameters)
        summed: list[torch.Tensor | None] = [None] * len(parameters)
        bound = _BOUNDS[self.dtype]
        stretches = [(row, a, b) for row in range(self.rows) for a, b in ((0, cut), (cut, self.tokens)) if b > a]
        for row, first, end in stretches:
            part = [(_stretch(v, a, row, first, end, self) if a is not None else v, a) for v, a in given]
            alone = self.outputs(part)
            share = []
            for output, weight, piece, axis in zip(outputs, weights, alone, axes, strict=True):
                wanted = _stretch(output, axis, row, first, end, self)
                share.append(_stretch(weight, axis, row, first, end, self))
                if piece.shape != wanted.shape:
                    return f"it gives {tuple(piece.shape)} for some tokens alone, {tuple(wanted.shape)} among others"
                deviation = _deviation(output)
                if not math.isfinite(deviation):
                    return "it gives what is no number"
                worst = float(_moved(piece, wanted).max()) / deviation
                if not worst <= bound:
                    return f"{end - first} tokens by themselves get another result, by {worst:.1e} of the deviation"
            for number, slope in enumerate(_gradients(alone, share, parameters)):
                if slope is not None:
                    before = summed[number]
                    summed[number] = slope if before is None else before + slope
        for parameter, together, apart in zip(parameters, whole, summed, strict=True):
            if together is None or apart is None:
                if (together is None) != (apart is None):
                    return "the gradient of a parameter is there for some lengths only"
                continue
            scale = float(together.double().abs().max()) or 1.0
            worst = float(_moved(together, apart).max()) / scale
            if not worst <= 10 * bound:
                return f"a parameter {tuple(parameter.shape)} gets another gradient from all tokens, by {worst:.1e}"
        return None


def _gradients(outputs: Any, weights: Any, of: list[Any]) -> list[torch.Tensor | None]:
    """Return the gradients of a weighted sum of outputs; None for each that has none."""
    wanted = [(o, w) for o, w in zip(outputs, weights, strict=True) if o.requires_grad]
    if not wanted or not of:
        return [None] * len(of)
    return list(torch.autograd.grad(sum((o * w).sum() for o, w in wanted), of, allow_unused=True))


def _moved(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    return (before.detach().double() - after.detach().double()).abs()


def _deviation(value: torch.Tensor) -> float:
    """Return the unit of differences."""
    return float(value.detach().double().std(correction=0)) or 1.0


def _flat(output: Any) -> Iterator[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, dict):
        for part in output.values():
            yield from _flat(part)
    elif isinstance(output, (list, tuple)):
        for part in output:
            yield from _flat(part)


def _axis(output: torch.Tensor, rows: int, tokens: int) -> int | None:
    """Return the axis of tokens in an output: behind the rows', or of both together."""
    if output.dim() >= 2 and output.shape[0] == rows and tokens in output.shape[1:]:
        return 1 + list(output.shape[1:]).index(tokens)
    return 0 if output.dim() and output.shape[0] == rows * tokens else None


def _at(value: torch.Tensor, axis: int, token: int) -> torch.Tensor:
    """Return one token of the first row."""
    return value[token] if axis == 0 else value[0].select(axis - 1, token)


def _stretch(value: torch.Tensor, axis: int, row: int, first: int, end: int, probe: _Probe) -> torch.Tensor:
    """Return some tokens of one row, as a batch of their own."""
    if axis == 0:
        return value[row * probe.tokens + first : row * probe.tokens + end]
    return value[row : row + 1].narrow(axis, first, end - first)
