"""Tiny models, built from a tiny configuration, with random parameters large enough for every part
to matter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from autopack.registry import families
from autopack.tiny import configs, rules

NOISE = 0.1
EMBEDDING_STD = 0.5


def build(
    model_type: str,
    *,
    task: str = "causal-lm",
    attn_implementation: str | dict[str, str] = "eager",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    device: str | torch.device = "cpu",
    **config_overrides: Any,
) -> PreTrainedModel:
    """Build a tiny random model of `model_type`, in eval mode; for the overrides, see `config`.

    `task` names the model's class: one of `tiny.TASKS`.

    The same arguments give the same parameters. The global random state and the default dtype stay
    unchanged. Raises `CannotBuild` if the installed transformers lacks the type, if the type
    refuses the attention implementation, or if it is no language model on its own.
    """
    if model_type not in configs.types_for(task):
        reason = f"transformers {transformers.__version__} has no model of this type for {task}"
        raise configs.CannotBuild(model_type, reason)
    for family in families():
        if model_type in family.tiny.not_alone:
            raise configs.CannotBuild(model_type, family.refused_types[model_type])
    whole = configs.config(model_type, task=task, **config_overrides)
    try:
        with as_new(seed):
            model: Any = of_config(whole, task, attn_implementation, dtype)
    except Exception as error:
        raise configs.CannotBuild(model_type, error) from error
    randomize(model, seed)
    return model.to(device).eval()


def tokens(config: PretrainedConfig | None, *shape: int, seed: int = 0) -> Tensor:
    """Return random token ids of this shape, int64 on the CPU, none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(rules.ORDINARY.start, rules.ORDINARY.stop, shape, generator=generator)


@contextmanager
def as_new(seed: int) -> Iterator[None]:
    """Run the block with a new generator and default dtype float32; restore both at its end."""
    default_dtype = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float32)
        with torch.random.fork_rng(devices=[]):
            # not torch.manual_seed, which would also seed the generators of all accelerators
            torch.default_generator.manual_seed(seed)
            yield
    finally:
        torch.set_default_dtype(default_dtype)


def of_config(
    config: PretrainedConfig,
    task: str,
    attn_implementation: str | dict[str, str] | None,
    dtype: torch.dtype,
) -> PreTrainedModel:
    """Return a model of a task's class for a config, or for the part of it that the class takes."""
    found: Any = getattr(modeling_auto, configs.TASKS[task])[type(config)]
    model_class = found[0] if isinstance(found, tuple) else found
    fitting = (
        part
        for part in (config, *vars(config).values())
        if isinstance(part, model_class.config_class)
    )
    own = next(fitting, config)
    return of_class(model_class, own, attn_implementation, dtype)


def of_class(
    cls: Any, config: PretrainedConfig, attn_implementation: Any, dtype: torch.dtype
) -> PreTrainedModel:
    """Return a new model of a class, with parameters as the class initialises them."""
    # transformers 4.56 renamed the argument together with the field of the configuration.
    named = {"dtype" if hasattr(config, "dtype") else "torch_dtype": dtype}
    return cls._from_config(config, attn_implementation=attn_implementation, **named)


@torch.no_grad()
def randomize(model: nn.Module, seed: int) -> None:
    """Redraw all floating parameters in place, tied ones once; buffers keep their values.

    Weights of linear maps and convolutions become normal with variance one over their fan-in.
    Everything else keeps its initial value (a norm's one or zero, a decay), with noise added.
    """
    generator = torch.Generator().manual_seed(seed)
    seen: set[Tensor] = set()
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if parameter in seen or not parameter.is_floating_point() or not parameter.numel():
                continue
            seen.add(parameter)
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(_fresh(module, parameter.detach().float().cpu(), noise))


def _fresh(module: nn.Module, present: Tensor, noise: Tensor) -> Tensor:
    """Return a new value for a parameter, from noise of a scale that suits its module."""
    if hasattr(module, "make_weight"):  # a table of sines, which grows with the calls (FSMT)
        return present
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
