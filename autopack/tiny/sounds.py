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

from autopack.tiny.media_rows import Document, features_of, form_of, tokens_of_parts

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

    around = [
        ("audio_start_token_id", "audio_end_token_id"),
        ("audio_bos_token_id", "audio_eos_token_id"),
    ]
    fields = ("audio_token_id", "audio_token_index")
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


def _sound(
    model: Any, number: int, frames: int | None, generator: torch.Generator
) -> dict[str, Any]:
    """Return the arguments of one sound; sounds of different numbers differ in length.

    The forms are:

    * window: (sounds, bins, frames), as many frames as the encoder has positions for, and a mask
    * whole window: the same without a mask: silence is a part of it
    * bins and frames: (sounds, bins, frames), padded, and a mask of frames
    * bins and frames in chunks: the same, padded to whole chunks of the encoder
    * frames: (sounds, frames, bins), padded, and a mask of frames
    * frames of ids: the same, of ids of bins
    * frames without a mask: as frames, and a mask of the features that a projection makes of them
    * samples: (sounds, samples), padded to whole tokens, and a mask of samples
    * samples of a channel: the same, (sounds, 1, samples)
    * chunks of frames: (chunks, bins, frames), and the number of samples of each chunk
    """
    form, config = form_of(model, "sounds") or "", model.config
    names = ("audio_config", "encoder_config", "sound_config", "asr_config")
    part: Any = next((each for name in names if (each := getattr(config, name, None))), config)
    named = inspect.signature(type(model).forward).parameters
    mask_name = next((name for name in _MASKS if name in named), "")
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    name, width = "input_features", _bins(part)
    more = 109 if hasattr(part, "n_window_infer") else 9  # than one window has
    length = FRAMES + more * (number % 2) if frames is None else frames
    if form == "chunks of frames":
        chunk = part.samples_per_token * 5
        lengths = torch.tensor([chunk] * (number % 2) + [length * part.hop_length - 7])
        whole = _whole(-(-int(lengths.max()) // part.hop_length), 8)
        of_sound = torch.arange(whole)[None] < lengths[:, None] // part.hop_length
        features = torch.randn((len(lengths), width, whole), generator=generator).to(dtype)
        return {name: features * of_sound[:, None], "chunk_sample_lengths": lengths}
    unit = 1
    if form in ("window", "whole window"):
        unit = 2 * (getattr(part, "max_source_positions", None) or part.max_position_embeddings)
    elif form == "bins and frames in chunks":
        unit = 2 * part.n_window
    elif form == "frames without a mask":
        width = part.input_dim
    elif form == "frames" and hasattr(part, "asr_config"):
        unit = part.subsampling_factor
    elif form.startswith("samples"):
        codec: Any = getattr(config, "acoustic_tokenizer_encoder_config", None)
        unit = getattr(part, "samples_per_token", None) or codec.hop_length
        name, width, length = "input_values", 1, length * unit // 8 - 3
    whole = _whole(length, unit)
    # Parakeet's processor gives a frame more than it counts.
    whole += form == "frames" and getattr(part, "model_type", "") == "parakeet_encoder"
    mask = torch.arange(whole)[None] < length
    if form == "frames of ids":
        ids = torch.randint(part.mel_vocab_size, (1, length, width), generator=generator)
        return {"audio_input_ids": ids, mask_name: mask.long()}
    features = torch.randn((1, whole, width), generator=generator).to(dtype) * mask[..., None]
    if "audio_input_features" in named:
        sizes = torch.tensor([-(-length // part.time_reduction)])
        return {"audio_input_features": features, mask_name: mask, "audio_embed_sizes": sizes}
    if form == "samples":
        features = features[..., 0]
    elif not form.startswith("frames"):
        features, mask = features.transpose(1, 2), mask if width == 1 else mask.long()
    elif form == "frames without a mask":
        kept = _whole(length, config.window_size) // config.downsample_rate
        mask = torch.ones(1, kept, dtype=torch.bool)
    has_mask = mask_name and form != "whole window"
    return {name: features, mask_name: mask} if has_mask else {name: features}


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
