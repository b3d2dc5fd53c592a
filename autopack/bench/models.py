"""Random models of any type in a given size, and how long a document a model takes."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from autopack.bench.sizes import SIZES, TINY
from autopack.inspection.configs import text_config
from autopack.registry import first_position
from autopack.tiny import configs, models, rules

_LATENT = ("num_key_value_heads", "head_dim")
"""What multi-head latent attention has by its own meaning: see `autopack.tiny`."""


def task_of(model_type: str) -> str:
    """What a type is built for unless told otherwise: a masked language model if it has one with an encoder alone."""
    masked = getattr(modeling_auto, f"{configs.TASKS['masked-lm']}_NAMES").get(model_type, "")
    return "masked-lm" if masked.endswith("ForMaskedLM") else "causal-lm"


def build(
    model_type: str, size: str, task: str, longest: int, *, attn: str | None, dtype: torch.dtype, device: str, seed: int
) -> PreTrainedModel:
    """Build a random model of a type and size (one of `sizes.NAMES`), whose positions reach to `longest`.

    The type decides what else it has. Windows and chunks of attention are those of the type's defaults, except in
    `tiny`, where they are a few tokens. Raises `CannotBuild`, and torch's errors for a device without the memory.
    """
    default = text_config(configs.config(model_type, task=task))
    given: dict[str, Any] = {}
    if hasattr(default, "max_position_embeddings"):
        given["max_position_embeddings"] = max(longest + 8, rules.POSITIONS)  # RoBERTa's first position is not 0
    if size == TINY:
        form: dict[str, Any] = {"task": task, "attn_implementation": attn, "dtype": dtype, "device": device}
        return models.build(model_type, **form, seed=seed, **given)
    own = text_config(CONFIG_MAPPING[model_type]())
    spans = {name: getattr(own, name) for name in rules.SPANS if isinstance(getattr(own, name, None), int)}
    fields = SIZES[size]
    if hasattr(default, "kv_lora_rank"):
        fields = {name: value for name, value in fields.items() if name not in _LATENT}
    given |= {name: value for name, value in {**fields, **spans}.items() if hasattr(default, name)}
    try:
        model_class, config = models.class_and_config(configs.config(model_type, task=task, **given), task)
        named: dict[str, Any] = {"dtype" if hasattr(config, "dtype") else "torch_dtype": dtype}
        torch.manual_seed(seed)
        with torch.device(device):
            return model_class._from_config(config, attn_implementation=attn, **named)
    except (ValueError, TypeError, AttributeError, ImportError, KeyError) as error:
        raise configs.CannotBuild(model_type, error) from error


def longest_document(model: PreTrainedModel) -> int | None:
    """How many tokens a document may have by the model's configuration, or None where it does not say."""
    known = getattr(text_config(model.config), "max_position_embeddings", None)
    return known - first_position(model.config) if isinstance(known, int) and known > 0 else None
