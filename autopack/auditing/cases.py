"""The auditor's documents: random tokens for one model, and users' packed calls with them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import MappingKey, tree_flatten_with_path
from transformers import PreTrainedModel

from autopack.auditing.fields import Side, Sides
from autopack.errors import UnsupportedModel
from autopack.inspection import heads, modules
from autopack.inspection.configs import text_config
from autopack.inspection.source import parameters_of
from autopack.registry import families, first_position


@dataclass(frozen=True)
class Input:
    """One packed call.

    `arguments` describe its tokens. `sides` hold the places of documents, and `first` the position
    at which each begins, of a pair in its decoder. `options` are the arguments that say how to run.
    """

    arguments: dict[str, Any]
    sides: Sides
    first: list[int]
    options: dict[str, Any] = field(default_factory=dict)


MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "use_cache=False": {"use_cache": False},
    "all-ones mask": {"mask": "ones"},
    "padding mask": {"mask": "ones", "padding": 3},
    "segment ids": {"mask": "segments", "position_ids": False},
    "two rows": {},
    "mid-document start": {"offset": 5},
    "every output": {},
    "thresholds": {},
    "one beginning": {},
}
"""Users' forms of calls with packed rows.

"thresholds" has longer documents than the others. "one beginning" has documents that begin alike,
which an enabled model computes once for all of them.
"""
PADDED_MODES: dict[str, dict[str, Any]] = {
    "right-padded": {"tokens_of_labels": True},
    "left-padded": {"side": "left"},
    "right-padded, use_cache=False": {"use_cache": False},
    "left-padded, use_cache=False": {"side": "left", "use_cache": False},
    "right-padded, no labels": {"labels": False},
}
"""Users' forms of calls with padded batches, which autopack runs without their padding.

An encoder-decoder is called once as most trainers do: it makes the decoder's tokens of the labels.
"""


@dataclass
class DrawnHalf:
    """The documents of one side of a call: of an encoder-decoder its decoder (`prefix` "decoder_"), or its encoder."""

    prefix: str
    lengths: list[int]
    documents: list[torch.Tensor]
    others: list[torch.Tensor]
    """Documents of these lengths that replace those."""


class Case:
    """Random documents for one model, and the calls made of them."""

    def __init__(self, model: PreTrainedModel, lengths: tuple[int, ...], seed: int, beginning: int = 0):
        """Draw documents of these lengths. All begin with so many tokens alike, the first two with twice as many.

        For an encoder-decoder these are sources, and each target is as long as the next source.
        """
        self.device = modules.device_of(model)
        self.base = first_position(model.config)
        self.options: dict[str, Any] = {}
        """Arguments of a run of a document by itself; none, unless stock needs some."""
        self.options_of_packed: dict[str, Any] = {}
        """Arguments of packed calls beside their mode's."""
        self.zeros: tuple[str, ...] = ()
        """Arguments with a number per token that stock needs, such as text or image."""
        named = parameters_of(type(model))
        self._named = named.names if not named.takes_others else None
        self._empty = empty_images(model)
        self.outputs: dict[str, Any] = {"output_hidden_states": True} if self.takes("output_hidden_states") else {}
        configs = model.config, text_config(model.config)
        flags = [config.output_router_logits for config in configs if hasattr(config, "output_router_logits")]
        self.has_router = bool(flags)
        self.outputs |= {"output_router_logits": True} if flags else {}
        self.without_router: dict[str, Any] = {"output_router_logits": False} if any(flags) else {}
        """An argument to leave a configured router's loss out, as it is no mean over documents."""
        allowed, end = tokens_to_draw(model), heads.end_token(model)

        def half(prefix: str, lengths: tuple[int, ...], seed: int) -> DrawnHalf:
            generator = torch.Generator().manual_seed(seed)
            drawn = (allowed[torch.randint(len(allowed), (sum(lengths),), generator=generator)] for _ in range(2))
            documents, others = (list(tokens.to(self.device).split(lengths)) for tokens in drawn)
            for number, document in enumerate((*documents, *others)):
                begun = beginning * (1 if number % len(lengths) > 1 else 2)
                document[:begun] = documents[0][:begun]
                if end is not None:
                    document[-1] = end
            return DrawnHalf(prefix, list(lengths), documents, others)

        self.halves = [half("", lengths, seed)]
        """Both sides of an encoder-decoder, the decoder's first, or one."""
        if "decoder_input_ids" in named.names and heads.row_head(model) is None:
            self.halves.insert(0, half("decoder_", (*lengths[1:], lengths[0]), seed + 1))
        pad = getattr(text_config(model.config), "pad_token_id", None)
        usable = pad if isinstance(pad, int) and 0 <= pad < _vocabulary(model) else self.documents[0][0]
        self.filler = int(usable)
        """The token of padding."""
        self.other_filler = next((token for token in allowed[:2].tolist() if token != self.filler), None)
        """Another token that may stand in padding; None if there is none."""

    @property
    def is_pair(self) -> bool:
        """True for an encoder-decoder that takes tokens of both sides."""
        return len(self.halves) > 1

    @property
    def lengths(self) -> list[int]:
        """Lengths of the documents, of an encoder-decoder its targets."""
        return self.halves[0].lengths

    @property
    def documents(self) -> list[torch.Tensor]:
        """The documents, of an encoder-decoder its targets."""
        return self.halves[0].documents

    def takes(self, name: str) -> bool:
        """Return True if the model's forward takes an argument, by its signature."""
        return self._named is None or name in self._named

    def packed(self, mode: str = "default") -> Input:
        """Return the call with packed rows of a mode."""
        if mode == "two rows":
            return self.two_rows()
        return self.one_row(**MODES[mode], **(self.outputs if mode == "every output" else {}))

    def one_row(
        self, *, position_ids: bool = True, mask: str = "", padding: int = 0, offset: int = 0, **options: Any
    ) -> Input:
        """Return a call of one row, the first document from `offset` on, with `padding` behind."""
        if offset and self.is_pair:
            raise NoReference("an encoder-decoder numbers both halves of a document from their beginnings")
        count = len(self.lengths)
        first = [self.base + offset, *[self.base] * (count - 1)]
        arguments: dict[str, Any] = {}
        sides = []
        for half in self.halves:
            lengths = [*half.lengths, padding]
            if position_ids:
                pieces = zip([*first, self.base], lengths, strict=True)
                positions = [torch.arange(a, a + n, device=self.device) for a, n in pieces]
                arguments[f"{half.prefix}position_ids"] = torch.cat(positions)[None]
            if mask:
                numbers = [i + 1 if mask == "segments" else 1 for i in range(count)]
                values = torch.tensor([*numbers, 0]).repeat_interleave(torch.tensor(lengths))
                arguments[f"{half.prefix}attention_mask"] = values[None].to(self.device)
            sides.append(Side(np.repeat([*range(count), -1], lengths)[None], half.prefix))
        return Input(arguments, Sides(sides), first, options)

    def two_rows(self) -> Input:
        """Return a call of the documents in order in one row, reversed in the other."""
        one = self.one_row()
        arguments, sides = {}, []
        for half, side in zip(self.halves, one.sides.halves, strict=True):
            name = f"{half.prefix}position_ids"
            (positions,), (owner,) = one.arguments[name], side.owner
            turned = torch.cat(positions.split(half.lengths)[::-1])
            arguments[name] = torch.stack([positions, turned])
            sides.append(Side(np.stack([owner, owner[::-1] + len(half.lengths)]), half.prefix))
        return Input(arguments, Sides(sides), one.first * 2)

    def given(self, call: Input, replaced: int | None = None) -> dict[str, Any]:
        """Return all arguments of a packed call, with one document's tokens `replaced` if asked."""
        # Some models count on positions in place (XGLM up to 4.47).
        copied = {n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in call.arguments.items()}
        tokens = self._tokens(call.sides, int(self.documents[0][0]), replaced)
        return {**tokens, **copied, **call.options, **self.options_of_packed}

    def _tokens(self, sides: Sides, filler: int, replaced: int | None = None) -> dict[str, torch.Tensor]:
        """Return the tokens of documents at their places, and a filler at all others."""
        ids = {}
        for half, side in zip(self.halves, sides.halves, strict=True):
            placed = torch.full(side.owner.shape, filler, device=self.device)
            for number in side.order:
                source = half.others if number == replaced else half.documents
                placed[torch.from_numpy(side.owner == number)] = source[number % len(source)]
            ids[f"{half.prefix}input_ids"] = placed
        return self._with_zeros(ids)

    def alone(self, call: Input, number: int) -> dict[str, Any]:
        """Return all arguments of one document alone: positions only if it begins midway."""
        found, first = self.by_itself(number), call.first[number]
        if first != self.base:
            length = len(self.documents[number % len(self.documents)])
            found["position_ids"] = torch.arange(first, first + length, device=self.device)[None]
        return found

    def by_itself(self, number: int) -> dict[str, Any]:
        """Return all arguments of a call with a document alone, from its beginning."""
        of_one = {half.prefix: half.documents[number % len(half.documents)] for half in self.halves}
        return {**self._with_zeros({f"{name}input_ids": ids[None] for name, ids in of_one.items()}), **self.options}

    def _with_zeros(self, ids: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        like = ids["input_ids"]
        return {**ids, **{name: torch.zeros_like(like) for name in self.zeros}, **self._empty(like)}

    def padded(self, side: str = "right", filler: int | None = None) -> Input:
        """Return a batch of one document per row, padded on one side, with its tokens."""
        rows, sides = len(self.lengths), []
        for place, half in enumerate(self.halves):
            # A source has one column more, so that a field of one half is told from one of the other.
            columns = np.arange(max(half.lengths) + place)
            owner = np.where(columns < np.array(half.lengths)[:, None], np.arange(rows)[:, None], -1)
            sides.append(Side(owner[:, ::-1] if side == "left" else owner, half.prefix))
        arguments = self._tokens(Sides(sides), self.filler if filler is None else filler)
        for each in sides:
            mask = torch.from_numpy(each.owner >= 0).long()
            arguments[f"{each.prefix}attention_mask"] = mask.to(self.device)
        return Input(arguments, Sides(sides), [self.base] * rows)


def empty_images(model: PreTrainedModel) -> Callable[[torch.Tensor], dict[str, torch.Tensor]]:
    """Return a function that makes an image for every row that no token sees.

    It is for a model whose text does not run without any (Idefics); for others it makes nothing.
    """
    kind = model.config.model_type
    mask = next((f.image_mask for f in families() if f.image_mask and kind in f.tiny.needs_images), None)
    if mask is None or mask not in parameters_of(type(model)).names:
        return lambda ids: {}
    vision = model.config.vision_config
    shape = (1, vision.num_channels, vision.image_size, vision.image_size)
    return lambda ids: {
        "pixel_values": torch.zeros(len(ids), *shape, device=ids.device),
        mask: torch.zeros(*ids.shape, 1, dtype=torch.long, device=ids.device),
    }


class NoReference(Exception):
    """A document alone cannot run in the form of a call mode, so there is no reference."""


def tokens_to_draw(model: PreTrainedModel) -> torch.Tensor:
    """Return tokens without a special meaning to a model, which it can both read and predict."""
    tokens, special = torch.arange(_vocabulary(model)), tokens_named(model.config)
    codes = getattr(model.config, "vocabulary_map", None) or {}  # Chameleon forbids the codes of images as predictions
    special |= {token for name, token in codes.items() if name.startswith("IMGIMG")}
    ordinary = tokens[~torch.isin(tokens, torch.tensor(sorted(special), dtype=torch.long))]
    return ordinary if len(ordinary) else tokens[:1]


def _vocabulary(model: PreTrainedModel) -> int:
    """Return the number of tokens that can both be read and be predicted."""
    sizes: list[int] = []
    embeddings: tuple[Any, ...] = ()
    with suppress(NotImplementedError):
        embeddings = model.get_input_embeddings(), model.get_output_embeddings()
    for embedding in embeddings:
        each = list(embedding) if isinstance(embedding, nn.ModuleList) else [embedding]  # one per codebook
        weights = [e.weight for e in each if isinstance(getattr(e, "weight", None), torch.Tensor)]
        sizes += [len(weight) for weight in weights if len(weight)]  # type: ignore[arg-type]
    if not sizes:  # latents, hashes of characters (Perceiver, CANINE), or weights that ZeRO-3 has shared out
        known = (getattr(model.config, name, None) for name in ("vocab_size", "num_hash_buckets"))
        sizes += [size for size in known if isinstance(size, int)]
    if not sizes:
        raise UnsupportedModel(
            f"{type(model).__name__} has no single token embedding to draw the auditor's tokens for",
            code="nothing-to-audit",
        )
    return min(sizes)


def tokens_named(
    config: Any, ends: tuple[str, ...] = ("token_id", "token_index", "token_ids"), begins: tuple[str, ...] = ("",)
) -> set[int]:
    """Return the tokens in a configuration's (or its text's) fields with such names."""
    fields = {**vars(text_config(config)), **vars(config)}
    values = [value for name, value in fields.items() if name.endswith(ends) and name.startswith(begins)]
    return {
        token
        for value in values
        for token in (value if isinstance(value, list | tuple) else [value])
        if type(token) is int
    }


LONGEST = 512
"""Largest threshold that the auditor crosses: its rows are to stay short."""
_SIZES = re.compile(
    r"(^|_)(ids?|index|size|dim|dims|rank|ranks|heads?|layers?|experts?|channels?|groups?|labels?|classes|version|"
    r"embd|model|inner|ff|ffn|kv|state|states|width|depth|features?|hidden|vocab|planes|topk|top_k|tok|init)$|^num_|^n_"
)
"""Names of numbers that measure a model and not a row."""
_LENGTHS = re.compile(
    r"window|chunk|floor|rope|position|length|len$|seq|block|context|ctx|sliding|stride|local|distance|bucket|cutoff|"
    r"thresh|span|limit|segment|period|scal"
)
"""Names of numbers that measure a row, whatever else is in them."""
_MOST = re.compile(r"max.*(pos|seq|len)|n_positions|n_ctx|num_positions|(context|seq|sequence)_len")
"""Names of the largest number of positions of a document."""


_NO_TEXT = re.compile("vision|audio|image|video|id2label|label2id")
"""Names of what says nothing of text."""


def threshold_lengths(model: PreTrainedModel, usual: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return lengths of documents: one crosses all thresholds by itself, short ones follow it.

    None where the usual lengths cross them already, or where there is none up to `LONGEST`.
    """
    numbers = list(_numbers(model))
    crossed = [n for name, n in numbers if max(usual) <= n <= LONGEST and _is_length(name)]
    if not crossed:
        return None
    positions = [n for name, n in numbers if _MOST.search(name) and n >= max(usual)]
    most = min(positions, default=2 * LONGEST) - first_position(model.config)
    return 5, max(min(max(crossed) + 5, most), max(usual)), 9, 3


def _is_length(name: str) -> bool:
    return bool(_LENGTHS.search(name)) or not _SIZES.search(name)


def _numbers(model: PreTrainedModel) -> Iterator[tuple[str, int]]:
    """Yield the whole numbers in a model's configuration, and in its modules those of rows, by their names."""
    for path, value in tree_flatten_with_path(model.config.to_dict())[0]:
        names = [str(key.key) for key in path if isinstance(key, MappingKey)]
        if type(value) in (int, float) and float(value).is_integer() and not any(map(_NO_TEXT.search, names)):
            yield names[-1], int(value)
    for module in model.modules():
        for name, value in vars(module).items():
            if type(value) is int and _LENGTHS.search(name):
                yield name, value
