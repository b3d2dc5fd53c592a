"""The auditor's documents: random tokens for one model, and users' packed calls with them."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from autopack.auditing.compare import Arguments
from autopack.auditing.fields import Side, Sides
from autopack.errors import UnsupportedModel
from autopack.inspection import heads, modules
from autopack.inspection.configs import text_config
from autopack.inspection.source import parameters_of
from autopack.registry import families, first_position


@dataclass(frozen=True)
class Input:
    """Arguments of a call without its tokens, and the places of its documents.

    `arguments` describe the tokens, as arrays (rows, columns). `sides` hold the places of
    documents, and `first` the position at which each begins, of a pair in its decoder. `options`
    are the arguments that say how to run.
    """

    arguments: Arguments
    sides: Sides
    first: list[int]
    options: Arguments = field(default_factory=dict)


@dataclass(frozen=True)
class Form:
    """Form in which users call a model: its rows, mask and padding, and its use in an audit."""

    rows: str = "one"
    """All documents in "one" row, in "two" (in reverse order in the other), or "each" in its own
    (padded)."""
    positions: bool = True
    mask: str = ""
    """A mask of "ones", or of "segments" that number the documents, with 0 at padding; none if
    empty."""
    padding: int = 0
    """Columns of padding behind packed documents."""
    on_the_left: bool = False
    """True for padding in front of documents."""
    offset: int = 0
    """Number of the first document's tokens that came before."""
    options: Arguments = field(default_factory=dict)
    """Arguments that say how to run."""
    asks_for_more: bool = False
    """True for a call that asks for all outputs that a model has."""
    in_used_tensors: bool = False
    """True for a call whose tensors an earlier call has had, with other rows in them."""
    own_documents: bool = False
    """True for documents of its own, which not every model has."""
    labels: str = "given"
    """Labels are "given", or not if empty; an encoder-decoder may make its decoder's "tokens" of
    them."""
    trains: bool = False
    """True for forms that differ the most: they run in training too, where gradients are
    compared."""
    replaces: bool = False
    """True for forms in which documents are replaced one at a time, and that also run without
    labels.

    In the others, every document is compared with itself alone, and one call tells of results and
    loss. Of several rows, one document of each is replaced. """

    @property
    def is_padded(self) -> bool:
        """True for a padded batch, with one document per row."""
        return self.rows == "each"


ALIKE = "one beginning"
"""The form with documents that begin alike, which an enabled model computes once for all of
them."""
LONGER = "thresholds"
"""The form with documents that are longer than the numbers of a configuration."""
ROUTER = "router loss"
"""The form that asks for routers' losses, which count all tokens of a batch."""
_padded = partial(Form, rows="each", positions=False, mask="ones")
FORMS = {
    "default": Form(trains=True, replaces=True),
    "use_cache=False": Form(options={"use_cache": False}),
    "all-ones mask": Form(mask="ones"),
    "padding mask": Form(mask="ones", padding=3, trains=True),
    "segment ids": Form(mask="segments", positions=False),
    "two rows": Form(rows="two", trains=True, replaces=True),
    "mid-document start": Form(offset=5),
    "used tensors": Form(rows="two", in_used_tensors=True, labels=""),
    "every output": Form(asks_for_more=True, labels=""),
    LONGER: Form(own_documents=True, labels=""),
    ALIKE: Form(own_documents=True, labels="", trains=True, replaces=True),
    ROUTER: _padded(),
    "right-padded": _padded(labels="tokens", trains=True),
    "left-padded": _padded(on_the_left=True, trains=True),
    "right-padded, use_cache=False": _padded(options={"use_cache": False}),
    "left-padded, use_cache=False": _padded(on_the_left=True, options={"use_cache": False}),
    "right-padded, no labels": _padded(labels="", trains=True),
}
"""Users' forms of calls by their names: packed rows, and padded batches, which autopack runs
without padding."""


_KINDS_OF_TOKENS = ("token_type_ids", "mm_token_type_ids")
"""Arguments that tell text, 0, from images.

Some types need them in training, or to attend in one direction.
"""


@dataclass
class DrawnHalf:
    """Random documents for `{prefix}input_ids` (`prefix` is "" or "decoder_"), and replacements."""

    prefix: str
    lengths: list[int]
    documents: list[Tensor]
    others: list[Tensor]
    """Documents of these lengths that replace those."""


class Case:
    """Random documents for one model, and the calls made of them."""

    def __init__(
        self,
        model: PreTrainedModel,
        lengths: tuple[int, ...],
        seed: int = 0,
        shared_tokens: int = 0,
    ):
        """Draw documents of these lengths, which begin with the same `shared_tokens`.

        The first two share twice as many. For an encoder-decoder these are sources, and each target
        is as long as the next source.
        """
        self.device = modules.device_of(model)
        self.base = first_position(model.config)
        self.options: Arguments = {}
        """Arguments of a run of a document by itself; none, unless stock needs some."""
        self.options_of_packed: Arguments = {}
        """Further arguments of calls with packed rows, besides their form's."""
        self._named = named = parameters_of(type(model))
        self._model = model
        is_told = hasattr(model.config, "vision_config")
        self._zeros = [name for name in _KINDS_OF_TOKENS if is_told and name in named.names]
        configs = model.config, text_config(model.config)
        flags = [getattr(each, "output_router_logits", None) for each in configs]
        self.has_router = any(flag is not None for flag in flags)
        self.outputs: Arguments = {"output_router_logits": True} if self.has_router else {}
        if self.takes("output_hidden_states"):
            self.outputs["output_hidden_states"] = True
        self.without_router: Arguments = {"output_router_logits": False} if any(flags) else {}
        """An argument to leave a configured router's loss out, as it is no mean over documents."""
        allowed, end = tokens_to_draw(model), heads.end_token(model)

        def draw_half(prefix: str, lengths: tuple[int, ...], seed: int) -> DrawnHalf:
            generator = torch.Generator().manual_seed(seed)
            drawn = (
                allowed[torch.randint(len(allowed), (sum(lengths),), generator=generator)]
                for _ in range(2)
            )
            documents, others = (list(tokens.to(self.device).split(lengths)) for tokens in drawn)
            for number, document in enumerate((*documents, *others)):
                begun = shared_tokens * (1 if number % len(lengths) > 1 else 2)
                document[:begun] = documents[0][:begun]
                if end is not None:
                    document[-1] = end
            return DrawnHalf(prefix, list(lengths), documents, others)

        self.halves = [draw_half("", lengths, seed)]
        """Both sides of an encoder-decoder, the decoder's first, or one."""
        if "decoder_input_ids" in named.names and heads.row_head(model) is None:
            self.halves.insert(0, draw_half("decoder_", (*lengths[1:], lengths[0]), seed + 1))
        pad = getattr(text_config(model.config), "pad_token_id", None)
        usable = (
            pad if isinstance(pad, int) and 0 <= pad < _vocabulary(model) else self.documents[0][0]
        )
        self.filler = int(usable)
        """The token of padding."""
        self.other_filler = next(
            (token for token in allowed[:2].tolist() if token != self.filler), None
        )
        """Another token that may stand in padding; None if there is none."""

    @property
    def is_pair(self) -> bool:
        """True for an encoder-decoder that takes tokens of both sides."""
        return len(self.halves) > 1

    @property
    def lengths(self) -> list[int]:
        """Lengths of the documents, or of an encoder-decoder's targets."""
        return self.halves[0].lengths

    @property
    def documents(self) -> list[Tensor]:
        """Tokens of each document, (tokens,), or of an encoder-decoder's targets."""
        return self.halves[0].documents

    def takes(self, name: str) -> bool:
        """Return True if the model's forward takes an argument of this name, by its signature."""
        return self._named.takes_others or name in self._named.names

    def call(self, form: Form) -> Input:
        """Return a form's `Input`; raise `NoReference` for a pair that begins midway."""
        if form.offset and self.is_pair:
            raise NoReference(
                "an encoder-decoder numbers both halves of a document from their beginnings"
            )
        count = len(self.lengths)
        rows = [[n] for n in range(count)] if form.is_padded else [[*range(count)]]
        if form.rows == "two":
            rows.append([*reversed(range(count, 2 * count))])
        arguments: Arguments = {}
        sides = []
        for place, half in enumerate(self.halves):
            filled = [
                np.repeat(row, [half.lengths[number % count] for number in row]) for row in rows
            ]
            # A padded source has one column more, so that a field of one half is told from one of
            # the other.
            width = max(map(len, filled)) + (place if form.is_padded else form.padding)
            owner = np.full((len(rows), width), -1)
            for row, of_row in zip(owner, filled, strict=True):
                begin = width - len(of_row) if form.on_the_left else 0
                row[begin : begin + len(of_row)] = of_row
            if form.positions:
                columns = np.arange(width)
                begins = np.diff(owner, prepend=-2) != 0
                since = columns - np.maximum.accumulate(np.where(begins, columns, 0), axis=1)
                positions = self.base + since + form.offset * (owner == 0)
                arguments[f"{half.prefix}position_ids"] = positions
            if form.mask:
                mask = owner >= 0 if form.mask == "ones" else owner + 1
                arguments[f"{half.prefix}attention_mask"] = mask.astype(int)
            sides.append(Side(owner, half.prefix))
        first = [self.base + form.offset, *[self.base] * (sum(map(len, rows)) - 1)]
        more = self.outputs if form.asks_for_more else {}
        options = form.options | more | ({} if form.is_padded else self.options_of_packed)
        return Input(arguments, Sides(sides), first, options)

    def given(
        self, call: Input, replaced: int | None = None, filler: int | None = None
    ) -> Arguments:
        """Return all arguments of a call, with other tokens in document `replaced`, if given.

        `filler` is the token of padding, if it is to be another one.
        """
        # Some models count on positions in place (XGLM up to 4.47).
        found = {n: torch.tensor(v, device=self.device) for n, v in call.arguments.items()}
        found |= call.options
        for half, side in zip(self.halves, call.sides.halves, strict=True):
            ids = torch.full(
                side.owner.shape, self.filler if filler is None else filler, device=self.device
            )
            for number in side.order:
                source = half.others if number == replaced else half.documents
                ids[torch.from_numpy(side.owner == number)] = source[number % len(source)]
            found[f"{half.prefix}input_ids"] = ids
        return self._with_required_inputs(found)

    def alone(self, call: Input, number: int) -> Arguments:
        """Return arguments of one document of a call alone, with positions if it begins midway."""
        found, first = self.by_itself(number), call.first[number]
        if first != self.base:
            length = len(self.documents[number % len(self.documents)])
            found["position_ids"] = torch.arange(first, first + length, device=self.device)[None]
        return found

    def by_itself(self, number: int) -> Arguments:
        """Return arguments of one document alone and from its beginning, with `options`."""
        ids = {
            f"{half.prefix}input_ids": half.documents[number % len(half.documents)][None]
            for half in self.halves
        }
        return self._with_required_inputs(ids) | self.options

    def _with_required_inputs(self, ids: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return inputs with token types of 0 and an unseen image, where the model needs them."""
        like = ids["input_ids"]
        return {
            **ids,
            **{name: torch.zeros_like(like) for name in self._zeros},
            **empty_images(self._model, like),
        }


def empty_images(model: PreTrainedModel, ids: Tensor) -> dict[str, Tensor]:
    """Return arguments with an image per row of `ids` that no token sees; {} if none is needed.

    It is for a model whose text does not run without any (Idefics); others get nothing.
    """
    kind = model.config.model_type
    mask = next(
        (f.image_mask for f in families() if f.image_mask and kind in f.tiny.needs_images), None
    )
    if mask is None or mask not in parameters_of(type(model)).names:
        return {}
    vision = model.config.vision_config
    shape = (1, vision.num_channels, vision.image_size, vision.image_size)
    return {
        "pixel_values": torch.zeros(len(ids), *shape, device=ids.device),
        mask: torch.zeros(*ids.shape, 1, dtype=torch.long, device=ids.device),
    }


class NoReference(Exception):
    """Error of a call mode that has no reference, since stock cannot run it on a document alone."""


def tokens_to_draw(model: PreTrainedModel) -> Tensor:
    """Return all tokens (tokens,) that a model can both read and predict, without special ones."""
    tokens, special = torch.arange(_vocabulary(model)), tokens_named(model.config)
    # Chameleon forbids the codes of images as predictions
    codes = getattr(model.config, "vocabulary_map", None) or {}
    special |= {token for name, token in codes.items() if name.startswith("IMGIMG")}
    ordinary = tokens[~torch.isin(tokens, torch.tensor(sorted(special), dtype=torch.long))]
    return ordinary if len(ordinary) else tokens[:1]


def _vocabulary(model: PreTrainedModel) -> int:
    """Return how many tokens a model can both read and predict; raise if that is not known."""
    sizes: list[int] = []
    embeddings: tuple[Any, ...] = ()
    with suppress(NotImplementedError):
        embeddings = model.get_input_embeddings(), model.get_output_embeddings()
    for embedding in embeddings:
        # one per codebook
        each = list(embedding) if isinstance(embedding, nn.ModuleList) else [embedding]
        weights = [e.weight for e in each if isinstance(getattr(e, "weight", None), Tensor)]
        sizes += [len(weight) for weight in weights if len(weight)]  # type: ignore[arg-type]
    # latents, hashes of characters (Perceiver, CANINE), or weights that ZeRO-3 has shared out
    if not sizes:
        known = (getattr(model.config, name, None) for name in ("vocab_size", "num_hash_buckets"))
        sizes += [size for size in known if isinstance(size, int)]
    if not sizes:
        raise UnsupportedModel(
            f"{type(model).__name__} has no single token embedding to draw the auditor's "
            "tokens for",
            code="nothing-to-audit",
        )
    return min(sizes)


def tokens_named(config: Any) -> set[int]:
    """Return the token ids in fields like `pad_token_id` of a configuration and its text part."""
    fields = {**vars(text_config(config)), **vars(config)}
    values = [
        value
        for name, value in fields.items()
        if name.endswith(("token_id", "token_index", "token_ids"))
    ]
    return {
        token
        for value in values
        for token in (value if isinstance(value, list | tuple) else [value])
        if type(token) is int
    }
