"""The auditor's documents: random tokens for one model, and the packed calls that people make of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from autopack.errors import UnsupportedModel
from autopack.inspection import modules
from autopack.registry import first_position


@dataclass(frozen=True)
class Call:
    """One packed call: its arguments, and where in the batch each document lies and at which position it begins."""

    arguments: dict[str, Any]
    spans: list[tuple[int, int, int]]
    first: list[int]
    source: Call | None = None
    """The call's side of the encoder, where the above is the decoder's."""


MODES: dict[str, Callable[[AnyCase], Call]] = {
    "default": lambda case: case.one_row(position_ids=True),
    "use_cache=False": lambda case: case.one_row(position_ids=True, use_cache=False),
    "all-ones mask": lambda case: case.one_row(position_ids=True, mask="ones"),
    "padding mask": lambda case: case.one_row(position_ids=True, mask="padding", padding=3),
    "segment ids": lambda case: case.one_row(position_ids=False, mask="segments"),
    "two rows": lambda case: case.two_rows(),
    "mid-document start": lambda case: case.one_row(position_ids=True, offset=5),
}
"""The ways in which people call a model with packed rows."""


class Case:
    """Random documents for one model, and the packed calls made of them."""

    def __init__(self, model: PreTrainedModel, lengths: tuple[int, ...], seed: int):
        self.device = modules.device_of(model)
        vocabulary = _vocabulary(model)
        self.base = first_position(model.config)
        generator = torch.Generator().manual_seed(seed)
        special = {t for t in _special_tokens(model.config) if isinstance(t, int)}
        allowed = torch.tensor([t for t in range(min(vocabulary, 4096)) if t not in special] or [0])
        count = sum(lengths)

        def draw() -> list[torch.Tensor]:
            tokens = allowed[torch.randint(len(allowed), (count,), generator=generator)]
            return list(tokens.to(self.device).split(list(lengths)))

        self.lengths = lengths
        self.documents, self.others = draw(), draw()

    def _positions(self, offset: int) -> tuple[torch.Tensor, list[int]]:
        first = [self.base + (offset if i == 0 else 0) for i in range(len(self.lengths))]
        pieces = [torch.arange(a, a + n, device=self.device) for a, n in zip(first, self.lengths, strict=True)]
        return torch.cat(pieces)[None], first

    def one_row(
        self,
        position_ids: bool,
        mask: str | None = None,
        padding: int = 0,
        offset: int = 0,
        use_cache: bool | None = None,
    ) -> Call:
        positions, first = self._positions(offset)
        bounds = np.cumsum([0, *self.lengths]).tolist()
        spans = [(0, a, b) for a, b in pairwise(bounds)]
        arguments: dict[str, Any] = {}
        pad = torch.arange(self.base, self.base + padding, device=self.device)[None]
        if position_ids:
            arguments["position_ids"] = torch.cat([positions, pad], dim=1)
        if mask == "segments":
            numbers = [torch.full((n,), i + 1, device=self.device) for i, n in enumerate(self.lengths)]
            arguments["attention_mask"] = torch.cat(numbers)[None]
        elif mask is not None:
            ones = torch.ones_like(positions)
            arguments["attention_mask"] = torch.cat([ones, torch.zeros_like(pad)], dim=1)
        if use_cache is not None:
            arguments["use_cache"] = use_cache
        return Call(arguments, spans, first)

    def two_rows(self) -> Call:
        """The documents in order in the first row, reversed in the second: two layouts of one width."""
        one = self.one_row(position_ids=True)
        order = list(range(len(self.lengths)))[::-1]
        bounds = np.cumsum([0, *(self.lengths[i] for i in order)]).tolist()
        second = {i: (1, a, b) for i, a, b in zip(order, bounds, bounds[1:], strict=False)}
        positions = torch.cat([torch.arange(self.base, self.base + self.lengths[i], device=self.device) for i in order])
        arguments: dict[str, torch.Tensor | bool] = {
            "position_ids": torch.stack([one.arguments["position_ids"][0], positions])
        }
        spans = [*one.spans, *(second[i] for i in range(len(order)))]
        return Call(arguments, spans, [*one.first, *one.first])

    def given(self, call: Call, replaced: int | None = None) -> dict[str, Any]:
        """All arguments of a packed call, with one document's tokens replaced where asked."""
        return {"input_ids": self.inputs(call, replaced), **call.arguments}

    def alone(self, call: Call, number: int) -> dict[str, Any]:
        """All arguments of a call with one of its documents by itself."""
        document = self.documents[number % len(self.documents)][None]
        first = call.first[number]
        if first == 0:
            return {"input_ids": document}
        return {
            "input_ids": document,
            "position_ids": torch.arange(first, first + document.shape[1], device=self.device)[None],
        }

    def inputs(self, call: Call, replaced: int | None = None) -> torch.Tensor:
        """Token ids (rows, columns) of a call, with one document's tokens replaced where asked."""
        rows = 1 + max(row for row, _, _ in call.spans)
        mask = call.arguments.get("attention_mask")
        columns = mask.shape[1] if isinstance(mask, torch.Tensor) else max(end for _, _, end in call.spans)
        ids = torch.full((rows, columns), int(self.documents[0][0]), device=self.device)
        for number, (row, first, end) in enumerate(call.spans):
            source = self.others if number == replaced else self.documents
            ids[row, first:end] = source[number % len(self.documents)]
        return ids


class PairCase:
    """Random sources and targets for an encoder-decoder, and the packed calls made of them."""

    def __init__(self, model: PreTrainedModel, lengths: tuple[int, ...], seed: int):
        self.source = Case(model, lengths, seed)
        self.target = Case(model, (*lengths[1:], lengths[0]), seed + 1)  # a target is as long as the next source
        self.device = self.source.device

    def one_row(self, *, offset: int = 0, **form: Any) -> Call:
        if offset:
            raise NoReference("an encoder-decoder numbers both halves of a document from their beginnings")
        return self._both(self.source.one_row(**form), self.target.one_row(**form))

    def two_rows(self) -> Call:
        """The pairs in order in the first row, reversed in the second."""
        return self._both(self.source.two_rows(), self.target.two_rows())

    @staticmethod
    def _both(source: Call, target: Call) -> Call:
        arguments = dict(source.arguments)
        for name, value in target.arguments.items():
            arguments[name if name == "use_cache" else f"decoder_{name}"] = value
        return Call(arguments, target.spans, [0] * len(target.first), source)

    def given(self, call: Call, replaced: int | None = None) -> dict[str, Any]:
        """All arguments of a packed call, with the source and target of one document replaced where asked."""
        assert call.source is not None
        source = self.source.inputs(call.source, replaced)
        return {"input_ids": source, "decoder_input_ids": self.inputs(call, replaced), **call.arguments}

    def alone(self, call: Call, number: int) -> dict[str, Any]:
        """All arguments of a call with one document by itself."""
        number %= len(self.source.documents)
        source, target = self.source.documents[number], self.target.documents[number]
        return {"input_ids": source[None], "decoder_input_ids": target[None]}

    def inputs(self, call: Call, replaced: int | None = None) -> torch.Tensor:
        """The decoder's tokens (rows, columns) of a call."""
        spans = Call({"attention_mask": call.arguments.get("decoder_attention_mask")}, call.spans, call.first)
        return self.target.inputs(spans, replaced)


AnyCase = Case | PairCase


class NoReference(Exception):
    """A document alone cannot be run as a call mode would have it, so there is nothing to compare with."""


def _vocabulary(model: PreTrainedModel) -> int:
    """Tokens that can both be read and be predicted."""
    sizes: list[int] = []
    for embedding in (model.get_input_embeddings(), model.get_output_embeddings()):
        each = list(embedding) if isinstance(embedding, nn.ModuleList) else [embedding]  # one per codebook
        sizes += [len(e.weight) for e in each if isinstance(getattr(e, "weight", None), torch.Tensor)]  # type: ignore[arg-type]
    if not sizes:
        raise UnsupportedModel(
            f"{type(model).__name__} has no single token embedding, so the auditor has no tokens for it"
        )
    return min(sizes)


def _special_tokens(config: Any) -> Iterator[Any]:
    for name, value in {**vars(config), **getattr(config.get_text_config(), "__dict__", {})}.items():
        if name.endswith(("token_id", "token_index")):
            yield from value if isinstance(value, list) else [value]
    codes = getattr(config, "vocabulary_map", None) or {}  # Chameleon forbids the codes of images as predictions
    yield from (token for name, token in codes.items() if name.startswith("IMGIMG"))
