"""Subjects of benchmarks: random models of any type in a given size, and lengths of documents like
known data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

TINY = "tiny"
_LATENT = ("num_key_value_heads", "head_dim")
"""Fields that mean something else in multi-head latent attention: see `autopack.tiny`."""


SIZES: dict[str, dict[str, int]] = json.loads(
    Path(__file__).with_name("sizes.json").read_text(encoding="utf-8")
)
"""Fields of a Llama's configuration by size, in the proportions of released ones. Other types have
more or fewer parameters: fields with other names, and others beside these (experts, states of
mixers), are as in `autopack.tiny`."""
NAMES = (TINY, *SIZES)
SHORTEST = 4


class Lengths(NamedTuple):
    """Lognormal distribution of lengths in tokens: mean before cutting, and sigma of the
    logarithm."""

    mean: float
    sigma: float


DISTRIBUTIONS = {"flan": Lengths(471, 1.0), "orcamath": Lengths(500, 0.4)}
"""FLAN_20k has 9.4 million tokens in 19,961 rows (arXiv 2407.09105, Table 2: 2,294 rows of 4096)
and a large variance. OrcaMath is somewhat longer and varies much less, says
huggingface.co/blog/packing-with-FA2, without figures: mean and sigma are assumed, so that
mini-batches of 4 have 1.45 padded tokens per real one, about what a gain of 1.4 needs."""


def draw(
    lengths: Lengths,
    count: int,
    longest: int,
    seed: int | list[int],
    scale: int = 1,
    shortest: int = SHORTEST,
) -> np.ndarray:
    """Return `count` random lengths, divided by `scale` and clipped to bounds, (count,) int64."""
    mean, sigma = lengths
    drawn = np.random.default_rng(seed).lognormal(np.log(mean) - sigma**2 / 2, sigma, count)
    return np.clip(np.round(drawn / scale), min(shortest, longest), longest).astype(np.int64)


def build(
    model_type: str,
    size: str,
    task: str,
    longest: int,
    *,
    attn: str | None,
    dtype: torch.dtype,
    device: str = "cpu",
    seed: int = 0,
) -> PreTrainedModel:
    """Build a random model of a type and size (one of `NAMES`), whose positions reach to `longest`.

    The type decides what else it has. Windows and chunks of attention are the type's defaults,
    except in `tiny`, where they are a few tokens. Raises `CannotBuild`, and torch's
    errors for a device without the memory."""
    import torch
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from autopack.inspection.configs import text_config
    from autopack.tiny import configs, models, rules

    default = text_config(configs.config(model_type, task=task))
    given: dict[str, Any] = {}
    if longest and hasattr(default, "max_position_embeddings"):
        # RoBERTa's first position is not 0
        given["max_position_embeddings"] = max(longest + 8, rules.POSITIONS)
    if size == TINY:
        kind: Any = attn
        return models.build(
            model_type,
            task=task,
            attn_implementation=kind,
            dtype=dtype,
            device=device,
            seed=seed,
            **given,
        )
    own = text_config(CONFIG_MAPPING[model_type]())
    spans = {
        name: getattr(own, name)
        for name in rules.SPANS
        if isinstance(getattr(own, name, None), int)
    }
    fields = SIZES[size]
    if hasattr(default, "kv_lora_rank"):
        fields = {name: value for name, value in fields.items() if name not in _LATENT}
    given |= {name: value for name, value in {**fields, **spans}.items() if hasattr(default, name)}
    try:
        torch.manual_seed(seed)
        with torch.device(device):
            return models.of_config(
                configs.config(model_type, task=task, **given), task, attn, dtype
            )
    except (ValueError, TypeError, AttributeError, ImportError, KeyError) as error:
        raise configs.CannotBuild(model_type, error) from error


def longest_document(model: PreTrainedModel) -> int | None:
    """Return the most tokens that a model's configuration allows a document; None if unbounded."""
    from autopack.inspection.configs import text_config
    from autopack.registry import first_position

    known = getattr(text_config(model.config), "max_position_embeddings", None)
    return known - first_position(model.config) if isinstance(known, int) and known > 0 else None
