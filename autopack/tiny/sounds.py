"""Documents with sounds for tiny models: tokens with placeholders, and the sounds in the form that
the type takes.

    first = sounds.document(model, [3, sounds.SOUND, 4])
    second = sounds.document(model, [sounds.SOUND, 5], seed=1)
    model(**media_rows.row(model, [first, second]))

Sounds of different seeds differ in length, unless the type takes windows of one length. The sounds
of a call are padded with zeros to the longest, as processors do, and a mask holds the length of
each.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from autopack.tiny.media_rows import Document, features_of, form_of, made_of, tokens_of_parts

SOUND = "sound"
"""Marker of a sound among the lengths of runs of text."""

_MASKS = """
feature_attention_mask input_features_mask input_values_mask audio_attention_mask padding_mask
audio_input_ids_mask
""".split()
FRAMES = 22
"""Number of frames of the shorter sounds."""


def document(
    model: PreTrainedModel, parts: Sequence[int | str], *, seed: int = 0, frames: int | None = None
) -> Document:
    """Return a document of `parts`: runs of text, by their lengths in tokens, and sounds.

    The seed determines all that is random: tokens, and sounds with values of order one. `frames` is
    the number of frames of each sound (samples in proportion); by default sounds have one of two
    lengths.
    """
    generator = torch.Generator().manual_seed(seed)
    made: list[dict[str, Any]] = []

    def add_sound() -> int:
        made.append(_sound(model, len(made) + seed, frames, generator))
        return _placeholders(model, made[-1])

    around = (
        "audio_start_token_id audio_end_token_id",
        "audio_bos_token_id audio_eos_token_id",
    )
    fields = "audio_token_id audio_token_index"
    kinds = {"mm_token_type_ids": 3, "token_type_ids": 0}
    return Document(
        tokens_of_parts(model, parts, seed, fields, around, kinds, add_sound)[0], tuple(made)
    )


def _placeholders(model: Any, sound: dict[str, Any]) -> int:
    """Return the number of placeholder tokens of a sound."""
    if isinstance(fixed := getattr(model.config, "audio_soft_tokens_per_image", None), int):
        return fixed
    if "audio_embed_sizes" in sound:
        return int(sound["audio_embed_sizes"][0])
    form = form_of(model, "sounds")
    mask = next((sound[name] for name in _MASKS if name in sound), None)
    tower = getattr(getattr(model, "model", model), "audio_tower", None)
    lengths = getattr(tower, "_get_feat_extract_output_lengths", None)
    if form == "window" and lengths is not None and mask is not None:
        return int(lengths(mask.sum(-1))[1])
    output, count = features_of(model, "audio", sound)
    kept = getattr(output, "attention_mask", None)
    if form == "frames" and kept is not None:
        return int(kept.sum())
    return int(mask.sum()) if form == "frames without a mask" and mask is not None else count


_FORMS = """
window | input_features turned 1 bins whole<length | MASK mask 1 whole<length
whole window | input_features turned 1 bins whole<length
bins and frames | input_features turned 1 bins whole<length | MASK mask 1 whole<length
bins and frames in chunks | input_features turned 1 bins whole<length | MASK mask 1 whole<length
chunks of frames | input_features drawn many bins whole
frames | input_features drawn 1 whole<length bins | MASK boolean 1 whole<length
frames and sizes | audio_input_features drawn 1 whole<length bins
frames and sizes | MASK boolean 1 whole<length | audio_embed_sizes numbers features
frames of ids | audio_input_ids tokens 1 length bins | MASK mask 1 length
frames without a mask | input_features drawn 1 whole<length bins | MASK boolean 1 kept
samples | input_values drawn 1 whole<length | MASK boolean 1 whole<length
samples of a channel | input_values drawn 1 1 whole<length | MASK boolean 1 whole<length
"""
"""The arguments of one sound, by the form; see `made_of`. MASK is the model's name for a mask.

Silence is a part of a whole window; chunks come with their number of samples; where frames have no
mask, there is one of the features that a projection makes of them."""


def _sound(
    model: Any, number: int, frames: int | None, generator: torch.Generator
) -> dict[str, Any]:
    """Return the arguments of one sound; sounds of different numbers differ in length."""
    form, config = form_of(model, "sounds") or "", model.config
    names = ("audio_config", "encoder_config", "sound_config", "asr_config")
    part: Any = next((each for name in names if (each := getattr(config, name, None))), config)
    named = inspect.signature(type(model).forward).parameters
    mask = next((name for name in _MASKS if name in named), "none")
    sizes = {"bins": _bins(part)}
    more = 109 if hasattr(part, "n_window_infer") else 9  # than one window has
    length = FRAMES + more * (number % 2) if frames is None else frames
    if form == "chunks of frames":
        chunk = part.samples_per_token * 5
        lengths = torch.tensor([chunk] * (number % 2) + [length * part.hop_length - 7])
        sizes |= {
            "many": len(lengths),
            "whole": _whole(-(-int(lengths.max()) // part.hop_length), 8),
        }
        found = made_of(_FORMS, form, sizes, model, generator)
        for features, samples in zip(found["input_features"], lengths, strict=True):
            features[:, samples // part.hop_length :] = 0
        return found | {"chunk_sample_lengths": lengths}
    unit = 1
    if form in ("window", "whole window"):
        unit = 2 * (getattr(part, "max_source_positions", None) or part.max_position_embeddings)
    elif form == "bins and frames in chunks":
        unit = 2 * part.n_window
    elif form == "frames without a mask":
        kept = _whole(length, config.window_size) // config.downsample_rate
        sizes |= {"bins": part.input_dim, "kept": kept}
    elif form == "frames and sizes":
        sizes["features"] = -(-length // part.time_reduction)
    elif form == "frames" and hasattr(part, "asr_config"):
        unit = part.subsampling_factor
    elif form.startswith("samples"):
        codec: Any = getattr(config, "acoustic_tokenizer_encoder_config", None)
        unit = getattr(part, "samples_per_token", None) or codec.hop_length
        length = length * unit // 8 - 3
    # Parakeet's processor gives a frame more than it counts.
    more = form == "frames" and getattr(part, "model_type", "") == "parakeet_encoder"
    sizes |= {"length": length, "whole": _whole(length, unit) + more}
    ids = range(getattr(part, "mel_vocab_size", 1))
    found = made_of(_FORMS.replace("MASK", mask), form, sizes, model, generator, ids)
    found.pop("none", None)
    return found


def _bins(part: Any) -> int:
    """Return the number of values of a sound's frame, which a config names; 0 if it does not."""
    if isinstance(channels := getattr(part, "subsampling_conv_channels", None), list):
        return int(channels[0])  # Gemma 4 takes the two for one number
    names = (
        "num_mel_bins n_mel_bins input_feat_size audio_embed_dim input_size feature_size"
    ).split()
    parts = (part, getattr(part, "asr_config", None))
    found = (getattr(each, name, None) for each in parts for name in names)
    return next((value for value in found if isinstance(value, int)), 0) * getattr(
        part, "num_stacked_frames", 1
    )


def _whole(length: int, part: int) -> int:
    """Return a length rounded up to a multiple of `part`."""
    return -(-length // part) * part
