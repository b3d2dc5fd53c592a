"""Packed rows of documents with images, videos or sounds, and each of their documents by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from autopack.registry import first_position
from autopack.tiny import images
from autopack.tiny.images import Document


def packed(model: PreTrainedModel, found: Sequence[Sequence[Document]], **others: Any) -> dict[str, Any]:
    """The arguments of packed rows of documents, with position_ids as collators write them; those of the halves of an
    encoder-decoder come with masks that number them."""
    if model.config.is_encoder_decoder:
        halves = {"attention_mask": "input_ids", "decoder_attention_mask": "decoder_input_ids"}
        taken = {name: tokens for name, tokens in halves.items() if tokens in found[0][0].tokens}
        masks = {name: torch.cat([numbered(each, tokens) for each in found]) for name, tokens in taken.items()}
        return {**images.rows(model, found), **masks, **others}
    first = first_position(model.config)
    where = [torch.cat([torch.arange(first, first + len(d)) for d in each]) for each in found]
    return {**images.rows(model, found), "position_ids": torch.stack(where), **others}


def numbered(found: Sequence[Document], name: str) -> torch.Tensor:
    """The numbers of the documents of a row, from one, for each token that they have under this name."""
    lengths = [d.tokens[name].shape[1] for d in found]
    return torch.repeat_interleave(torch.arange(1, len(found) + 1), torch.tensor(lengths))[None]


def alone(model: PreTrainedModel, document: Document, **others: Any) -> Any:
    """The output for one document by itself, which the model numbers as it always does."""
    arguments: dict[str, Any] = images.row(model, [document])
    # Every processor gives a mask, and some models compute positions only beside one.
    if "input_ids" in arguments:
        arguments["attention_mask"] = torch.ones_like(arguments["input_ids"])
    output = model(**arguments, use_cache=False, **others)
    output.logits = output.logits[:, -len(document) :]  # GIT has some of the image too
    return output


def spans(found: Sequence[Sequence[Document]]) -> list[tuple[Document, int, int, int]]:
    """Each document with its row, first and end column."""
    places = []
    for row, each in enumerate(found):
        first = 0
        for document in each:
            places.append((document, row, first, first + len(document)))
            first += len(document)
    return places
