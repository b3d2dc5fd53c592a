"""A tokenizer of random words, tiny models for it, and texts: what a program's driver trains on."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

WORDS = [f"w{number}" for number in range(200)]
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>", "<mask>", "Human:", "Assistant:", "System:"]
"""The last three are those of LLaMA-Factory's default template."""
DTYPE = "AUTOPACK_PROGRAMS_DTYPE"
"""Environment variable with the type of weights that models are written in; float32 without it."""
_SIZES: dict[str, int] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
_TOKENS: dict[str, int] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def save_tokenizer(folder: Path, framed: int | None = None) -> None:
    """Write a tokenizer with one token for each word.

    A `framed` one makes `<s> text </s>`, and `<s> one </s> other </s>` of a pair; of texts of so
    many tokens, unless 0."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *WORDS])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    if framed is not None:
        made.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>",
            pair="<s> $A </s> $B:1 </s>:1",
            special_tokens=[("<s>", 1), ("</s>", 2)],
        )
    names: dict[str, Any] = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
    }
    names |= {"mask_token": "<mask>", "cls_token": "<s>", "sep_token": "</s>"}
    if framed:
        names["model_max_length"] = framed
    PreTrainedTokenizerFast(tokenizer_object=made, **names).save_pretrained(folder)


def save_model(
    folder: Path,
    model_type: str,
    auto: str = "AutoModelForCausalLM",
    framed: int | None = None,
    **fields: Any,
) -> None:
    """Write a tiny model with random weights (seed 0), and its tokenizer, where `from_pretrained`
    finds them.

    Fields without dropout suit a comparison by step; a type whose configuration has other names for
    its sizes, or dropout, says so in `fields`."""
    import torch
    import transformers

    torch.manual_seed(0)
    own = (
        {}
        if framed is None
        else {**_NO_DROPOUT, **({"max_position_embeddings": framed} if framed else {})}
    )
    sizes = {"vocab_size": len(SPECIAL) + len(WORDS), **_SIZES, **_TOKENS, **own, **fields}
    config = transformers.AutoConfig.for_model(model_type, **sizes)
    model = getattr(transformers, auto).from_config(config)
    model.to(getattr(torch, os.environ.get(DTYPE, "float32"))).save_pretrained(folder)
    save_tokenizer(folder, framed)


def text(draw: random.Random, most: int) -> str:
    """Between 3 and `most` words."""
    return " ".join(draw.choices(WORDS, k=draw.randrange(3, most)))
