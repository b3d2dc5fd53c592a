"""Padded batches of documents with sounds give what they gave, run as packed rows inside."""

import pytest

from autopack.tiny import sounds
from autopack.tiny.sounds import SOUND
from tests.conftest import FLOAT32
from tests.multimodal.models import padded, unpadded_as_stock, worst
from tests.multimodal.test_sounds import twins_with_sounds

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

PARTS = ((3, SOUND, 2), (SOUND, 9, SOUND, 4), (7,))
AS_ALONE = ("granite_speech", "nemo_speechlm")
"""Of these padding of sounds changes what stock gives, too, so what a document gets alone is no measure."""


TYPES = """
audioflamingo3 fun_asr_nano glmasr granite_speech moss_transcribe_diarize musicflamingo nemo_speechlm
qwen2_5_omni_thinker qwen2_audio qwen3_asr vibevoice_asr voxtral
""".split()


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("model_type", TYPES)
def test_padded_batches_with_sounds_give_what_they_gave(model_type, side):
    stock, model = twins_with_sounds(model_type)
    documents = [sounds.document(stock, each, seed=number + 1) for number, each in enumerate(PARTS)]
    found = unpadded_as_stock(model, stock, padded(stock, documents, side), verify=False)
    if side == "right" and model_type not in AS_ALONE:
        assert worst(found.logits, stock, [[document] for document in documents]) <= FLOAT32
