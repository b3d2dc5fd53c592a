"""Documents with images, videos or sounds, packed rows of them, and each of them by itself."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from transformers import PreTrainedModel

from autopack.registry import families, first_position
from autopack.tiny.models import tokens

_ALONG = {"row of patches": -1, "flat patches": 1}
"""Dimension along which pixels of several images are joined, if it is not the first."""
NUMBERS = "image_token_pooling"
SEEN = {"nested, seen": "image_attention_mask", "tiles by row": "cross_attention_mask"}
"""Forms of types whose text attends to images across, and the argument that tells which token sees
which."""


@dataclass(frozen=True)
class Document:
    """One document: its values per token, (1, tokens), and the arguments of each of its images.

    Its length is the number of tokens that the model predicts: in an encoder-decoder, the decoder's
    tokens.
    """

    tokens: dict[str, torch.Tensor]
    images: tuple[dict[str, Any], ...]
    seen: dict[str, torch.Tensor] = field(default_factory=dict)
    """Images that each token sees, (1, tokens, images, ...), if text attends to them across."""

    def __len__(self) -> int:
        return self.predicted.shape[1]

    @property
    def predicted(self) -> torch.Tensor:
        """Tokens that the model predicts, (1, tokens)."""
        return self.tokens["decoder_input_ids" if "decoder_input_ids" in self.tokens else "input_ids"]


def form_of(model: PreTrainedModel, media: str = "images") -> str | None:
    """Return the form in which the type takes images or sounds.

    None means that no family knows it, and no documents can be made.
    """
    forms = ((form, types) for family in families() for form, types in getattr(family.tiny, media).items())
    return next((form for form, types in forms if model.config.model_type in types), None)


def runs(
    config: Any,
    parts: Sequence[int | str],
    seed: int,
    placeholder: int,
    around: Sequence[tuple[str, str]],
    count_of_next: Callable[[], int],
) -> Iterator[torch.Tensor]:
    """Yield the tokens (1, tokens) of each part of a document: of text, or placeholders of the next
    medium.

    The fields `around` of a configuration name the tokens that begin and end a medium, if it has
    such fields.
    """
    for number, part in enumerate(parts):
        if isinstance(part, int):
            yield tokens(config, 1, part, seed=seed * 100 + number)
            continue
        ids = torch.full((1, count_of_next()), placeholder)
        for names in around:
            start, end = (getattr(config, name, None) for name in names)
            if isinstance(start, int) and isinstance(end, int):
                ids = torch.cat([torch.tensor([[start]]), ids, torch.tensor([[end]])], dim=1)
        yield ids


def features_of(model: Any, medium: str, given: dict[str, Any]) -> tuple[Any, int]:
    """Return a model's features of an image, a video or a sound by itself, and their number."""
    holders = (getattr(model, "model", None), model)
    function: Any = next(f for m in holders if (f := getattr(m, f"get_{medium}_features", None)) is not None)
    known = inspect.signature(function).parameters
    named = known if known.keys() & given.keys() else given  # one of somebody's that hands all on
    # MOSS asks for a mask that it does not read
    taken = {name: given.get(name) for name in named if name in given or name == "padding_mask"}
    layers = [name for name in named if name.startswith("vision_feature") and hasattr(model.config, name)]
    with torch.no_grad():
        output = function(**taken, **{name: getattr(model.config, name) for name in layers})
    found = getattr(output, "pooler_output", None)
    found = getattr(output, "last_hidden_state", output) if found is None else found
    if getattr(output, "deepstack_features", None) is not None and found is None:
        found = output.deepstack_features[0][1]  # all that there is: features to be added in several layers
    return output, sum(
        part.numel() // part.shape[-1] for part in (found if isinstance(found, list | tuple) else [found])
    )


def row(model: PreTrainedModel, documents: Sequence[Document]) -> dict[str, Any]:
    """Return the arguments of a row of these documents, with nothing that declares where one
    ends."""
    return rows(model, [documents])


def rows(model: PreTrainedModel, documents: Sequence[Sequence[Document]]) -> dict[str, Any]:
    """Return the arguments of several rows of documents, which must be equally long."""
    names = documents[0][0].tokens
    arguments = {
        name: torch.cat([torch.cat([d.tokens[name] for d in each], dim=1) for each in documents]) for name in names
    }
    pictures = [picture for each in documents for d in each for picture in d.images]
    if pictures:
        form = form_of(model) or ""
        for name in pictures[0]:
            if form.startswith("nested") or form in SEEN:
                arguments[name] = _by_row(name, documents)
            else:
                along = _ALONG.get(form, 0) if name.startswith("pixel_values") else 0
                arguments[name] = _in_order(name, documents, along)
        for name in {name for each in documents for d in each for name in d.seen}:
            arguments[name] = _along_diagonal(name, documents)
        if form == "numbered patches":
            arguments[NUMBERS] = _going_on(pictures)
    return arguments


def _going_on(pictures: Sequence[dict[str, Any]]) -> torch.Tensor:
    """Return patch numbers over all pictures, where each picture has its own from 0."""
    counts = [picture["pixel_values"].shape[:2].numel() for picture in pictures]
    before = [sum(counts[:place]) for place in range(len(counts))]
    numbers = (picture[NUMBERS] for picture in pictures)
    return torch.cat([torch.where(found < 0, found, found + n) for found, n in zip(numbers, before, strict=True)])


def _in_order(name: str, documents: Sequence[Sequence[Document]], along: int) -> Any:
    found: list[Any] = [picture[name] for each in documents for d in each for picture in d.images]
    if isinstance(found[0], list):
        return [*chain.from_iterable(found)]
    return torch.cat(_padded(found) if len({value.ndim for value in found}) == 1 and along == 0 else found, dim=along)


def _padded(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return values with zeros behind them, each as large as the largest but along the first
    dimension."""
    most = [max(sizes) for sizes in zip(*(value.shape[1:] for value in values), strict=True)]
    missing = ([m - size for m, size in zip(most, value.shape[1:], strict=True)] for value in values)
    pads = ([n for behind in reversed(each) for n in (0, behind)] for each in missing)
    return [torch.nn.functional.pad(value, pad) for value, pad in zip(values, pads, strict=True)]


def _by_row(name: str, documents: Sequence[Sequence[Document]]) -> torch.Tensor:
    """Return the images of each row, with empty ones at the end if other rows have more."""
    none = next(d.images[0][name] for each in documents for d in each if d.images)[:, :0]
    rows = [[picture[name] for d in each for picture in d.images] for each in documents]
    return torch.cat(_padded([torch.cat([none, *pictures], dim=1) for pictures in rows]))


def _along_diagonal(name: str, documents: Sequence[Sequence[Document]]) -> torch.Tensor:
    most = max(sum(len(d.images) for d in each) for each in documents)
    like = next(d.seen[name] for each in documents for d in each if d.seen)
    found = like.new_zeros(len(documents), sum(map(len, documents[0])), most, *like.shape[3:])
    for row, each in enumerate(documents):
        first = images = 0
        for document in each:
            if document.seen:
                found[row, first : first + len(document), images : images + len(document.images)] = document.seen[name]
            first, images = first + len(document), images + len(document.images)
    return found


def packed(model: PreTrainedModel, found: Sequence[Sequence[Document]], **others: Any) -> dict[str, Any]:
    """Return the arguments of packed rows of documents, with position_ids as collators write them.

    The halves of an encoder-decoder come with masks that number their documents.
    """
    if model.config.is_encoder_decoder:
        halves = {"attention_mask": "input_ids", "decoder_attention_mask": "decoder_input_ids"}
        taken = {name: tokens for name, tokens in halves.items() if tokens in found[0][0].tokens}
        masks = {name: torch.cat([numbered(each, tokens) for each in found]) for name, tokens in taken.items()}
        return {**rows(model, found), **masks, **others}
    first = first_position(model.config)
    where = [torch.cat([torch.arange(first, first + len(d)) for d in each]) for each in found]
    return {**rows(model, found), "position_ids": torch.stack(where), **others}


def numbered(found: Sequence[Document], name: str) -> torch.Tensor:
    """Return, for each token that a row's documents have under this name, the document's number
    from one."""
    lengths = [d.tokens[name].shape[1] for d in found]
    return torch.repeat_interleave(torch.arange(1, len(found) + 1), torch.tensor(lengths))[None]


def alone(model: PreTrainedModel, document: Document, **others: Any) -> Any:
    """Return the output for one document by itself, which the model numbers as it always does."""
    arguments: dict[str, Any] = row(model, [document])
    # Every processor gives a mask, and some models compute positions only beside one.
    if "input_ids" in arguments:
        arguments["attention_mask"] = torch.ones_like(arguments["input_ids"])
    output = model(**arguments, use_cache=False, **others)
    output.logits = output.logits[:, -len(document) :]  # GIT has some of the image too
    return output


def spans(found: Sequence[Sequence[Document]]) -> list[tuple[Document, int, int, int]]:
    """Return each document with its row, first and end column."""
    places = []
    for row, each in enumerate(found):
        first = 0
        for document in each:
            places.append((document, row, first, first + len(document)))
            first += len(document)
    return places
