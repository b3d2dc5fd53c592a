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

from autopack.tiny import rules
from autopack.tiny.media_rows import Document, features_of, form_of, runs

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
    """Make a document of runs of text of the given lengths in tokens, and sounds.

    The seed determines all that is random: tokens, and sounds with values of order one. `frames` is
    the number of frames of each sound (samples in proportion); by default sounds have one of two
    lengths.
    """
    generator = torch.Generator().manual_seed(seed)
    config: Any = model.config
    made: list[dict[str, Any]] = []

    def add() -> int:
        made.append(_sound(model, len(made) + seed, frames, generator))
        return _placeholders(model, made[-1])

    owners = (config, getattr(config, "audio_config", None))
    found = (
        getattr(each, name, None)
        for each in owners
        for name in ("audio_token_id", "audio_token_index")
    )
    placeholder = next((value for value in found if isinstance(value, int)), rules.VOCAB - 1)
    around = [
        ("audio_start_token_id", "audio_end_token_id"),
        ("audio_bos_token_id", "audio_eos_token_id"),
    ]
    whole = torch.cat([*runs(config, parts, seed, placeholder, around, add)], dim=1)
    named = inspect.signature(type(model).forward).parameters
    per_token = {"input_ids": whole}
    per_token |= {
        n: torch.zeros_like(whole) for n in ("mm_token_type_ids", "token_type_ids") if n in named
    }
    if "mm_token_type_ids" in per_token:
        per_token["mm_token_type_ids"] = 3 * (whole == placeholder).long()
    return Document(per_token, tuple(made))


def _placeholders(model: Any, sound: dict[str, Any]) -> int:
    """Return the number of features that the model puts in the place of a sound."""
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
    """Return the arguments of one sound; sounds of different numbers differ in length."""
    form, config = form_of(model, "sounds"), model.config
    names = ("audio_config", "encoder_config", "sound_config", "asr_config")
    part: Any = next((each for name in names if (each := getattr(config, name, None))), config)
    named = inspect.signature(type(model).forward).parameters
    mask_name = next((name for name in _MASKS if name in named), "")
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    bins = _bins(part)
    more = 109 if hasattr(part, "n_window_infer") else 9  # than one window has
    length = FRAMES + more * (number % 2) if frames is None else frames

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    def mask(whole: int) -> torch.Tensor:
        return torch.arange(whole)[None] < length

    match form:
        case "window" | "whole window":
            # window: (sounds, bins, frames), as many frames as the encoder has positions for, and a
            # mask of frames whole window: the same without a mask: silence is a part of it
            whole = 2 * (
                getattr(part, "max_source_positions", None) or part.max_position_embeddings
            )
            found = {"input_features": values(1, bins, whole)}
            return (
                found
                if form == "whole window" or not mask_name
                else found | {mask_name: mask(whole).long()}
            )
        case "bins and frames" | "bins and frames in chunks":
            # bins and frames: (sounds, bins, frames), padded, and a mask of frames
            # bins and frames in chunks: the same, padded to whole chunks of the encoder
            whole = _whole(length, 2 * part.n_window if form == "bins and frames in chunks" else 1)
            return {
                "input_features": values(1, bins, whole) * mask(whole)[:, None],
                mask_name: mask(whole).long(),
            }
        case "frames without a mask":
            # as frames, and a mask of the features that a projection makes of them
            kept = _whole(length, config.window_size) // config.downsample_rate
            features = values(1, length, part.input_dim)
            return {"input_features": features, mask_name: torch.ones(1, kept, dtype=torch.bool)}
        case "frames of ids":
            # as frames, of ids of bins
            ids = torch.randint(part.mel_vocab_size, (1, length, bins), generator=generator)
            return {"audio_input_ids": ids, mask_name: mask(length).long()}
        case "frames" if "audio_input_features" in named:
            sizes = torch.tensor([-(-length // part.time_reduction)])
            features = values(1, length, bins)
            return {
                "audio_input_features": features,
                "audio_attention_mask": mask(length),
                "audio_embed_sizes": sizes,
            }
        case "frames":
            # (sounds, frames, bins), padded, and a mask of frames
            whole = _whole(length, part.subsampling_factor if hasattr(part, "asr_config") else 1)
            # its processor gives a frame more than it counts
            whole += getattr(part, "model_type", "") == "parakeet_encoder"
            return {
                "input_features": values(1, whole, bins) * mask(whole)[..., None],
                mask_name: mask(whole),
            }
        case "samples" | "samples of a channel":
            # samples: (sounds, samples), padded to whole tokens, and a mask of samples
            # samples of a channel: the same, (sounds, 1, samples)
            per_token = (
                getattr(part, "samples_per_token", None)
                or config.acoustic_tokenizer_encoder_config.hop_length
            )
            length = length * per_token // 8 - 3
            whole = _whole(length, per_token)
            samples = values(1, whole) * mask(whole)
            return {
                "input_values": samples if form == "samples" else samples[:, None],
                mask_name: mask(whole),
            }
    assert form == "chunks of frames"  # (chunks, bins, frames), and how many samples each chunk has
    chunk = part.samples_per_token * 5
    lengths = torch.tensor([chunk] * (number % 2) + [length * part.hop_length - 7])
    whole = _whole(-(-int(lengths.max()) // part.hop_length), 8)
    of_sound = torch.arange(whole)[None] < lengths[:, None] // part.hop_length
    features = values(len(lengths), bins, whole) * of_sound[:, None]
    return {"input_features": features, "chunk_sample_lengths": lengths}


def _bins(part: Any) -> int:
    """Return the number of values of a frame."""
    if isinstance(channels := getattr(part, "subsampling_conv_channels", None), list):
        return int(channels[0])  # Gemma 4 takes the two for one number
    names = (
        "num_mel_bins",
        "n_mel_bins",
        "input_feat_size",
        "audio_embed_dim",
        "input_size",
        "feature_size",
    )
    parts = (part, getattr(part, "asr_config", None))
    found = (getattr(each, name, None) for each in parts for name in names)
    return next(
        (value for value in found if isinstance(value, int)),
        0,
    ) * getattr(part, "num_stacked_frames", 1)


def _whole(length: int, part: int) -> int:
    """Return a length padded to whole parts."""
    return -(-length // part) * part
