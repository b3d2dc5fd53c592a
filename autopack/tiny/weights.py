"""Random parameters that are large enough for every part of a tiny model to matter."""

from __future__ import annotations

import torch
from torch import nn

NOISE = 0.1
EMBEDDING_STD = 0.5


@torch.no_grad()
def randomize(model: nn.Module, seed: int) -> None:
    """Redraw all floating parameters in place, each once, so that tied weights stay tied; buffers keep their values.

    Weights of linear maps and convolutions become normal with variance one over their fan-in. Everything else keeps the
    value that its own initialisation means (a norm's one or zero, a decay) and has noise added.
    """
    generator = torch.Generator().manual_seed(seed)
    seen: set[int] = set()
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if id(parameter) in seen or not parameter.is_floating_point() or not parameter.numel():
                continue
            seen.add(id(parameter))
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(_fresh(module, parameter.detach().float().cpu(), noise))


def _fresh(module: nn.Module, present: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    if isinstance(module, nn.Embedding):
        return noise * EMBEDDING_STD
    if present.ndim >= 2:
        if isinstance(module, nn.Linear) or "Conv" in type(module).__name__:
            # transformers' Conv1D is a linear map that is stored as (in, out)
            fan_in = present.shape[0] if hasattr(module, "nf") else present[0].numel()
            return noise / fan_in**0.5
        if not present.isfinite().all() or present.mean().abs() <= present.std(correction=0) / 2:
            return noise / max(min(present.shape[-2:]), 4) ** 0.5
    if not present.isfinite().all():
        return noise * NOISE
    return present + noise * NOISE
