"""What docs/media.md says of stock encoders of speech: in which of them padding of a batch changes what a sound gets.

None of them takes tokens, so none can be enabled; these are measurements of transformers alone.
"""

import pytest
import torch
from transformers import AutoModelForCTC
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from autopack import tiny
from autopack.tiny.models import randomize
from tests.conftest import FLOAT32, LEAK, error
from tests.engine import in_rows

_OF_FRAMES = ("lasr_ctc", "parakeet_ctc", "wav2vec2-bert")
"""Types that take frames, (sounds, frames, bins); the others take samples."""
APART = "hubert lasr_ctc parakeet_ctc unispeech unispeech-sat wav2vec2 wav2vec2-bert wavlm".split()
TOGETHER = "data2vec-audio sew sew-d wav2vec2-conformer".split()
GROUPS = "hubert unispeech unispeech-sat wav2vec2 wavlm".split()


def built(model_type, norm):
    made = CONFIG_MAPPING[model_type](vocab_size=32) if model_type in _OF_FRAMES[:2] else tiny.config(model_type)
    made.feat_extract_norm, made.do_stable_layer_norm = norm, norm == "layer"
    model = AutoModelForCTC.from_config(made, attn_implementation="eager")
    randomize(model, 0)
    return model.eval()


@torch.no_grad()
def moved(model_type, norm, *, masked):
    """How far padding behind a sound, beside a longer one, moves its logits."""
    model = built(model_type, norm)
    generator = torch.Generator().manual_seed(0)
    # Of samples an odd number of frames, of which SEW puts two together.
    lengths, trailing = ((61, 140), (_bins(model),)) if model_type in _OF_FRAMES else ((3630, 9000), ())
    sounds = [torch.randn(length, *trailing, generator=generator) for length in lengths]
    masks = [torch.ones(length, dtype=torch.long) for length in lengths]
    alone = model(sounds[0][None], attention_mask=masks[0][None]).logits[0]
    mask = in_rows(masks) if masked else None
    together = model(in_rows(sounds), attention_mask=mask).logits[0, : len(alone)]
    return error(together, alone)


def _bins(model):
    found = getattr(model.config, "feature_projection_input_dim", None)
    return int(found or getattr(model.config, "encoder_config", model.config).num_mel_bins)


CASES = [
    # These take padding out, by the mask alone.
    *((name, "layer", masked) for name in APART for masked in (True, False)),
    *((name, "layer", True) for name in TOGETHER),
    # `GroupNorm` over all samples of a row, as in wav2vec2-base: padding is counted, masked or not.
    *((name, "group", True) for name in GROUPS),
]


@pytest.mark.sampled(9)
@pytest.mark.parametrize(("model_type", "norm", "masked"), CASES)
def test_what_padding_does_to_a_sound(model_type, norm, masked):
    found = moved(model_type, norm, masked=masked)
    apart = masked and norm == "layer" and model_type in APART
    assert found <= FLOAT32 if apart else found > LEAK
