"""Models of sounds beside text: features of a speech encoder take the places of placeholder tokens.

The text is a decoder that attends through the interface, so its documents are kept apart as in
models of text alone. The features of all sounds of a call are put into the flattened rows in order,
so sounds in the order of the documents reach their own document. Encoders take no tokens and keep
sounds apart by themselves, but for padding, which a sound has beside a longer one: some encoders
let it change the last frames of a sound, or all frames. Their rules detect this in a call
(`Family.sounds_together`), and the call raises.

Names are from transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from autopack.family import Family, SoundsRule
from autopack.layout.host import host_values
from autopack.layout.packed import PackedLayout

Given = Mapping[str, Any]
"""Arguments of a packed call."""
Lengths = np.ndarray | None
_TYPES = """
audioflamingo3 fun_asr_nano glmasr granite_speech granite_speech_plus musicflamingo qwen2_audio
qwen3_asr vibevoice_asr voxtral
"""


_DECLARED = (
    "audio_feature_lengths feature_attention_mask audio_attention_mask input_features_mask "
    "audio_embed_sizes"
)


def _first(given: Given, names: str) -> Any:
    """Return the first of the named arguments that a call brings, or None."""
    return next((given[name] for name in names.split() if given.get(name) is not None), None)


def _lengths(config: Any, given: Given) -> Lengths:
    """Return the number of frames of each sound, or None if the call does not declare it."""
    found = _first(given, _DECLARED)
    if found is None:
        return None
    found = host_values(torch.as_tensor(found))
    return found if found.ndim == 1 else found.sum(-1)


def _within_chunks(config: Any, given: Given) -> Lengths:
    """Return the frames of each sound's longest chunk (Qwen3-Omni), or None if undeclared.

    Qwen3-Omni pads chunks to the longest of the call; its second convolution reads what the first
    made of the padding.
    """
    lengths = _lengths(config, given)
    return None if lengths is None else np.minimum(lengths, 2 * config.audio_config.n_window)


def _if_padding_makes_a_feature(config: Any, given: Given) -> Lengths:
    """Return sounds' frames if Nemotron-H Omni would make a feature of padding, else None.

    It counts one frame more than the mask, which is padding if it begins a feature.
    """
    lengths = _lengths(config, given)
    if lengths is None:
        return None
    begun = (lengths < lengths.max()) & (lengths % config.audio_config.subsampling_factor == 0)
    return lengths if begun.any() else None


def _in_less_than_a_window(config: Any, given: Given) -> Lengths:
    """Return each sound's frames if GLM-ASR's features are not padded to its whole window, else
    None.

    It attends to all frames: of its whole window, as its processor makes, or of the longest sound.
    """
    features = given.get("input_features")
    if features is None or features.shape[-1] >= 2 * config.audio_config.max_position_embeddings:
        return None
    return _lengths(config, given)


def _why_unlike(
    frames: Callable[[Any, Given], Lengths], config: Any, given: Given, layout: PackedLayout
) -> str | None:
    """Return why sounds that differ in `frames` are refused; None if all are alike or unknown."""
    lengths = frames(config, given)
    if lengths is None or lengths.min() == lengths.max():
        return None
    return f"they have {lengths.min()} to {lengths.max()} frames, and {_BEHIND}"


def _why_unlike_or_silent(config: Any, given: Given, layout: PackedLayout) -> str | None:
    """Return why sounds of unlike length, or that may end in padding, are refused, else None.

    Silence and padding have one value in all bins.
    """
    features = _first(given, "input_features audio_input_features")
    if features is None or len(features) < 2:
        return None
    if given.get("audio_attention_mask") is None:
        last = features[:, -1]
        ends_in_silence = host_values(last.amax(-1) == last.amin(-1))
        if ends_in_silence.any():
            return (
                f"sound {int(np.argmax(ends_in_silence))} ends in silence or padding, which no "
                f"mask tells apart, and {_BEHIND}"
            )
    return _why_unlike(_lengths, config, given, layout)


def _adjacent(config: Any, given: Given) -> Lengths:
    """Return True at placeholders of sounds, but the first column, that follow another one.

    It is bool (rows, columns - 1), or None without `input_ids`.
    """
    if (ids := given.get("input_ids")) is None:
        return None
    places = host_values(ids == config.audio_token_id)
    return places[:, 1:] & places[:, :-1]


def _refuse_adjacent(config: Any, given: Given, layout: PackedLayout) -> str | None:
    """Return the reason to refuse adjacent placeholders of two documents, or None.

    Music Flamingo takes a run of placeholders for one sound, and numbers windows of 30 s within it.
    """
    adjacent = _adjacent(config, given)
    first = layout.starts[:, 1:] == np.arange(1, layout.columns)
    if adjacent is None or not (first & adjacent).any():
        return None
    return (
        "a document ends with one, and the next begins with one: _build_audio_timestamps would "
        "number both as one"
    )


def _why_one_for_each(config: Any, given: Given, layout: PackedLayout) -> str | None:
    """Return why sounds with one placeholder each are refused (Qwen2-Audio); None if any has a run.

    The model takes them for the older form, one per sound, and makes longer rows of them.
    """
    adjacent = _adjacent(config, given)
    if adjacent is None or adjacent.any():
        return None
    return (
        "they have one placeholder for each sound, of which _merge_input_ids_with_audio_features "
        "makes other rows; give one for each feature"
    )


_BEHIND = "its encoder reads what stands behind a shorter one"
_TOGETHER: dict[str, SoundsRule] = {
    "gemma3n nemo_speechlm": partial(_why_unlike, _lengths),
    "glmasr": partial(_why_unlike, _in_less_than_a_window),
    "musicflamingo": _refuse_adjacent,
    "nemotron_h_omni": partial(_why_unlike, _if_padding_makes_a_feature),
    "qwen2_audio": _why_one_for_each,
    "qwen3_omni_moe_thinker": partial(_why_unlike, _within_chunks),
    "granite_speech granite_speech_plus phi4_multimodal": _why_unlike_or_silent,
}

FAMILY = Family.of(
    "speech",
    _TYPES,
    "attention site, document by document; sounds in the order of the documents",
    within_token="FunAsrNanoMultiModalProjector",
    sounds_together=_TOGETHER,
)
