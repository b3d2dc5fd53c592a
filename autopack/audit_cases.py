"""The auditor's documents: random tokens for one model, and the packed calls that people make of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from autopack import api
from autopack.errors import UnsupportedModel
from autopack.positions import first_position

__all__ = ["MODES", "Call", "Case"]


@dataclass(frozen=True)
class Call:
    """One packed call: its arguments, and where in the batch each document lies and at which position it begins."""

    arguments: dict[str, Any]
    spans: list[tuple[int, int, int]]
    first: list[int]


def _default(case: Case) -> Call:
    return case.one_row(position_ids=True)


def _no_cache(case: Case) -> Call:
    return case.one_row(position_ids=True, use_cache=False)


def _all_ones_mask(case: Case) -> Call:
    return case.one_row(position_ids=True, mask="ones")


def _padding_mask(case: Case) -> Call:
    return case.one_row(position_ids=True, mask="padding", padding=3)


def _segment_ids(case: Case) -> Call:
    return case.one_row(position_ids=False, mask="segments")


def _two_rows(case: Case) -> Call:
    return case.two_rows()


def _mid_document(case: Case) -> Call:
    return case.one_row(position_ids=True, offset=5)


MODES = {
    "default": _default,
    "use_cache=False": _no_cache,
    "all-ones mask": _all_ones_mask,
    "padding mask": _padding_mask,
    "segment ids": _segment_ids,
    "two rows": _two_rows,
    "mid-document start": _mid_document,
}


class Case:
    """Random documents for one model, and the packed calls made of them."""

    def __init__(self, model: PreTrainedModel, lengths: tuple[int, ...], seed: int):
        self.device = api.device_of(model)
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
