"""Documents with images, videos or sounds, a packed row of them, and each of them by itself."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from math import prod
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from autopack.registry import families, first_position
from autopack.tiny import rules
from autopack.tiny.models import tokens

Arguments = dict[str, Any]
"""Arguments of a call, by name."""
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

    tokens: dict[str, Tensor]
    images: tuple[Arguments, ...]
    seen: dict[str, Tensor] = field(default_factory=dict)
    """Images that each token sees, (1, tokens, images, ...), if text attends to them across."""

    def __len__(self) -> int:
        return self.predicted.shape[1]

    @property
    def predicted(self) -> Tensor:
        """The decoder's input tokens if there are any, or else the model's, (1, tokens)."""
        return self.tokens[
            "decoder_input_ids" if "decoder_input_ids" in self.tokens else "input_ids"
        ]


def form_of(model: PreTrainedModel, media: str = "images") -> str | None:
    """Return the name of the form in which a model's type takes images or sounds, or None.

    None means that no family knows it, and no documents can be made.
    """
    forms = (
        (form, types)
        for family in families()
        for form, types in getattr(family.tiny, media).items()
    )
    return next((form for form, types in forms if model.config.model_type in types), None)


def tokens_of_parts(
    model: PreTrainedModel,
    parts: Sequence[int | str],
    seed: int,
    fields: str,
    around: tuple[str, str],
    kinds: dict[str, int],
    count_of_next: Callable[[], int],
) -> tuple[dict[str, Tensor], Tensor]:
    """Return ({name: a document's values per token, (1, tokens)}, True at placeholders of media).

    A part is text, or placeholders of the next medium. The first of `fields` of a configuration
    names the placeholder, and those `around` the tokens that begin and end a medium, if it has such
    fields. `kinds` are the values at placeholders of arguments that a model may take beside tokens.
    """
    config: Any = model.config
    owners = (config, getattr(config, "audio_config", None))
    known = (getattr(owner, name, None) for owner in owners for name in fields.split())
    placeholder = next((value for value in known if isinstance(value, int)), rules.VOCAB - 1)
    found = []
    for number, part in enumerate(parts):
        if isinstance(part, int):
            found.append(tokens(config, 1, part, seed=seed * 100 + number))
            continue
        ids = [placeholder] * count_of_next()
        for names in around:
            start, end = (getattr(config, name, None) for name in names.split())
            if isinstance(start, int) and isinstance(end, int):
                ids = [start, *ids, end]
        found.append(torch.tensor([ids]))
    whole = torch.cat(found, dim=1)
    places, taken = whole == placeholder, inspect.signature(type(model).forward).parameters
    others = {name: kind * places.long() for name, kind in kinds.items() if name in taken}
    return {"input_ids": whole, **others}, places


def made_of(
    forms: str,
    form: str | None,
    sizes: Mapping[str, int],
    model: PreTrainedModel,
    generator: torch.Generator,
    ids: range = rules.ORDINARY,
) -> Arguments:
    """Return the arguments that the lines of a form describe: each has a name, a kind, and numbers.

    Kinds are drawn, turned (drawn, the last axes swapped),
    tokens (of `ids`), ones as a mask or boolean, and the numbers themselves, as a
    tensor (numbers, a row) or as a list (list, lists). Numbers are products of `sizes`. Of an axis
    `whole<length`, `length` entries are kept, and the others are 0.
    """
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())

    def count(text: str) -> int:
        return prod(sizes.get(part) or int(part) for part in text.split("*"))

    def made(kind: str, *axes: str) -> Any:
        shape = [count(axis.partition("<")[0]) for axis in axes]
        numbers: Any = [shape] if kind in ("row", "lists") else shape
        if kind.startswith("list"):
            return numbers
        if kind in ("row", "numbers"):
            return torch.tensor(numbers)
        if kind == "tokens":
            return torch.randint(ids.start, ids.stop, shape, generator=generator)
        if kind == "drawn":
            found = torch.randn(shape, generator=generator).to(dtype)
        elif kind == "turned":
            found = torch.randn(*shape[:-2], shape[-1], shape[-2], generator=generator).to(dtype).mT
        else:
            found = torch.ones(shape, dtype=torch.bool if kind == "boolean" else torch.int64)
        for along, axis in enumerate(axes):
            if "<" in axis:
                found.transpose(0, along)[count(axis.partition("<")[2]) :] = 0
        return found

    lines = (line.split(" | ") for line in forms.strip().splitlines())
    wanted = (argument.split() for name, *of_form in lines if name == form for argument in of_form)
    return {name: made(*how) for name, *how in wanted}


def features_of(model: Any, medium: str, given: Arguments) -> tuple[Any, int]:
    """Return (a model's features of one image, video or sound by itself, their number)."""
    holders = (getattr(model, "model", None), model)
    function: Any = next(
        f for m in holders if (f := getattr(m, f"get_{medium}_features", None)) is not None
    )
    known = inspect.signature(function).parameters
    named = known if known.keys() & given.keys() else given  # one of somebody's that hands all on
    # MOSS asks for a mask that it does not read
    taken = {name: given.get(name) for name in named if name in given or name == "padding_mask"}
    layers = [
        name for name in named if name.startswith("vision_feature") and hasattr(model.config, name)
    ]
    with torch.no_grad():
        output = function(**taken, **{name: getattr(model.config, name) for name in layers})
    found = getattr(output, "pooler_output", None)
    found = getattr(output, "last_hidden_state", output) if found is None else found
    if getattr(output, "deepstack_features", None) is not None and found is None:
        # all that there is: features to be added in several layers
        found = output.deepstack_features[0][1]
    return output, sum(
        part.numel() // part.shape[-1]
        for part in (found if isinstance(found, list | tuple) else [found])
    )


def row(model: PreTrainedModel, documents: Sequence[Document]) -> Arguments:
    """Return the arguments of one row of documents, with nothing that declares their ends."""
    arguments: Arguments = {
        name: torch.cat([document.tokens[name] for document in documents], dim=1)
        for name in documents[0].tokens
    }
    pictures = [picture for document in documents for picture in document.images]
    form = form_of(model) or ""
    by_row = form.startswith("nested") or form in SEEN
    for name in pictures[0] if pictures else ():
        along = 1 if by_row else _ALONG.get(form, 0) if name.startswith("pixel_values") else 0
        arguments[name] = _joined([picture[name] for picture in pictures], along)
    for name in {name for document in documents for name in document.seen}:
        arguments[name] = _along_diagonal(name, documents)
    if pictures and form == "numbered patches":
        patches = (picture["pixel_values"].shape[:2].numel() for picture in pictures)
        found = [picture[NUMBERS] for picture in pictures]
        numbers = zip(found, accumulate(patches, initial=0), strict=False)
        arguments[NUMBERS] = torch.cat([torch.where(n < 0, n, n + before) for n, before in numbers])
    return arguments


def _joined(values: list[Any], along: int) -> Any:
    """Return lists end to end, or tensors joined at an axis, smaller ones padded with zeros."""
    if isinstance(values[0], list):
        return [*chain.from_iterable(values)]
    if along:
        return torch.cat(values, dim=along)
    most = [max(sizes) for sizes in zip(*(value.shape[1:] for value in values), strict=True)]
    found = values[0].new_zeros(sum(map(len, values)), *most)
    for part, value in zip(found.split([*map(len, values)]), values, strict=True):
        here: Any = (slice(None), *map(slice, value.shape[1:]))
        part[here] = value
    return found


def _along_diagonal(name: str, documents: Sequence[Document]) -> Tensor:
    """Return the mask `name` of a row, in which every document sees its own images alone."""
    like = next(document.seen[name] for document in documents if document.seen)
    images = sum(len(document.images) for document in documents)
    found = like.new_zeros(1, sum(map(len, documents)), images, *like.shape[3:])
    first = image = 0
    for document in documents:
        end, last = first + len(document), image + len(document.images)
        if document.seen:
            found[:, first:end, image:last] = document.seen[name]
        first, image = end, last
    return found


def packed(model: PreTrainedModel, documents: Sequence[Document]) -> Arguments:
    """Return the arguments of a packed row of documents, with position_ids as collators write them.

    The halves of an encoder-decoder come with masks that number their documents.
    """
    arguments = row(model, documents)
    if model.config.is_encoder_decoder:
        halves = {"attention_mask": "input_ids", "decoder_attention_mask": "decoder_input_ids"}
        masks = {
            mask: numbered(documents, name) for mask, name in halves.items() if name in arguments
        }
        return {**arguments, **masks}
    first = first_position(model.config)
    where = torch.cat([torch.arange(first, first + len(document)) for document in documents])
    return {**arguments, "position_ids": where[None]}


def numbered(found: Sequence[Document], name: str) -> Tensor:
    """Return each token's document number, from 1, for the tokens under `name`: (1, tokens)."""
    lengths = [d.tokens[name].shape[1] for d in found]
    return torch.repeat_interleave(torch.arange(1, len(found) + 1), torch.tensor(lengths))[None]


def alone(model: PreTrainedModel, document: Document, **others: Any) -> Any:
    """Return the model's output for one document by itself, with positions of the model's own."""
    arguments: Arguments = row(model, [document])
    # Every processor gives a mask, and some models compute positions only beside one.
    if "input_ids" in arguments:
        arguments["attention_mask"] = torch.ones_like(arguments["input_ids"])
    output = model(**arguments, use_cache=False, **others)
    output.logits = output.logits[:, -len(document) :]  # GIT has some of the image too
    return output
