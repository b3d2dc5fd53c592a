"""Documents with images: a packed call against its documents alone, and what one document's images
do to the others; of a type, for the tables of `compat.exactness`."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from autopack import registry, tiny
from autopack.auditing import compare as audit
from autopack.auditing.asking import expected_losses
from autopack.auditing.running import gradients_of, trained, weighted_sum
from autopack.errors import AutopackError
from autopack.inspection.media import holds_media
from autopack.inspection.source import parameters_of, shifts_labels
from autopack.tiny import images, media_rows
from autopack.tiny.images import IMAGE
from autopack.tiny.images import as_videos as as_videos
from autopack.tiny.media_rows import SEEN, Document, form_of
from autopack.tiny.media_rows import alone as alone
from compat.standins import set_implementation

# The first ends where the next begins with an image: blocks of image tokens touch. One document has
# none.
DOCUMENTS: tuple[tuple[int | str, ...], ...] = (
    (3, IMAGE),
    (IMAGE, 4),
    (7,),
    (2, IMAGE, 3, IMAGE, 4),
)


def documents(
    model: PreTrainedModel, parts: Sequence[Sequence[int | str]] = DOCUMENTS
) -> list[Document]:
    """One document for each list of parts, all different; without those that the type cannot run by
    themselves."""
    parts = [each for each in parts if IMAGE in each or not images.needs_images(model)]
    return [images.document(model, each, seed=number + 1) for number, each in enumerate(parts)]


def rows_of(model: PreTrainedModel, found: Sequence[Sequence[Document]]) -> dict[str, Any]:
    """The arguments of rows of documents, which must be equally long, with nothing that says where
    one ends."""
    flat = [document for each in found for document in each]
    arguments = media_rows.row(model, flat)
    for name in flat[0].tokens:
        value = arguments[name]
        arguments[name] = value.reshape(len(found), -1, *value.shape[2:])
    form = form_of(model) or ""
    if form.startswith("nested") or form in SEEN:
        counts = [sum(len(document.images) for document in each) for each in found]
        for name in next((document.images[0] for document in flat if document.images), ()):
            arguments[name] = _by_row(arguments[name][0].split(counts))
        for name in {name for document in flat for name in document.seen}:
            seen = (
                arguments[name].reshape(len(found), -1, *arguments[name].shape[2:]).transpose(1, 2)
            )
            parts = [own.split(counts)[row] for row, own in enumerate(seen)]
            arguments[name] = _by_row(parts).transpose(1, 2)
    return arguments


def _by_row(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Images of each row, (rows, images, ...), with empty ones at the end of rows that have
    fewer."""
    return torch.nn.utils.rnn.pad_sequence([*parts], batch_first=True)


def packed(
    model: PreTrainedModel, found: Sequence[Sequence[Document]], **others: Any
) -> dict[str, Any]:
    """The arguments of packed rows of documents, which declare where each lies as
    `media_rows.packed` does."""
    rows, names = (
        [media_rows.packed(model, each) for each in found],
        media_rows.row(model, found[0]).keys(),
    )
    declared = {name: torch.cat([row[name] for row in rows]) for name in rows[0].keys() - names}
    return {**rows_of(model, found), **declared, **others}


def spans(found: Sequence[Sequence[Document]]) -> list[tuple[Document, int, int, int]]:
    """Each document with its row, first and end column."""
    places = []
    for row, each in enumerate(found):
        first = 0
        for document in each:
            places.append((document, row, first, first + len(document)))
            first += len(document)
    return places


def labels_of(document: Document) -> torch.Tensor:
    """Labels of all tokens but placeholders, which processors mask."""
    ids = document.predicted
    return torch.where(ids < 100, ids, -100)


def alone_loss(model: PreTrainedModel, found: Sequence[Sequence[Document]]) -> torch.Tensor:
    """The mean loss over the labels of all documents, each run alone."""
    skipped = 0 if model.config.is_encoder_decoder else int(shifts_labels(model))
    labelled = [(document, labels_of(document)) for document, *_ in spans(found)]
    losses = [alone(model, document, labels=labels).loss for document, labels in labelled]
    return expected_losses(losses, [int((x[:, skipped:] != -100).sum()) for _, x in labelled])[0]


def changed(document: Document, *, image: bool) -> Document:
    """The document with other text, or with other pixels."""
    if not image:
        name = "input_ids" if "input_ids" in document.tokens else "decoder_input_ids"
        others = {**document.tokens, name: _other_tokens(document.tokens[name])}
        return dataclasses.replace(document, tokens=others)
    pictures = (
        {name: other_pixels(name, value) for name, value in each.items()}
        for each in document.images
    )
    return dataclasses.replace(document, images=tuple(pictures))


def _other_tokens(ids: torch.Tensor) -> torch.Tensor:
    return torch.where((ids >= 8) & (ids < 100), 8 + (ids - 8 + 41) % 92, ids)


def other_pixels(name: str, value: Any) -> Any:
    """Other pixels, and instructions, in the same places; sizes and masks stay."""
    if name == "qformer_input_ids":
        return _other_tokens(value)
    if name == "audio_input_ids":
        return (value + 7) % 256
    if name == "flattened_patches":  # row and column come first
        return torch.cat([value[..., :2], -2 * value[..., 2:]], dim=-1)
    return -2 * value if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def compare(
    model: PreTrainedModel,
    stock: PreTrainedModel,
    gradients: bool = True,
    videos: bool = False,
    found: Sequence[Document] | None = None,
) -> dict[str, float]:
    """Packed rows of `model` against the documents alone on `stock`, which has the same parameters;
    `found` or others.

    One row, then two rows with the documents in two orders; then one row in train mode. Returns the
    worst errors: `worst` and `influence` relative to the standard deviation of the logits alone,
    `gradient` to the largest entry of a parameter's gradient (or 1% of the largest of all), `loss`
    to the loss."""
    found = [as_videos(stock, d) if videos else d for d in found or documents(stock)]
    reference = {id(d): alone(stock, d).logits[0] for d in found}
    scale = audit.scale_of([*reference.values()])
    result = {"worst": 0.0, "influence": 0.0, "loss": 0.0}

    def off(rows: list[list[Document]], wanted: Callable[[Document], torch.Tensor]) -> None:
        logits = model(**packed(model, rows)).logits
        errors = (audit.largest(logits[row, a:b], wanted(d)) for d, row, a, b in spans(rows))
        result["worst"] = max(result["worst"], max(errors) / scale)

    for rows in ([found], [found, found[::-1]]):
        off(rows, lambda document: reference[id(document)])
        labels = torch.cat([torch.cat([labels_of(d) for d in each], dim=1) for each in rows])
        with torch.no_grad():
            expected = alone_loss(stock, rows)
            loss = model(**packed(model, rows), labels=labels).loss
        result["loss"] = max(result["loss"], audit.relative_error(loss, expected))
    with torch.no_grad(), training(model), training(stock):
        off([found], lambda document: alone(stock, document).logits[0])
    with torch.no_grad():
        result["influence"] = max(
            influence(model, found, number, image=image) / scale
            for number, document in enumerate(found)
            for image in ((False, True) if document.images else (False,))
        )
    if gradients:
        result["gradient"] = gradient_error(model, stock, found)
    return result


def judged(kind: str, errors: dict[str, float], dtype: torch.dtype) -> dict[str, Any]:
    """What is recorded of errors of documents with media of a kind."""
    results, gradients, losses = audit.BOUNDS[dtype]
    bounds = {"worst": results, "influence": results, "gradient": gradients, "loss": losses}
    exact = all(value <= bounds[name] for name, value in errors.items())
    return {
        kind: "exact" if exact else "LEAK",
        **{f"{kind} {name}": value for name, value in errors.items()},
    }


def failed(
    kind: str, stock: PreTrainedModel, found: Sequence[Document], error: Exception
) -> dict[str, Any]:
    """What is recorded where a comparison raises: stock's own error, if documents alone raise
    too."""
    try:
        sum(alone(stock, each).logits.sum() for each in found).backward()
    except Exception as upstream:
        return {kind: "upstream error", f"{kind} reason": f"{type(upstream).__name__}: {upstream}"}
    return {kind: "LEAK", f"{kind} worst": f"{type(error).__name__}: {error}"}


@contextlib.contextmanager
def training(model: PreTrainedModel) -> Iterator[None]:
    """A model in train mode; tiny ones drop nothing. Afterwards its modules are as they were.

    Norms over a batch stay in evaluation: while they train, packed calls with images are refused.
    """
    before = {module: module.training for module in model.modules()}
    model.train()
    for module in before:
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            module.eval()
    try:
        yield
    finally:
        for module, was in before.items():
            module.training = was


def takes_media(model: PreTrainedModel) -> bool:
    """Whether anything in a model takes media; one for text alone does not."""
    return any(
        holds_media(n) for module in model.modules() for n in parameters_of(type(module)).names
    )


def refusal(model: PreTrainedModel) -> str | None:
    """What a packed call with pixels of any form raises: it must raise before it looks at them."""
    ids = tiny.tokens(model.config, 1, 9)
    where = torch.cat([torch.arange(4), torch.arange(5)])[None]
    try:
        model(input_ids=ids, position_ids=where, pixel_values=torch.zeros(1, 3, 32, 32))
    except AutopackError as error:
        return error.message.partition(". ")[0]
    return None


def influence(model: PreTrainedModel, found: list[Document], number: int, *, image: bool) -> float:
    """Largest change of another document's logits when one document gets other text or other
    pixels."""
    other = [changed(d, image=image) if i == number else d for i, d in enumerate(found)]
    before, after = (model(**packed(model, [each])).logits for each in (found, other))
    moved = [audit.largest(after[row, a:b], before[row, a:b]) for _, row, a, b in spans([found])]
    if not moved[number] > 0:
        raise AssertionError("the change did not even change its own document")
    return max(value for place, value in enumerate(moved) if place != number)


def gradient_error(model: PreTrainedModel, stock: PreTrainedModel, found: list[Document]) -> float:
    """Worst difference of a parameter's gradient, packed against the sum over documents alone."""
    logits = model(**packed(model, [found])).logits
    mine = [logits[row, a:b] for _, row, a, b in spans([found])]
    theirs = [alone(stock, document).logits[0] for document in found]
    got, wanted = (
        gradients_of(weighted_sum([{"": part} for part in parts], {"": 1.0}), trained(each))  # type: ignore[arg-type]
        for each, parts in ((model, mine), (stock, theirs))
    )
    return audit.gradient_error(got, wanted)


def with_images(model: Any, task: str, dtype: torch.dtype) -> dict[str, Any]:
    """What `compat.exactness` records of documents with images, where tiny inputs can be made;
    otherwise that they are refused."""
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
    assert form_of(model), f"{model.config.model_type} is said to be covered with images"
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
