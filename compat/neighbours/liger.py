"""Liger: its patches of transformers' classes, its modules, forward and loss, with torch in place
of its kernels.

Liger's kernels are Triton's and need an accelerator. Everything else of it runs as released; the
four functions that launch kernels are replaced by torch code of the same arguments, which the table
says."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.nn import functional

from compat.neighbours.measure import BEFORE, Enable, Make, Scenario, llama, wrapping

NOTE = "its Triton kernels need a GPU: torch code stands in for them, all the rest of it is its own"


class _Norm:
    @staticmethod
    def apply(
        states: Any, weight: Any, eps: float, offset: float, casting_mode: str, *_: Any
    ) -> torch.Tensor:
        """Root mean square over the last dimension."""
        if casting_mode != "llama":
            raise NotImplementedError(casting_mode)
        whole = states.float()
        whole = whole * torch.rsqrt(whole.pow(2).mean(-1, keepdim=True) + eps)
        return (weight + offset) * whole.to(states.dtype)


class _Gate:
    @staticmethod
    def apply(a: Any, b: Any, gate: float = 1.0, down: float = 1.0) -> torch.Tensor:
        """`silu(gate * a) * b * down`."""
        return functional.silu(a * gate) * b * down


def _rotate(
    name: str, q: Any, k: Any, cos: Any, sin: Any, *_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    if name != "rope":
        raise NotImplementedError(name)

    def turned(x: Any) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        return x * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]

    return turned(q), turned(k)


class _FusedLoss:
    @staticmethod
    def apply(
        states: Any, weight: Any, target: Any, bias: Any, of_class: Any, ignored: int, *more: Any
    ) -> Any:
        """The loss of `states @ weight.T`; its value, and None for what else the kernel returns if
        asked."""
        reduction = more[2]
        logits = functional.linear(states, weight, bias).float()
        return functional.cross_entropy(
            logits, target, ignore_index=ignored, reduction=reduction
        ), *[None] * 3


class _Loss:
    @staticmethod
    def apply(logits: Any, target: Any, weight: Any, ignored: int, *more: Any) -> Any:
        """Cross entropy of logits, in torch's own code below the function that Liger patches."""
        reduction = {"none": 0, "mean": 1, "sum": 2}[more[2]]
        values: tuple[Any, ...] = logits.float(), target, weight, reduction, ignored, 0.0
        return torch._C._nn.cross_entropy_loss(*values), *[None] * 3


@contextlib.contextmanager
def patched() -> Iterator[None]:
    """Torch code in place of the kernels; on leaving, transformers' classes and torch's loss are
    what they were."""
    import liger_kernel.transformers.functional as of_losses
    from liger_kernel.transformers import rms_norm, rope, swiglu
    from transformers.models.llama import modeling_llama

    places: list[tuple[Any, str, Any]] = [
        (rms_norm, "LigerRMSNormFunction", _Norm),
        (swiglu, "LigerSiLUMulFunction", _Gate),
        (rope, "dispatch", _rotate),
        (of_losses, "LigerFusedLinearCrossEntropyFunction", _FusedLoss),
        (of_losses, "LigerCrossEntropyFunction", _Loss),
    ]
    # what Liger itself replaces stays as it is until then
    for name in ("apply_rotary_pos_emb", "LlamaRMSNorm", "LlamaMLP"):
        places.append((modeling_llama, name, getattr(modeling_llama, name)))
    forward = modeling_llama.LlamaForCausalLM.forward
    places.append((modeling_llama.LlamaForCausalLM, "forward", forward))
    places.append((functional, "cross_entropy", functional.cross_entropy))
    with contextlib.ExitStack() as stack:
        for place in places:
            stack.enter_context(mock.patch.object(*place))
        yield


def _classes(**options: Any) -> Make:
    """All models of the type: patched before the model is built, or after it is enabled."""

    def make(order: str, enable: Enable) -> Any:
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        if order == BEFORE:
            model = llama()
            enable(model)
            apply_liger_kernel_to_llama(**options)
            return model
        apply_liger_kernel_to_llama(**options)
        model = llama()
        enable(model)
        return model

    return make


def _instance(model: Any) -> Any:
    """One model, as a Trainer with `use_liger_kernel=True` patches it."""
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    apply_liger_kernel_to_llama(model=model)
    return model


def scenarios() -> list[Scenario]:
    """Classes with the fused loss, with the plain one, and an instance."""
    makes: dict[str, Callable[[str, Enable], Any]] = {
        "`apply_liger_kernel_to_llama()`": _classes(),
        "the same, `cross_entropy=True` instead of the fused loss": _classes(
            cross_entropy=True, fused_linear_cross_entropy=False
        ),
        "`apply_liger_kernel_to_llama(model=model)`, as `use_liger_kernel=True` of a Trainer": wrapping(
            _instance
        ),
    }
    return [
        Scenario("liger-kernel", what, make, around=patched, note=NOTE)
        for what, make in makes.items()
    ]
