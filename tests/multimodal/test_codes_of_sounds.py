"""Kyutai's speech to text takes a text token and codes of the sound at each place: tokens of a
third axis, no media."""

import pytest
import torch

import autopack
from autopack.tiny.models import randomize
from tests.conftest import LEAK, error
from tests.engine import Result, check, counted, leaks, mean_loss
from tests.support.refusals import refused

CODEBOOKS = 4


def built():
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
    model = transformers.KyutaiSpeechToTextForConditionalGeneration._from_config(
        config, attn_implementation="sdpa"
    )
    randomize(model, 0)
    return model.eval()


def document(length, generator):
    text = torch.randint(8, 100, (1, length, 1), generator=generator)
    return torch.cat(
        [text, torch.randint(0, 16, (1, length, CODEBOOKS), generator=generator)], dim=-1
    )


def test_codes_are_tokens():
    stock, model = built(), built()
    generator = torch.Generator().manual_seed(0)
    found = [document(length, generator) for length in (5, 9, 7)]
    ids = torch.cat(found, dim=1)
    lengths = [each.shape[1] for each in found]
    call, labels = {"input_ids": ids, "position_ids": counted(lengths)}, ids[..., 0]
    own = [stock(input_ids=each, labels=each[..., 0], use_cache=False) for each in found]
    loss = mean_loss([each.loss for each in own], [length - 1 for length in lengths])
    expected = Result.of(stock, [each.logits[0] for each in own], loss)
    with autopack.enable(model, verify=False):
        out = model(**call, labels=labels)
        check(Result.of(model, out.logits[0].split(lengths), out.loss), expected)
        other = ids.clone()
        other[0, 2, 1:] = 15 - other[0, 2, 1:]  # the sound of the first document
        assert (
            error(model(**{**call, "input_ids": other}).logits[0, :5], expected.documents[0]) > LEAK
        )
    leaking = stock(**call, attention_mask=torch.ones_like(labels)).logits[0]
    assert leaks(Result([*leaking.split(lengths)]), Result(expected.documents))


def test_the_auditor_has_no_codes_to_draw():
    """Its tokens have two axes, which packed calls of its twin raise at."""
    with refused("not-exact"):
        autopack.enable(built())
