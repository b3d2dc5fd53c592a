"""The documents of an encoder-decoder's call: those of the encoder, those of the decoder, and which belong together.

Each half runs as one row of its real tokens. The documents of a row, in order, are the same on both sides: the
decoder's i-th reads the encoder's i-th.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from autopack.errors import InvalidPacking
from autopack.layout import declarations
from autopack.layout.declarations import IGNORED_LABEL
from autopack.layout.packed import PackedLayout
from autopack.layout.padding import Padding

if TYPE_CHECKING:
    import torch

_OF_ENCODER = {"attention_mask": "attention_mask", "position_ids": "position_ids", "seq_idx": "seq_idx"}
_OF_DECODER = {name: f"decoder_{name}" for name in _OF_ENCODER}
_RECORDINGS = ("input_features", "input_values")
DECLARATIONS = (*_OF_ENCODER, *_OF_DECODER.values())
"""Arguments of a call that say where the documents of its halves lie."""


@dataclass(frozen=True, eq=False)
class Half:
    """One side of a call: the places of its real tokens in the batch, and its documents in the row made of them."""

    places: Padding
    layout: PackedLayout

    @classmethod
    def of_documents(cls, starts: np.ndarray, real: np.ndarray, device: torch.device) -> Half:
        """Build from boolean arrays (rows, columns): true where a document starts, and at real tokens."""
        places = Padding(real, device)
        bounds = np.append(np.flatnonzero(starts[real]), places.tokens)
        return cls(places, PackedLayout(1, places.tokens, bounds, device))


@dataclass(frozen=True, eq=False)
class Pair:
    """Both halves of a call; they have the same number of documents."""

    encoder: Half | None
    """None where the encoder takes no tokens: it runs as it is, on one recording per document."""
    decoder: Half

    def of(self, name: str | None) -> Padding | None:
        """The padding that an output of this name has; None for one that is as the caller expects it."""
        half = self.encoder if name is not None and name.startswith("encoder_") else self.decoder
        return None if half is None else half.places

    @property
    def halves(self) -> tuple[Half, ...]:
        """The halves that run as rows."""
        return (self.decoder,) if self.encoder is None else (self.encoder, self.decoder)


def encoder_inputs(arguments: Mapping[str, Any]) -> torch.Tensor | None:
    """The tensor (rows, columns, ...) that stands for the encoder's tokens, its states if it has run already."""
    states = arguments.get("encoder_outputs")
    return _first_tensor(arguments.get("input_ids"), arguments.get("inputs_embeds"), states and states[0])


def decoder_inputs(arguments: Mapping[str, Any]) -> torch.Tensor | None:
    """The tensor (rows, columns, ...) that stands for the decoder's tokens: the labels, where they make them."""
    names = ("decoder_input_ids", "decoder_inputs_embeds", "labels")
    return _first_tensor(*(arguments.get(name) for name in names))


def _first_tensor(*values: Any) -> torch.Tensor | None:
    import torch

    return next((v for v in values if isinstance(v, torch.Tensor) and v.dim() >= 2), None)


def declared_of(arguments: Mapping[str, Any], pad_token_id: int | None) -> tuple[Pair, bool] | None:
    """The halves of a call, and whether it packs documents (False: it pads them); None where it does neither.

    The encoder's documents are declared by `position_ids`, `seq_idx` or an `attention_mask` of segment ids, the
    decoder's by the same names with `decoder_` before them. In a padded batch without `decoder_attention_mask`, what
    follows the last label of a row is padding, as far as the decoder's tokens, where given, are padding tokens. Raises
    `InvalidPacking` where a declaration is malformed or the halves do not match.
    """
    source, target = encoder_inputs(arguments), decoder_inputs(arguments)
    recordings = next((arguments[name] for name in _RECORDINGS if arguments.get(name) is not None), None)
    if recordings is not None and source is None:
        return _of_recordings(arguments, len(recordings), target, pad_token_id)
    if source is None or target is None:
        if source is not None and _read(arguments, _OF_ENCODER, source).layout is not None:
            raise InvalidPacking(
                "the encoder's tokens are packed and the decoder's are missing: pass decoder_input_ids or labels, with "
                "segment ids in decoder_attention_mask or with decoder_position_ids"
            )
        return None
    for name in declarations.FLASH_KWARGS:
        if arguments.get(name) is not None:
            raise InvalidPacking(
                f"{name} does not say which half of an encoder-decoder it is of. Declare documents by segment ids in "
                f"attention_mask and decoder_attention_mask (1 1 2 2 0), or by position_ids and decoder_position_ids."
            )
    encoder = _read(arguments, _OF_ENCODER, source)
    decoder = _read(arguments, _OF_DECODER, target)
    if encoder.layout is None and decoder.layout is None:
        real = [_real(encoder, source), _real(decoder, target)]
        if decoder.real is None and arguments.get("decoder_attention_mask") is None:
            real[1] = _before_last_label(arguments, target, pad_token_id)
        if all(part.all() for part in real) or not all(part.any(axis=1).all() for part in real):
            return None
        halves = [Half.of_documents(_first_of_row(part), part, source.device) for part in real]
        return Pair(halves[0], halves[1]), False
    starts = [_starts(encoder, source), _starts(decoder, target)]
    counts = [(begin & part).sum(axis=1).tolist() for begin, part in starts]
    if counts[0] != counts[1]:
        raise InvalidPacking(
            f"the documents of the encoder and of the decoder must match, row by row: found {counts[0]} documents in "
            f"the rows of the encoder and {counts[1]} in those of the decoder. Declare both: by segment ids in "
            f"attention_mask and decoder_attention_mask (1 1 2 2 0), or by position_ids and decoder_position_ids."
        )
    halves = [Half.of_documents(begin, part, source.device) for begin, part in starts]
    return Pair(halves[0], halves[1]), True


def _of_recordings(
    arguments: Mapping[str, Any], count: int, target: torch.Tensor | None, pad_token_id: int | None
) -> tuple[Pair, bool] | None:
    """The decoder's documents of a call whose encoder gets one recording for each of them."""
    if target is None:
        return None
    decoder = _read(arguments, _OF_DECODER, target)
    if decoder.layout is None:
        real = _real(decoder, target)
        if decoder.real is None and arguments.get("decoder_attention_mask") is None:
            real = _before_last_label(arguments, target, pad_token_id)
        if real.all() or not real.any(axis=1).all() or len(real) != count:
            return None
        return Pair(None, Half.of_documents(_first_of_row(real), real, target.device)), False
    starts, real = _starts(decoder, target)
    if (starts & real).sum() != count:
        raise InvalidPacking(
            f"there must be one recording for each document of the decoder, in their order: found {count} recordings "
            f"and {int((starts & real).sum())} documents"
        )
    return Pair(None, Half.of_documents(starts, real, target.device)), True


def _read(arguments: Mapping[str, Any], names: Mapping[str, str], inputs: torch.Tensor) -> declarations.Declared:
    given = {name: arguments.get(of_half) for name, of_half in names.items()}
    return declarations.read(given, (inputs.shape[0], inputs.shape[1]), inputs.device)


def _real(declared: declarations.Declared, inputs: torch.Tensor) -> np.ndarray:
    return np.ones(inputs.shape[:2], dtype=bool) if declared.real is None else declared.real


def _starts(declared: declarations.Declared, inputs: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Where documents start, and which tokens are real."""
    real = _real(declared, inputs)
    if declared.layout is None:
        return _first_of_row(real), real
    starts = np.zeros(real.size, dtype=bool)
    starts[declared.layout.bounds[:-1]] = True
    return starts.reshape(real.shape), real


def _first_of_row(real: np.ndarray) -> np.ndarray:
    return real & (np.cumsum(real, axis=1) == 1)


def _before_last_label(arguments: Mapping[str, Any], target: torch.Tensor, pad_token_id: int | None) -> np.ndarray:
    labels, ids = arguments.get("labels"), arguments.get("decoder_input_ids")
    everything = np.ones(target.shape[:2], dtype=bool)
    if labels is None or tuple(labels.shape) != everything.shape:
        return everything
    kept = labels != IGNORED_LABEL
    if ids is not None and pad_token_id is not None:
        kept = kept | (ids != pad_token_id)
    elif ids is not None or arguments.get("decoder_inputs_embeds") is not None:
        return everything
    kept = kept.cpu().numpy()
    real = np.flip(np.logical_or.accumulate(np.flip(kept, axis=1), axis=1), axis=1)
    real[:, 0] = True  # a row without a label keeps its first token
    return real
