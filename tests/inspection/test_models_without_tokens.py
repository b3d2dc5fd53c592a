"""Encoders of sounds and images take no tokens: no call of theirs could say where documents lie."""

import pytest
import transformers
from transformers.models.whisper.modeling_whisper import WhisperEncoder

import autopack
from autopack import tiny
from tests.conftest import attributes, same
from tests.support.refusals import refused

pytestmark = pytest.mark.usefixtures("nothing_left_behind")
ENCODERS = {
    "whisper": WhisperEncoder,
    "clip_vision_model": transformers.CLIPVisionModel,
    "siglip_vision_model": transformers.SiglipVisionModel,
    "vit": transformers.ViTModel,
    "dinov2": transformers.Dinov2Model,
    "wav2vec2": transformers.Wav2Vec2Model,
    "hubert": transformers.HubertModel,
}


@pytest.mark.parametrize("verify", [True, False, "strict"])
@pytest.mark.parametrize("model_type", ENCODERS)
def test_an_encoder_that_takes_no_tokens_is_refused(model_type, verify):
    model = ENCODERS[model_type](tiny.config(model_type))
    before = attributes(model)
    with refused(
        "cannot-be-packed",
        match=r"takes tokens or embeddings of tokens \(input_ids, inputs_embeds\)",
    ):
        autopack.enable(model, verify=verify)
    assert same(attributes(model), before)
    assert not autopack.is_enabled(model)
