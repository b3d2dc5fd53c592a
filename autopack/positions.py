"""Where the positions of a document start: 0, except for models that reserve the first positions for padding."""

from __future__ import annotations

from typing import Any

__all__ = ["AFTER_PAD_TOKEN", "AT_CONSTANT", "first_position"]

AFTER_PAD_TOKEN = {"camembert", "data2vec-text", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl"}
AFTER_PAD_TOKEN |= {"esm", "ibert", "layoutlmv3", "lilt", "longformer", "luke", "markuplm", "xmod"}
AFTER_PAD_TOKEN |= {f"{name}_text_model" for name in ("altclip", "bridgetower", "clap", "kosmos_2", "kosmos_2_5")}
"""Model types whose documents start at `pad_token_id + 1`."""
AT_CONSTANT = {"mpnet": 2, "mra": 2, "nystromformer": 2, "yoso": 2}
"""Model types whose documents start at a position of their own, whatever the padding token is."""


def first_position(config: Any) -> int:
    """Position of the first token of a document for models of this config.

    Raises `ValueError` for a RoBERTa-like config without the `pad_token_id` that its positions start after.
    """
    model_type = getattr(config, "model_type", "")
    if model_type not in AFTER_PAD_TOKEN:
        return AT_CONSTANT.get(model_type, 0)
    pad_token_id = getattr(config, "pad_token_id", None)
    if not isinstance(pad_token_id, int):
        raise ValueError(f"{model_type}: wanted config.pad_token_id, found {pad_token_id}; pass first_position")
    return pad_token_id + 1
