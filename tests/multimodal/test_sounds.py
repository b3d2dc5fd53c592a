"""Packed rows of documents with sounds beside text: each gets what it gets alone, and nothing of
the others.

The comparison is `compat.images.compare`, with documents of `compat.with_sounds`: of sounds of
several lengths, of which one ends and the next begins with a sound, one has none, and one has two.
"""

import dataclasses

import pytest
import torch

import autopack
from autopack import tiny
from autopack.tiny import media_rows, sounds
from autopack.tiny.media_rows import Document
from autopack.tiny.sounds import SOUND
from compat.images import alone, cast, packed
from compat.with_sounds import documents, overrides
from tests.conftest import FLOAT32, LEAK, error
from tests.multimodal.models import agrees, padded, serves, unpadded_as_stock, worst
from tests.support.refusals import refused

EAGER = ("gemma4", "vibevoice_asr")
"""Encoders of sounds that upstream runs by no other implementation."""
TASKS = {
    "seq2seq": "audioflamingo3 glmasr moss_transcribe_diarize musicflamingo qwen2_audio qwen3_asr "
    "vibevoice_asr voxtral",
    "image-text-to-text": "dots3_note gemma4 gemma4_unified inkling_mm_model muse_spark "
    "nemotron_h_omni qwen2_5_omni_thinker",
    "multimodal-lm": "fun_asr_nano",
}
ALIKE = {
    "seq2seq": "granite_speech granite_speech_plus nemo_speechlm",
    "image-text-to-text": "gemma3n qwen3_omni_moe_thinker",
    "multimodal-lm": "phi4_multimodal",
}
CHUNKED = ("qwen3_omni_moe_thinker",)
"""Types whose chunks have 100 frames."""
TASK_OF = {
    name: task
    for tasks in (TASKS, ALIKE)
    for task, types in tasks.items()
    for name in types.split()
}


def types_of(tasks):
    return [name for types in tasks.values() for name in types.split()]


def with_sounds(model_type, **others):
    implementation = "eager" if model_type in EAGER else "sdpa"
    model = tiny.build(
        model_type,
        task=TASK_OF[model_type],
        attn_implementation=implementation,
        **overrides(model_type),
        **others,
    )
    cast(model, others.get("dtype", torch.float32))
    return model


def twins_with_sounds(model_type):
    """A stock model and one to enable, with the same parameters."""
    return with_sounds(model_type), with_sounds(model_type)


@pytest.mark.parametrize("model_type", types_of(TASKS))
def test_documents_with_sounds_get_what_they_get_alone(model_type):
    stock, model = twins_with_sounds(model_type)
    agrees(model, stock, found=documents(stock), verify=False)


PADDED = """
audioflamingo3 fun_asr_nano glmasr granite_speech moss_transcribe_diarize musicflamingo nemo_speechlm
qwen2_5_omni_thinker qwen2_audio qwen3_asr vibevoice_asr voxtral
""".split()
AS_ALONE = ("granite_speech", "nemo_speechlm")
"""Of these padding of sounds changes what stock gives, too, so what a document gets alone is no
measure."""


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("model_type", PADDED)
def test_padded_batches_with_sounds_give_what_they_gave(model_type, side):
    """Run as packed rows inside."""
    stock, model = twins_with_sounds(model_type)
    parts = ((3, SOUND, 2), (SOUND, 9, SOUND, 4), (7,))
    found = [sounds.document(stock, each, seed=number + 1) for number, each in enumerate(parts)]
    output = unpadded_as_stock(model, stock, padded(stock, found, side), verify=False)
    if side == "right" and model_type not in AS_ALONE:
        assert worst(output.logits, stock, [[document] for document in found]) <= FLOAT32


WINDOWS = "audioflamingo3 glmasr moss_transcribe_diarize musicflamingo qwen2_audio voxtral".split()
"""Types whose sounds are windows of one length, to which silence belongs."""


@pytest.mark.parametrize("model_type", sorted({*types_of(TASKS)} - {*WINDOWS}))
def test_sounds_of_any_lengths(model_type):
    """Frames are put together by eights: every remainder, beside a longer sound and one of several
    windows."""
    stock, model = twins_with_sounds(model_type)
    lengths = [
        n for n in (*range(9, 25), 39, 130) if not (model_type == "nemotron_h_omni" and n % 8 == 0)
    ]
    lengths = [n for n in lengths if n < 40 or model_type != "dots3_note"]  # whose chunks have 40
    found = [sounds.document(stock, [1, SOUND, 2], seed=2 * n, frames=n) for n in lengths]
    serves(model, stock, [found], verify=False)


@pytest.mark.parametrize("model_type", types_of(ALIKE))
def test_where_padding_would_tell_sounds_have_one_length(model_type):
    stock, model = twins_with_sounds(model_type)
    agrees(model, stock, found=documents(stock, alike=True), verify=False)
    with autopack.enable(model, verify=False), refused("media-mixed"):
        model(**packed(model, [documents(stock)]))
    one = documents(stock)[:1] + documents(stock)[2:3]  # with nothing longer beside it
    serves(model, stock, [one], verify=False)


@pytest.mark.parametrize("model_type", types_of(ALIKE))
def test_padding_tells_there(model_type):
    """Negative control: stock gives a sound something else in a batch where another is longer, in
    no packed row."""
    stock = with_sounds(model_type)
    most = 0.0
    for seed in (2, 4, 6, 8):  # of the speakers that Nemotron tells in the last frames, few change
        short = sounds.document(stock, [2, SOUND, 3], seed=seed, frames=17)
        long = sounds.document(
            stock, [2, SOUND, 3], seed=seed + 1, frames=126 if model_type in CHUNKED else 40
        )
        call = padded(stock, [short, long]) | {"labels": None}
        logits = stock(**call, use_cache=False).logits
        most = max(most, error(logits[0, : len(short)], alone(stock, short).logits[0]))
    assert most > LEAK


@pytest.mark.parametrize(
    "model_type",
    ["qwen2_audio", "qwen2_5_omni_thinker", "gemma3n", "nemo_speechlm", "fun_asr_nano"],
)
def test_stock_leaks_in_the_plain_call(model_type):
    stock = with_sounds(model_type)
    found = documents(stock, alike=model_type in types_of(ALIKE))
    call = packed(stock, [found])
    if model_type == "fun_asr_nano":
        call["attention_mask"] = torch.ones_like(call["input_ids"])
    assert worst(stock(**call).logits, stock, [found]) > LEAK


def refused_since_they_would_meet(model, stock, found, match, least=LEAK):
    """Want packed rows to be refused, and as a control to leak where nothing refuses them."""
    call = packed(model, [found])
    with autopack.enable(model, verify=False) as handle:
        with refused("media-mixed", match=match):
            model(**call)
        handle.enabled.traits.sounds_together = None
        assert worst(model(**call).logits, stock, [found]) > least


class TestPaddingOfSounds:
    """Lengths alone do not tell: what a rule asks is whether padding would change a sound."""

    def test_a_window_of_glm_asr_is_a_window_whatever_it_holds(self):
        """Its processor pads to 30 s. Padded to the longest, which no mask takes out, sounds would
        tell each other."""
        stock, model = twins_with_sounds("glmasr")
        found = documents(stock)
        with autopack.enable(model, verify=False):
            call = packed(model, [found])
            whole = 2 * model.config.audio_config.max_position_embeddings
            assert call["input_features"].shape[-1] == whole
            assert call["input_features_mask"].sum(-1).unique().numel() > 1
            model(**call)
            for name in ("input_features", "input_features_mask"):
                call[name] = call[name][..., : whole - 8]
            with refused("media-mixed"):
                model(**call)

    def test_sounds_longer_than_a_chunk_of_qwen3_omni(self):
        stock, model = twins_with_sounds("qwen3_omni_moe_thinker")
        chunk = 2 * model.config.audio_config.n_window
        long, longer = (
            sounds.document(stock, parts, seed=1) for parts in ([SOUND, 4], [2, SOUND, 3])
        )
        picture = longer.images[0]
        cut = {name: value[..., : chunk + 6] for name, value in picture.items()}
        assert picture["feature_attention_mask"].sum() > cut["feature_attention_mask"].sum() > chunk
        # without three placeholders, as many as the frames that were cut give
        kept = [0, 1, *range(5, len(longer))]
        fewer = Document({name: value[:, kept] for name, value in longer.tokens.items()}, (cut,))
        serves(model, stock, [[long, fewer]], verify=False)

    def test_nemotron_h_omni_makes_a_feature_of_padding(self, monkeypatch):
        """Of 24 frames it makes four features, of which the mask covers three; of 22 and 31, three
        and four."""
        stock, model = twins_with_sounds("nemotron_h_omni")
        monkeypatch.setattr(sounds, "FRAMES", 24)
        refused_since_they_would_meet(model, stock, documents(stock), "they have 24 to 33 frames")

    def test_granite_speech_says_of_no_frame_whether_it_is_padding(self):
        """Two sounds of as many features, of which one is a frame shorter: padding with zeros is
        what is seen of it."""
        stock, model = twins_with_sounds("granite_speech")
        found = documents(stock, alike=True)[:2]
        features = found[1].images[0]["input_features"]
        shorter = {**found[1].images[0], "input_features": features[:, :-1]}
        found[1] = dataclasses.replace(found[1], images=(shorter,))
        assert packed(model, [found])["input_features_mask"].all()
        refused_since_they_would_meet(model, stock, found, "sound 1 ends in silence or padding")


def test_sounds_of_music_flamingo_must_not_touch():
    """It numbers windows in a run of placeholders; processors put a token before and behind each
    sound."""
    stock, model = twins_with_sounds("musicflamingo")
    found = documents(stock)[:2]
    bare = []
    for document in found:
        ids = document.tokens["input_ids"]
        kept = (ids != stock.config.audio_bos_token_id) & (ids != stock.config.audio_eos_token_id)
        bare.append(dataclasses.replace(document, tokens={"input_ids": ids[kept][None]}))
    serves(model, stock, [bare[::-1]], verify=False)
    refused_since_they_would_meet(
        model, stock, bare, "a document ends with one, and the next begins with one", 1e-3
    )


def test_one_placeholder_for_each_sound_of_qwen2_audio_is_an_error():
    """Upstream still puts in the others itself, and makes other rows of it than those that were
    packed."""
    model = with_sounds("qwen2_audio")
    found = documents(model)
    short = []
    # those of two documents that touch would follow each other
    for document in (found[1], found[0]):
        ids = document.tokens["input_ids"][0]
        repeated = torch.nn.functional.pad(
            (ids[1:] == ids[:-1]) & (ids[1:] == model.config.audio_token_id), (1, 0)
        )
        short.append(dataclasses.replace(document, tokens={"input_ids": ids[~repeated][None]}))
    with autopack.enable(model, verify=False), refused("media-mixed"):
        model(**packed(model, [short]))


COLLATED = """
audioflamingo3 dots3_note fun_asr_nano gemma4 inkling_mm_model musicflamingo qwen2_5_omni_thinker qwen2_audio qwen3_asr
vibevoice_asr voxtral
""".split()


@pytest.mark.parametrize("model_type", COLLATED)
def test_the_collator_joins_what_a_processor_made_of_each_document(model_type):
    """In the order of the documents, the shorter padded with zeros: what `compat.images.packed`
    gives."""
    model = with_sounds(model_type)
    found = documents(model)
    examples = []
    for document in found:
        example = {name: value[0].tolist() for name, value in document.tokens.items()}
        for name in document.images[0] if document.images else ():
            example[name] = media_rows.row(model, [document])[name].numpy()
        examples.append({**example, "labels": example["input_ids"]})
    batch = autopack.PackingCollator.for_model(model)(examples)
    expected = packed(model, [found])
    assert batch.keys() >= expected.keys()
    for name, value in expected.items():
        assert torch.equal(torch.as_tensor(batch[name]), value), name
    labels = batch.pop("labels")
    with autopack.enable(model, verify=False):
        assert torch.isfinite(model(**batch, labels=labels).loss)
