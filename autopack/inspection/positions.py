"""The positions that models give their tokens: in a document alone, and in a padded batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["AFTER_PAD_TOKEN", "AT_CONSTANT", "first_position", "in_padded_batch", "known_in_padded_batch"]

AFTER_PAD_TOKEN = {"camembert", "data2vec-text", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl"}
AFTER_PAD_TOKEN |= {"esm", "ibert", "layoutlmv3", "lilt", "longformer", "luke", "markuplm", "xmod"}
AFTER_PAD_TOKEN |= {f"{name}_text_model" for name in ("altclip", "bridgetower", "clap", "kosmos_2", "kosmos_2_5")}
"""Model types whose documents start at `pad_token_id + 1`."""
AT_CONSTANT = {"mpnet": 2, "mra": 2, "nystromformer": 2, "paligemma": 1, "yoso": 2}
"""Model types whose documents start at a position of their own, whatever the padding token is."""
_FROM_MASK = {"opt"}
"""Model types that count positions along the attention mask, and so skip padding."""
_CHANGED = {"biogpt"}
"""Model types that counted along the mask in some releases and take the column in others."""


def first_position(config: Any) -> int:
    """Position of the first token of a document for models of this config.

    Raises `ValueError` for a RoBERTa-like config without the `pad_token_id` that its positions start after.
    """
    model_type = getattr(config, "model_type", "")
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    if model_type not in AFTER_PAD_TOKEN and getattr(text, "model_type", "") in AFTER_PAD_TOKEN:
        config, model_type = text, text.model_type
    if model_type not in AFTER_PAD_TOKEN:
        return AT_CONSTANT.get(model_type, 0)
    pad_token_id = getattr(config, "pad_token_id", None)
    if not isinstance(pad_token_id, int):
        raise ValueError(f"{model_type}: wanted config.pad_token_id, found {pad_token_id}; pass first_position")
    return pad_token_id + 1


def known_in_padded_batch(model_type: str, counts_along_mask: bool) -> bool:
    """Whether `in_padded_batch` says what a covered model does where padding is not on the right.

    `counts_along_mask` says whether the model's code adds up a mask, as most releases of most models do not.
    """
    return model_type in _FROM_MASK or not (counts_along_mask or model_type in _CHANGED)


def in_padded_batch(config: Any, mask: torch.Tensor, input_ids: torch.Tensor | None) -> torch.Tensor:
    """The positions that a model gives a padded batch when it is told none: int64 (rows, columns).

    Most take the number of the column, whatever the mask (rows, columns) says.
    """
    import torch

    columns = torch.arange(mask.shape[1], device=mask.device).expand(mask.shape)
    model_type = getattr(config, "model_type", "")
    if model_type in _FROM_MASK:
        return mask.long().cumsum(1) - 1
    start = first_position(config)
    if model_type in AFTER_PAD_TOKEN and input_ids is not None:
        counted = input_ids.ne(start - 1).long()
        return counted.cumsum(1) * counted + start - 1
    return columns + start
