"""Kyutai's speech to text takes a text token and codes of the sound at each place: tokens of a third axis, no media."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import autopack
from autopack.tiny.models import randomize
from tests.conftest import FLOAT32, LEAK, error
from tests.engine import counted, mean_loss
from tests.multimodal.models import same_gradients, same_loss
from tests.support.refusals import refused

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

CODEBOOKS = 4


def built() -> Any:
    transformers = pytest.importorskip("transformers")
    codec = transformers.MimiConfig(
        hidden_size=32, num_filters=4, upsampling_ratios=[2, 2], codebook_size=16, codebook_dim=8, num_quantizers=4,
        vector_quantization_hidden_dimension=8, num_semantic_quantizers=1, upsample_groups=32, num_hidden_layers=1,
        intermediate_size=32, num_attention_heads=4, num_key_value_heads=4, head_dim=8,
    )  # fmt: skip
    config = transformers.KyutaiSpeechToTextConfig(
        codec_config=codec, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
        head_dim=16, ffn_dim=96, vocab_size=128, codebook_vocab_size=17, num_codebooks=CODEBOOKS, sliding_window=6,
        max_position_embeddings=64, audio_bos_token_id=16, audio_pad_token_id=196, bos_token_id=1, pad_token_id=3,
    )  # fmt: skip
    model = transformers.KyutaiSpeechToTextForConditionalGeneration._from_config(config, attn_implementation="sdpa")
    randomize(model, 0)
    return model.eval()


def document(length: int, generator: torch.Generator) -> torch.Tensor:
    text = torch.randint(8, 100, (1, length, 1), generator=generator)
    return torch.cat([text, torch.randint(0, 16, (1, length, CODEBOOKS), generator=generator)], dim=-1)


def test_codes_are_tokens():
    stock, model = built(), built()
    generator = torch.Generator().manual_seed(0)
    found = [document(length, generator) for length in (5, 9, 7)]
    ids = torch.cat(found, dim=1)
    lengths = [each.shape[1] for each in found]
    call = {"input_ids": ids, "position_ids": counted(lengths)}
    labels = ids[..., 0]
    with autopack.enable(model, verify=False):
        out = model(**call, labels=labels)
        out.loss.backward()
        other = ids.clone()
        other[0, 2, 1:] = 15 - other[0, 2, 1:]  # the sound of the first document
        moved = (model(**{**call, "input_ids": other}).logits - out.logits)[0].abs().amax(-1)
    assert moved[:5].max() > LEAK
    assert moved[5:].max() == 0
    expected = [stock(input_ids=each, labels=each[..., 0], use_cache=False) for each in found]
    for part, each in zip(out.logits[0].split(lengths), expected, strict=True):
        assert error(part, each.logits[0]) <= FLOAT32
    loss = mean_loss([each.loss for each in expected], [length - 1 for length in lengths])
    loss.backward()
    same_loss(out.loss, loss, within=1e-5)
    same_gradients(model, stock, least=1e-5)
    leaking = stock(**call, attention_mask=torch.ones_like(labels)).logits
    assert error(leaking[0, 5:14], expected[1].logits[0]) > LEAK


def test_the_auditor_has_no_codes_to_draw():
    """Its tokens have two axes, which packed calls of its twin raise at."""
    with refused("not-exact"):
        autopack.enable(built())
