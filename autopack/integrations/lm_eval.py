"""Support lm-eval's `HFLM`, which pads texts for a causal model and calls it without a mask.

The padding is on the right, so no token sees it, and its logits are never read: the batch may run
without it. Only the function that pads knows where the padding lies. While an `HFLM` is enabled,
that function notes the padding beside the tensor that it makes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from autopack.integrations.trainers import derives_from
from autopack.layout.host import note_padding
from autopack.patching import Site, SiteLease

_MODULE = "lm_eval.models.huggingface"


def is_harness(holder: Any) -> bool:
    """Return True if this is an `HFLM` or derives from it, without importing lm-eval."""
    return derives_from(holder, "HFLM", _MODULE)


def lease() -> SiteLease:
    """Return a lease of the site of lm-eval's function that pads batches."""
    return SiteLease(_sites)


def _sites(_: tuple[str, ...]) -> list[Site]:
    """Return the site of lm-eval's function that pads a batch, in a list."""
    named = ("max_length", "tensors", "padding_side")
    return [Site(_MODULE, "pad_and_concat", _adapt, parameters=named, soft=True)]


def _adapt(original: Callable[..., Any], site: Site) -> Callable[..., Any]:
    """Return lm-eval's padding function, extended to note the padding of its batch."""

    def pad_and_concat(
        max_length: int, tensors: list[torch.Tensor], padding_side: Any = "right"
    ) -> torch.Tensor:
        # it writes to the list
        lengths = np.array([tensor.shape[-1] for tensor in tensors])[:, None]
        batch = original(max_length, tensors, padding_side)
        if padding_side == "right" and len(lengths) == len(batch):
            note_padding(batch, np.arange(batch.shape[1]) < lengths)
        return batch

    return pad_and_concat
