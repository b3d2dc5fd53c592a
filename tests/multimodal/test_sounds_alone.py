"""What docs/speech.md says of stock encoders of speech: in which of them padding of a batch changes what a sound gets.

None of them takes tokens, so none can be enabled; these are measurements of transformers alone.
"""

import pytest
import torch
from transformers import AutoModelForCTC
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import autopack
from autopack.tiny.models import randomize
from tests.conftest import FLOAT32, LEAK, error
from tests.support.refusals import refused

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

_SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 32,
    "pad_token_id": 0,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
}
_CONVOLUTIONS = {
    "conv_dim": (16, 16, 16),
    "conv_kernel": (10, 3, 3),
    "conv_stride": (5, 2, 2),
    "num_feat_extract_layers": 3,
}
_OF_FRAMES = ("lasr_ctc", "parakeet_ctc", "wav2vec2-bert")
"""Types that take frames, (sounds, frames, bins); the others take samples."""
APART = "hubert lasr_ctc parakeet_ctc unispeech unispeech-sat wav2vec2 wav2vec2-bert wavlm".split()
TOGETHER = "data2vec-audio sew sew-d wav2vec2-conformer".split()
GROUPS = "hubert unispeech unispeech-sat wav2vec2 wavlm".split()


def built(model_type, norm):
    default = CONFIG_MAPPING[model_type]()
    sizes = _SIZES if model_type in _OF_FRAMES else {**_SIZES, **_CONVOLUTIONS}
    fields = {name: value for name, value in sizes.items() if hasattr(default, name)}
    fields |= {name: 0.0 for name in vars(default) if "dropout" in name and isinstance(getattr(default, name), float)}
    if hasattr(default, "feat_extract_norm"):
        fields["feat_extract_norm"] = norm
    if hasattr(default, "do_stable_layer_norm"):
        fields["do_stable_layer_norm"] = norm == "layer"
    model = AutoModelForCTC.from_config(CONFIG_MAPPING[model_type](**fields), attn_implementation="eager")
    randomize(model, 0)
    return model.eval()


@torch.no_grad()
def moved(model_type, norm, *, masked):
    """How far padding behind a sound, beside a longer one, moves its logits."""
    model = built(model_type, norm)
    generator = torch.Generator().manual_seed(0)
    lengths, trailing = ((61, 140), (_bins(model),)) if model_type in _OF_FRAMES else ((331, 900), ())
    sounds = [torch.randn(length, *trailing, generator=generator) for length in lengths]
    batch = torch.zeros(2, lengths[1], *trailing)
    mask = torch.zeros(2, lengths[1], dtype=torch.long)
    for row, sound in enumerate(sounds):
        batch[row, : len(sound)] = sound
        mask[row, : len(sound)] = 1
    alone = model(sounds[0][None], attention_mask=mask[:1, : lengths[0]]).logits[0]
    together = model(batch, attention_mask=mask if masked else None).logits[0, : len(alone)]
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


def test_they_take_no_tokens():
    with refused("cannot-be-packed"):
        autopack.enable(built("wav2vec2", "layer"))
