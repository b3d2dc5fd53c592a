"""What `compat.exactness` measures of a type with documents that have images."""

from __future__ import annotations

from typing import Any

import torch

from autopack import registry, tiny
from autopack.tiny import media_rows
from compat.images import compare, documents, failed, judged, refusal, takes_media
from compat.standins import set_implementation


def with_images(model: Any, task: str, dtype: torch.dtype) -> dict[str, Any]:
    """The same for documents with images, where tiny inputs can be made; otherwise that they are
    refused."""
    if not takes_media(model):
        return {
            "images": "none",
            "images reason": f"{type(model).__name__} is a model of text alone",
        }
    if "image" not in registry.media_of(model.config.model_type):
        found = refusal(model)
        return {
            "images": "refused" if found else "LEAK",
            "images reason": found,
            "images worst": "no error",
        }
    assert media_rows.form_of(model), f"{model.config.model_type} is said to be covered with images"
    stock = tiny.build(model.config.model_type, task=task, dtype=dtype)
    cast(stock, dtype)
    set_implementation(stock, model.config._attn_implementation)
    try:
        errors = compare(model, stock)
        if "video" in registry.media_of(model.config.model_type):
            of_videos = compare(model, stock, videos=True)
            errors = {name: max(value, of_videos[name]) for name, value in errors.items()}
    except Exception as error:
        return failed("images", stock, documents(stock), error)
    return judged("images", errors, dtype)


def cast(model: Any, dtype: torch.dtype) -> None:
    """Give everything in a model one precision: some parameters are made in float32 whatever dtype
    is asked for."""

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        # `Module.to` would drop the imaginary part (rotations of Llama 4's vision tower)
        if tensor.is_complex():
            return tensor.to(dtype.to_complex())
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    model._apply(cast)
