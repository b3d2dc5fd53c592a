"""Models that take no text without images: those with a Q-Former, and Kosmos-2. Each document has
an image."""

import pytest
import torch
import transformers

import autopack
from autopack import tiny
from autopack.tiny.images import IMAGE
from compat.images import documents
from tests.multimodal.models import serves, twins_with_images
from tests.support.refusals import refused

CLASSES = {
    "blip-2": "Blip2ForConditionalGeneration",
    "instructblip": "InstructBlipForConditionalGeneration",
    "instructblipvideo": "InstructBlipVideoForConditionalGeneration",
}


@pytest.mark.parametrize("model_type", CLASSES)
def test_an_encoder_decoder_in_the_place_of_the_language_model_is_refused(model_type):
    """As in BLIP-2 with Flan-T5."""
    config = tiny.config(model_type, task="image-text-to-text")
    derived = ("text_config", "is_encoder_decoder", "use_decoder_only_language_model")
    fields = {name: value for name, value in config.to_dict().items() if name not in derived}
    text = {**tiny.config("t5", task="seq2seq").to_dict(), "model_type": "t5"}
    model = getattr(transformers, CLASSES[model_type])(type(config)(**fields, text_config=text))
    with refused("cannot-be-packed"):
        autopack.enable(model, verify=False)


def test_a_q_former_with_as_many_tokens_as_the_row_has():
    """Upstream hands positions on to it, by `**kwargs`; they would fit there, and number its tokens
    by documents."""
    stock, model = twins_with_images("instructblipvideo")
    first, second = documents(stock, [(3, IMAGE), (IMAGE, 4)])
    ids = tiny.tokens(stock.config, 1, len(first) + len(second), seed=5)
    for document in (first, second):
        document.images[0].update(
            qformer_input_ids=ids, qformer_attention_mask=torch.ones_like(ids)
        )
    serves(model, stock, [[first, second]], verify=False)
