"""A tokenizer of random words, tiny models for it, and texts: what a program's driver trains on."""

from __future__ import annotations

import json
import os
import random
import re
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

WORDS = [f"w{number}" for number in range(200)]
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>", "<mask>", "Human:", "Assistant:", "System:"]
"""The last three are those of LLaMA-Factory's default template."""
DTYPE = "AUTOPACK_PROGRAMS_DTYPE"
"""Environment variable with the type of weights that models are written in; float32 without it."""
_FIELDS: dict[str, int] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def tokenizer_of(words: list[str] = WORDS, framed: int | None = None) -> Any:
    """A tokenizer with one token for each word.

    A `framed` one makes `<s> text </s>`, and `<s> one </s> other </s>` of a pair; of texts of so
    many tokens, unless 0."""
    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *words])}
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
        "mask_token": "<mask>",
        "cls_token": "<s>",
        "sep_token": "</s>",
    }
    if framed:
        names["model_max_length"] = framed
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **names)


def save_model(
    folder: Path,
    type: str,
    auto: str = "AutoModelForCausalLM",
    framed: int | None = None,
    **fields: Any,
) -> None:
    """Write a tiny model with random weights (seed 0), and its tokenizer, where `from_pretrained`
    finds them.

    Fields without dropout suit a comparison by step; a type whose configuration has other names for
    its sizes, or dropout, says so in `fields`."""
    torch.manual_seed(0)
    own: dict[str, Any] = {} if framed is None else dict(_NO_DROPOUT)
    if framed:
        own["max_position_embeddings"] = framed
    sizes = {"vocab_size": len(SPECIAL) + len(WORDS), **_FIELDS, **own, **fields}
    config = transformers.AutoConfig.for_model(type, **sizes)
    model = getattr(transformers, auto).from_config(config)
    model.to(getattr(torch, os.environ.get(DTYPE, "float32"))).save_pretrained(folder)
    tokenizer_of(framed=framed).save_pretrained(folder)


def text(draw: random.Random, most: int) -> str:
    """Between 3 and `most` words."""
    return " ".join(draw.choices(WORDS, k=draw.randrange(3, most)))


def write_rows(file: Path, count: int, *templates: Any) -> None:
    """Write so many rows, a line of JSON each, by templates in turn.

    `{20}` in a template stands for a text of at most so many words.
    """
    draw = random.Random(0)

    def filled(template: Any) -> Any:
        if isinstance(template, dict):
            return {name: filled(value) for name, value in template.items()}
        if isinstance(template, list):
            return [filled(value) for value in template]
        if isinstance(template, str):
            return re.sub(r"\{(\d+)\}", lambda most: text(draw, int(most[1])), template)
        return template

    file.parent.mkdir(exist_ok=True)
    lines = (json.dumps(filled(templates[number % len(templates)])) for number in range(count))
    file.write_text("".join(f"{line}\n" for line in lines))


def rows_of(file: Path) -> list[Any]:
    """The rows of a file that has a line of JSON for each."""
    return [json.loads(line) for line in file.read_text().splitlines()]
