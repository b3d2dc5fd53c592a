"""Documents of an encoder-decoder's call: of its encoder and of its decoder, and which belong
together.

Each half runs as one row of its real tokens. The documents of a row, in order, are the same on both
sides: the decoder's i-th reads the encoder's i-th.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from autopack.errors import InvalidPacking
from autopack.layout import IGNORED_LABEL, declarations
from autopack.layout.host import host_values, on_host, recall
from autopack.layout.packed import PackedLayout, one_row, real_documents
from autopack.layout.token_map import TokenMap
from autopack.layout.ways import FLASH_KWARGS, PER_TOKEN

_RECORDINGS = ("input_features", "input_values", "pixel_values", "flattened_patches")
"""Recordings or images; an encoder that takes no tokens gets one for each document."""
_BOTH = (
    "segment ids in attention_mask and decoder_attention_mask (1 1 2 2 0), or by position_ids "
    "and decoder_position_ids."
)
DECLARATIONS = (*PER_TOKEN, *(f"decoder_{name}" for name in PER_TOKEN))
"""Arguments of a call that declare where the documents of its halves lie."""


class Half:
    """The encoder's or decoder's part of a call: its real tokens, and the layout of their row."""

    def __init__(self, real: np.ndarray, device: torch.device, layout: PackedLayout | None = None):
        """Build from `real` tokens (rows, columns) and their layout; None: one document per row."""
        sizes = real.sum(axis=1) if layout is None else layout.sizes[real_documents(layout)]
        self.places = TokenMap.of_real(real, device)
        self.layout = one_row(sizes[sizes > 0], device)

    @property
    def counts(self) -> list[int]:
        """Number of documents in each row of the batch."""
        rows = np.nonzero(self.places.real)[0][self.layout.bounds[:-1]]
        return np.bincount(rows, minlength=self.places.shape[0]).tolist()


@dataclass(frozen=True, eq=False)
class Pair:
    """The encoder's and the decoder's half of a call, which have the same number of documents."""

    encoder: Half | None
    """Encoder's half; None if the encoder takes no tokens: it runs as it is, on one recording or
    image per document."""
    decoder: Half
    labelled_padding: bool
    """True if labels of a padded batch count padding of the decoder into the loss."""
    packs: bool = False
    """True if the call packs documents, and does not pad them."""

    def of(self, name: str | None) -> TokenMap | None:
        """Return the map of the half that makes output `name`; None for an unchanged encoder."""
        half = self.encoder if name is not None and name.startswith("encoder_") else self.decoder
        return None if half is None else half.places

    @property
    def halves(self) -> tuple[Half, ...]:
        """The halves that run as rows."""
        return (self.decoder,) if self.encoder is None else (self.encoder, self.decoder)


def declared_of(
    arguments: Mapping[str, Any],
    pad_token_id: int | None,
) -> tuple[list[np.ndarray] | None, Pair | None]:
    """Return halves' masks of real tokens and their `Pair`, or None; raise if they disagree.

    There is one mask (rows, columns) for each half that the call brings; None if it brings none.

    `position_ids`, `seq_idx` or an `attention_mask` of segment ids declare the encoder's documents;
    the same names with `decoder_` before them declare the decoder's. In a padded batch without
    `decoder_attention_mask`, everything after the last label of a row is padding, as far as the
    decoder's tokens, if given, are padding tokens. Raises `InvalidPacking` if a declaration is
    malformed or the halves do not match.
    """
    # The tensors (rows, columns, ...) that stand for the tokens: the encoder's states if it has run
    # already, and the labels where they make the decoder's tokens.
    states = arguments.get("encoder_outputs")
    source = _first_tensor(
        arguments.get("input_ids"), arguments.get("inputs_embeds"), states and states[0]
    )
    target = _first_tensor(
        *map(arguments.get, ("decoder_input_ids", "decoder_inputs_embeds", "labels"))
    )
    recordings: Any = next(
        (arguments[name] for name in _RECORDINGS if arguments.get(name) is not None), None
    )
    if source is None and (target is None or recordings is None):
        return None, None
    unclear = [
        name for name in FLASH_KWARGS if source is not None and arguments.get(name) is not None
    ]
    if target is not None and unclear:
        raise InvalidPacking(
            f"{unclear[0]} may belong to the encoder or the decoder. Declare documents by {_BOTH}",
            code="halves-disagree",
        )
    sides = [
        (prefix, inputs)
        for prefix, inputs in (("", source), ("decoder_", target))
        if inputs is not None
    ]
    host = _declarations_on_host(arguments)
    declared = [_read_half(arguments, host, prefix, inputs) for prefix, inputs in sides]
    packs = any(each.layout is not None for each in declared)
    real = [
        each.real_of(inputs.shape[:2]) for each, (_, inputs) in zip(declared, sides, strict=True)
    ]
    if target is None:
        if packs:
            raise InvalidPacking(
                "the encoder's tokens are packed and the decoder's are missing: pass "
                "decoder_input_ids or labels, with segment ids in decoder_attention_mask or with "
                "decoder_position_ids",
                code="halves-disagree",
            )
        return real, None
    if not packs:
        if declared[-1].real is None and arguments.get("decoder_attention_mask") is None:
            real[-1] = _before_last_label(arguments, host, target, pad_token_id)
        if all(part.all() for part in real) or not all(part.any(axis=1).all() for part in real):
            return real, None
        if source is None and len(target) != len(recordings):
            return real, None
    device = sides[0][1].device
    halves = [Half(part, device, each.layout) for each, part in zip(declared, real, strict=True)]
    counts = [half.counts for half in halves]
    if source is None and sum(counts[0]) != len(recordings):
        raise InvalidPacking(
            "there must be one recording or image for each document of the decoder, in their "
            f"order: found {len(recordings)} of them and {sum(counts[0])} documents",
            code="halves-disagree",
        )
    if counts[0] != counts[-1]:
        raise InvalidPacking(
            "the documents of the encoder and of the decoder must match, row by row: found "
            f"{counts[0]} documents in the rows of the encoder and {counts[1]} in those of the "
            f"decoder. Declare both: by {_BOTH}",
            code="halves-disagree",
        )
    # Without a mask of the decoder, what is padding follows from the labels, and none of it is
    # labelled.
    return real, Pair(
        None if source is None else halves[0], halves[-1], declared[-1].labelled_padding, packs
    )


def _first_tensor(*values: Any) -> Tensor | None:
    """Return the first value that is a tensor with rows and columns, or None."""
    return next((v for v in values if isinstance(v, Tensor) and v.dim() >= 2), None)


def _declarations_on_host(arguments: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return on the CPU, by name, integer declarations, labels and decoder tokens."""
    given = {name: arguments.get(name) for name in (*DECLARATIONS, "labels", "decoder_input_ids")}
    integers = {
        n: v for n, v in given.items() if isinstance(v, Tensor) and not v.is_floating_point()
    }
    return on_host(integers | recall(integers))


def _read_half(
    arguments: Mapping[str, Any],
    host: Mapping[str, Tensor],
    prefix: str,
    inputs: Tensor,
) -> declarations.Declared:
    """Return the documents and padding that one half's arguments, named with `prefix`, declare."""
    names = {name: prefix + name for name in PER_TOKEN} | ({"labels": "labels"} if prefix else {})
    given = {name: arguments.get(full) for name, full in names.items()}
    known = {name: host[full] for name, full in names.items() if full in host}
    return declarations.read(given, (inputs.shape[0], inputs.shape[1]), inputs.device, known=known)


def _before_last_label(
    arguments: Mapping[str, Any],
    host: Mapping[str, Tensor],
    target: Tensor,
    pad_token_id: int | None,
) -> np.ndarray:
    """Return a mask, True up to a row's last label or real token; all True if unknown."""
    labels, ids = host.get("labels"), host.get("decoder_input_ids")
    everything = np.ones(target.shape[:2], dtype=bool)
    if labels is None or tuple(labels.shape) != everything.shape:
        return everything
    kept = labels != IGNORED_LABEL
    if ids is not None and pad_token_id is not None:
        kept = kept | (ids != pad_token_id)
    elif ids is not None or arguments.get("decoder_inputs_embeds") is not None:
        return everything
    real = np.logical_or.accumulate(host_values(kept)[:, ::-1], axis=1)[:, ::-1]
    real[:, 0] = True  # a row without a label keeps its first token
    return real
