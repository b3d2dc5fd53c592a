"""The numbers of each step of a training loop that keeps none, taken from torch: a program's driver runs it inside."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def watched(output: Path) -> Iterator[list[dict[str, float]]]:
    """Seed all generators, and write `output/steps.json`: the loss of each `backward`, and the gradients of each step.

    Of the gradients that an optimizer is given it keeps the 2-norm and the 1-norm: clipping makes the first one the
    same in all steps. The list it gives can take more numbers of the body's own.
    """
    import numpy as np
    import torch
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    steps: list[dict[str, float]] = []
    autograd: Any = torch.autograd
    engine = autograd._engine_run_backward

    def noted_engine(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("accumulate_grad") and len(tensors) == 1 and tensors[0].numel() == 1:
            steps.append({"loss": tensors[0].detach().double().item()})
        return engine(tensors, *args, **kwargs)

    def noted_step(optimizer: Any, args: Any, kwargs: Any) -> None:
        gradients = [
            parameter.grad.detach().double().flatten()
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        whole = torch.cat(gradients) if gradients else torch.zeros(1)
        steps.append({"grad_norm": whole.norm().item(), "grad_sum": whole.abs().sum().item()})

    autograd._engine_run_backward = noted_engine
    hook = register_optimizer_step_pre_hook(noted_step)
    try:
        yield steps
    finally:
        hook.remove()
        autograd._engine_run_backward = engine
    (output / "steps.json").write_text(json.dumps(steps))


def driven(name: str, run: str, folder: Path, output: Path) -> list[str]:
    """What python is called with for a program that is a library: its module here is the driver."""
    return ["-m", f"compat.programs.{name}", run, str(folder), str(output)]
