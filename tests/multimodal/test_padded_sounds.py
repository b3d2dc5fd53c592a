"""Padded batches of documents with sounds give what they gave, run as packed rows inside."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import autopack
from autopack.tiny import media_rows, sounds
from autopack.tiny.sounds import SOUND
from compat.images import alone
from tests.conftest import FLOAT32, error, gradients
from tests.multimodal.test_sounds import with_sounds

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

PARTS = ((3, SOUND, 2), (SOUND, 9, SOUND, 4), (7,))
AS_ALONE = ("granite_speech", "nemo_speechlm")
"""Of these padding of sounds changes what stock gives, too, so what a document gets alone is no measure."""


def padded(model: Any, side: str) -> tuple[dict[str, Any], torch.Tensor, torch.Tensor, list[Any]]:
    """A padded batch of three documents, its mask, its labels and the documents."""
    found = [sounds.document(model, each, seed=number + 1) for number, each in enumerate(PARTS)]
    columns = max(map(len, found))

    def pad(row: torch.Tensor) -> torch.Tensor:
        space = columns - len(row)
        return torch.nn.functional.pad(row, (space, 0) if side == "left" else (0, space))

    call = media_rows.row(model, found)
    for name in found[0].tokens:
        call[name] = torch.stack([pad(d.tokens[name][0]) for d in found])
    mask = torch.stack([pad(torch.ones(len(d), dtype=torch.long)) for d in found])
    labels = torch.where((call["input_ids"] < 100) & (mask == 1), call["input_ids"], -100)
    if side == "left":  # stock would compare the first token of a document with a prediction made at padding
        labels[:, 1:][mask[:, :-1] == 0] = -100
    return call, mask, labels, found


TYPES = """
audioflamingo3 fun_asr_nano glmasr granite_speech moss_transcribe_diarize musicflamingo nemo_speechlm
qwen2_5_omni_thinker qwen2_audio qwen3_asr vibevoice_asr voxtral
""".split()


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("model_type", TYPES)
def test_padded_batches_with_sounds_give_what_they_gave(model_type, side):
    stock, model = with_sounds(model_type), with_sounds(model_type)
    call, mask, labels, documents = padded(stock, side)
    with autopack.enable(model, verify=False) as handle:
        found = model(**call, attention_mask=mask, labels=labels)
        found.loss.backward()
        tally = handle.enabled.tally
    expected = stock(**call, attention_mask=mask, labels=labels, use_cache=False)
    expected.loss.backward()
    real = mask.bool()
    assert tally.batches == 1
    assert error(found.logits[real], expected.logits[real]) <= FLOAT32
    assert float(found.loss.detach()) == pytest.approx(float(expected.loss.detach()), rel=1e-4)
    for mine, theirs in zip(gradients(model), gradients(stock), strict=True):
        assert (mine - theirs).abs().max() <= 1e-4 + 1e-3 * theirs.abs().max()
    if side == "right" and model_type not in AS_ALONE:
        for number, document in enumerate(documents):
            assert error(found.logits[number][real[number]], alone(stock, document).logits[0]) <= FLOAT32
