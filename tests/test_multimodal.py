"""Packed rows of documents with images: each gets what it gets alone, and nothing of the others.

The comparison is `compat.images.compare`, the same that prints the recorded table: one row and two rows of documents,
of which one ends and the next begins with an image, one has none, and one has two. Tolerances are the auditor's.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import autopack
from autopack import InvalidPacking, UnsupportedModel, registry, tiny
from autopack.inspection import media
from autopack.tiny import images
from autopack.tiny.images import IMAGE
from compat.images import alone, alone_loss, as_videos, changed, compare, documents, influence, labels_of, packed, spans
from tests.conftest import FLOAT32, LEAK, error, gradients

pytestmark = pytest.mark.usefixtures("nothing_left_behind")
TYPES = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "llava", "llava_next", "gemma3", "gemma4", "paligemma",
         "idefics3", "qwen2_5_omni_thinker"]  # fmt: skip
RESULTS = Path(__file__).parents[1] / "compat" / "results" / "exactness-image-text-to-text.json"


def build(model_type: str, attn_implementation: str = "sdpa", **others: Any) -> Any:
    return tiny.build(model_type, task="image-text-to-text", attn_implementation=attn_implementation, **others)


def twins(model_type: str, **others: Any) -> tuple[Any, Any]:
    """A stock model and one to enable, with the same parameters."""
    return build(model_type, **others), build(model_type, **others)


def hold(errors: dict[str, float], factor: float = 1.0) -> None:
    bounds = {"worst": FLOAT32, "influence": FLOAT32, "loss": 1e-3, "gradient": 1e-3}
    assert all(value <= bounds[name] * factor for name, value in errors.items()), errors


@pytest.mark.parametrize("model_type", TYPES)
def test_documents_with_images_get_what_they_get_alone(model_type):
    stock, model = twins(model_type)
    with autopack.enable(model):
        hold(compare(model, stock))


@pytest.mark.parametrize("model_type", ["qwen2_vl", "gemma3", "paligemma"])
def test_eager_attention_is_exact_too(model_type):
    stock, model = twins(model_type, attn_implementation="eager")
    with autopack.enable(model):
        hold(compare(model, stock, gradients=False))


@pytest.mark.parametrize("model_type", ["qwen2_vl", "llava"])
def test_in_float64_only_rounding_is_left(model_type):
    """Of types whose towers and texts compute in float64 throughout, but for the loss, which is float32 upstream."""
    stock, model = twins(model_type, dtype=torch.float64)
    with autopack.enable(model):
        errors = compare(model, stock)
    assert max(errors[name] for name in ("worst", "influence", "gradient")) <= 1e-6, errors


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen3_vl", "video_llama_3"])
def test_videos_are_exact_too(model_type):
    stock, model = twins(model_type)
    with autopack.enable(model):
        hold(compare(model, stock, videos=True))


@pytest.mark.parametrize("model_type", TYPES)
def test_stock_leaks_in_the_plain_call(model_type):
    stock = build(model_type)
    found = documents(stock)
    logits = stock(**packed(stock, [found])).logits
    assert max(error(logits[row, a:b], alone(stock, d).logits[0]) for d, row, a, b in spans([found])) > LEAK


@pytest.mark.parametrize("model_type", ["qwen2_vl", "gemma3", "gemma4", "paligemma"])
def test_stock_leaks_even_where_it_splits_its_masks(model_type):
    """No cache and no mask: M-RoPE is lost, and blocks that see each other are added to a mask that was split."""
    stock = build(model_type)
    found = documents(stock)
    logits = stock(**packed(stock, [found]), use_cache=False).logits
    assert max(error(logits[row, a:b], alone(stock, d).logits[0]) for d, row, a, b in spans([found])) > LEAK


@pytest.mark.parametrize("model_type", ["gemma3", "gemma4"])
def test_image_blocks_that_touch_are_not_one(model_type):
    stock, model = twins(model_type)
    touching = documents(stock, [(3, IMAGE), (IMAGE, 4)])
    with autopack.enable(model):
        # Not quite zero in mixtures of experts: other tokens at an expert are another order of summation.
        assert influence(model, touching, 1, image=True) <= FLOAT32
        assert influence(model, touching, 0, image=True) <= FLOAT32
        logits = model(**packed(model, [touching])).logits
    for document, row, a, b in spans([touching]):
        assert error(logits[row, a:b], alone(stock, document).logits[0]) <= FLOAT32
    if model_type == "gemma3":  # it adds the blocks after the mask has been split by documents, so upstream they merge
        other = [touching[0], changed(touching[1], image=True)]
        before, after = (stock(**packed(stock, [each]), use_cache=False).logits for each in (touching, other))
        assert (before - after)[0, : len(touching[0])].abs().max() > LEAK


def test_the_blocks_of_one_document_see_each_other_both_ways():
    """Otherwise that nothing leaks would say little: a placeholder early in an image depends on late pixels."""
    model = build("gemma3")
    found = documents(model, [(3, IMAGE, 2), (5,)])
    token = found[0].tokens["input_ids"].clone()
    token[0, 6] = 9  # the last placeholder of the image becomes text of the same type
    with autopack.enable(model):
        embeds = [model.get_input_embeddings()(t) for t in (found[0].tokens["input_ids"], token)]
        rest = model.get_input_embeddings()(found[1].tokens["input_ids"])
        types = torch.cat([d.tokens["token_type_ids"] for d in found], dim=1)
        where = packed(model, [found])["position_ids"]
        one, other = (
            model(inputs_embeds=torch.cat([e, rest], dim=1), token_type_ids=types, position_ids=where).logits
            for e in embeds
        )
    moved = (one - other)[0].abs().amax(-1)
    assert moved[3] > LEAK  # the first placeholder
    assert moved[:3].max() == 0  # text before it
    assert moved[len(found[0]) :].max() == 0


@pytest.mark.parametrize("model_type", ["qwen2_vl", "gemma3", "llava", "mllama", "lfm2_vl"])
def test_text_alone_on_a_model_of_images(model_type):
    model = build(model_type)
    with autopack.enable(model, verify="never"):
        report = autopack.audit(model, modes=("default", "all-ones mask", "two rows"), training=(True,))
    assert report.exact, report.worst_case
    assert autopack.audit(model, modes=("all-ones mask",), training=(False,), gradients=False).worst > LEAK


@pytest.mark.parametrize("axes", [3, 4])
def test_positions_that_the_call_computed_itself_are_taken(axes):
    stock, model = twins("qwen2_vl")
    found = documents(stock)
    with autopack.enable(model):
        expected = model(**packed(model, [found])).logits
        call = packed(model, [found])
        text = call.pop("position_ids")
        parts = [stock.model.get_rope_index(**_grids(images.row(stock, [d])))[0] for d in found]
        vision = torch.cat(parts, dim=2)
        if axes == 4:
            call["position_ids"] = torch.cat([text[None], vision])
        else:
            lengths = torch.tensor([len(d) for d in found])
            call |= {"position_ids": vision, "seq_idx": torch.repeat_interleave(torch.arange(4), lengths)[None]}
        assert torch.equal(model(**call).logits, expected)


def _grids(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if name != "pixel_values"}


@pytest.mark.parametrize("declared", ["seq_idx", "segments", "cu_seq_lens"])
def test_any_declaration_numbers_the_documents(declared):
    stock, model = twins("qwen3_vl")
    found = documents(stock)
    lengths = torch.tensor([len(d) for d in found])
    number = torch.repeat_interleave(torch.arange(4), lengths)[None]
    bounds = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
    said = {
        "seq_idx": {"seq_idx": number},
        "segments": {"attention_mask": number + 1},
        "cu_seq_lens": {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds},
    }
    with autopack.enable(model):
        logits = model(**images.row(model, found), **said[declared]).logits
    for document, row, a, b in spans([found]):
        assert error(logits[row, a:b], alone(stock, document).logits[0]) <= FLOAT32


def test_the_backbone_alone_numbers_the_documents():
    stock, model = twins("qwen2_vl")
    found = documents(stock)
    with autopack.enable(model):
        states = model.model(**packed(model, [found])).last_hidden_state
    for document, row, a, b in spans([found]):
        assert error(states[row, a:b], stock.model(**images.row(stock, [document])).last_hidden_state[0]) <= FLOAT32


def test_what_the_model_keeps_for_generation_stays_and_is_not_read():
    stock, model = twins("qwen2_vl")
    found = documents(stock)
    with autopack.enable(model):
        alone(model, found[3])
        kept = model.model.rope_deltas
        assert int(kept) != 0
        model(**packed(model, [found]))
        assert model.model.rope_deltas is kept
        text = documents(stock, [(5,), (7,)])
        where = packed(stock, [text])["position_ids"]
        embeds = model.get_input_embeddings()(images.row(stock, text)["input_ids"])
        logits = model(inputs_embeds=embeds, position_ids=where).logits
    for document, row, a, b in spans([text]):
        assert error(logits[row, a:b], alone(stock, document).logits[0]) <= FLOAT32


@pytest.mark.parametrize("model_type", ["qwen2_vl", "gemma3", "llava"])
def test_rows_of_different_lengths_with_padding(model_type):
    stock, model = twins(model_type)
    found = documents(stock)
    first, second = found[:3], found[3:]
    columns = max(sum(map(len, each)) for each in (first, second))
    call, ids = images.rows(stock, [[*first, *second]]), {}
    spaces = {name: value for name, value in call.items() if name in found[0].tokens}
    place = sum(map(len, first))
    for name, value in spaces.items():
        rows = value[0, :place], value[0, place:]
        ids[name] = torch.stack([torch.nn.functional.pad(row, (0, columns - len(row))) for row in rows])
    segments = [torch.cat([torch.full((len(d),), i + 1) for i, d in enumerate(each)]) for each in (first, second)]
    mask = torch.stack([torch.nn.functional.pad(row, (0, columns - len(row))) for row in segments])
    assert (mask == 0).any()
    with autopack.enable(model):
        logits = model(**{**call, **ids}, attention_mask=mask).logits
    for document, row, a, b in spans([first, second]):
        assert error(logits[row, a:b], alone(stock, document).logits[0]) <= FLOAT32


@pytest.mark.parametrize("model_type", ["qwen2_vl", "llava"])
def test_loss_over_the_items_of_a_batch(model_type):
    stock, model = twins(model_type)
    found = documents(stock)
    labels = torch.cat([labels_of(d) for d in found], dim=1)
    items = sum(int((labels_of(d)[:, 1:] != -100).sum()) for d in found)
    with autopack.enable(model):
        loss = model(**packed(model, [found]), labels=labels, num_items_in_batch=items).loss
        loss.backward()
    expected = alone_loss(stock, [found])
    expected.backward()
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
    for mine, theirs in zip(gradients(model), gradients(stock), strict=True):
        assert (mine - theirs).abs().max() <= 1e-5 + 1e-3 * theirs.abs().max()


@settings(max_examples=6)
@given(
    st.lists(
        st.lists(st.one_of(st.integers(1, 6), st.just(IMAGE)), min_size=1, max_size=4).filter(
            # Two images without text between them are one to upstream, in a document alone too.
            lambda parts: not any(a == b == IMAGE for a, b in itertools.pairwise(parts))
        ),
        min_size=2,
        max_size=4,
    )
)
def test_documents_of_any_parts(numbered, parts):
    stock, model = numbered
    found = documents(stock, parts)
    with torch.no_grad():
        logits = model(**packed(model, [found])).logits
        for document, row, a, b in spans([found]):
            # Not relative to the document's own spread: one of a single token has none worth the name.
            assert (logits[row, a:b] - alone(stock, document).logits[0]).abs().max() <= FLOAT32


@pytest.fixture(scope="module")
def numbered():
    stock, model = twins("qwen2_vl")
    with autopack.enable(model):
        yield stock, model


def test_rotary_embeddings_by_the_longest_position_follow_the_positions_of_each_document():
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0, "mrope_section": [4, 2, 2]}
    stock, model = twins("qwen2_vl", text_config={"rope_parameters": rope, "max_position_embeddings": 8})
    found = documents(stock, [(20,), (3, IMAGE, 2), (IMAGE, 9, IMAGE)])
    with autopack.enable(model, verify="never"):
        logits = model(**packed(model, [found])).logits
    for document, row, a, b in spans([found]):
        expected = build("qwen2_vl", text_config={"rope_parameters": rope, "max_position_embeddings": 8})
        assert error(logits[row, a:b], alone(expected, document).logits[0]) <= FLOAT32


class TestBadInput:
    @pytest.fixture(scope="class")
    def model(self):
        model = build("qwen2_vl")
        with autopack.enable(model):
            yield model

    def call(self, model: Any, **others: Any) -> Any:
        return model(**{**packed(model, [documents(model)]), **others})

    def test_fewer_grids_than_images(self, model):
        grids = packed(model, [documents(model)])["image_grid_thw"]
        with pytest.raises(InvalidPacking, match=r"cannot number each document.*in the order of the documents"):
            self.call(model, image_grid_thw=grids[:-1])

    def test_grids_in_another_order(self, model):
        grids = packed(model, [documents(model)])["image_grid_thw"]
        assert not torch.equal(grids, grids.roll(1, 0))
        with pytest.raises(InvalidPacking, match=r"image_grid_thw must hold the media of all documents"):
            self.call(model, image_grid_thw=grids.roll(1, 0))

    def test_more_grids_than_images_is_upstreams_error(self, model):
        call = packed(model, [documents(model)])
        with pytest.raises((ValueError, RuntimeError), match=r"do not match|split_with_sizes|size"):
            self.call(model, image_grid_thw=torch.cat([call["image_grid_thw"], call["image_grid_thw"][:1]]))

    def test_no_token_types(self, model):
        with pytest.raises(InvalidPacking, match="mm_token_type_ids"):
            self.call(model, mm_token_type_ids=None)

    def test_embeddings_without_tokens(self, model):
        call = packed(model, [documents(model)])
        embeds = model.get_input_embeddings()(call.pop("input_ids"))
        with pytest.raises(InvalidPacking, match="inputs_embeds came without input_ids"):
            model(**call, inputs_embeds=embeds)

    def test_a_document_that_goes_on(self, model):
        where = packed(model, [documents(model)])["position_ids"]
        first = len(documents(model)[0])
        where[0, :first] += 5
        with pytest.raises(InvalidPacking, match="document 0 begins at position 5"):
            self.call(model, position_ids=where)

    def test_a_count_of_images_that_does_not_match_stays_readable(self):
        model = build("llava")
        call = packed(model, [documents(model)])
        call["pixel_values"] = call["pixel_values"][:-1]
        with (
            autopack.enable(model),
            pytest.raises(ValueError, match="Image features and image tokens do not match"),
        ):
            model(**call)

    def test_an_error_leaves_what_the_model_keeps(self, model):
        model.model.rope_deltas = None
        with pytest.raises(InvalidPacking):
            self.call(model, mm_token_type_ids=None)
        assert model.model.rope_deltas is None
        assert self.call(model).logits.isfinite().all()


REFUSED = {
    ("mllama", "pixel_values"): "attends to them across",
    ("mllama", "cross_attention_states"): "attends to them across",
    ("hunyuan_vl", "pixel_values"): "number the images",
    ("granite_docling", "pixel_values"): "covered documents of 'granite_docling' with images",
    ("llava_next_video", "pixel_values_videos"): "with videos",
    ("gemma3n", "input_features"): "with sounds",
    ("qwen2_5_omni_thinker", "input_features"): "with sounds",
}


@pytest.mark.parametrize(("model_type", "name"), REFUSED)
def test_media_that_no_run_has_covered_are_refused_on_packed_rows_alone(model_type, name):
    model = build(model_type, attn_implementation="eager")
    ids, where = tiny.tokens(model.config, 1, 9), torch.cat([torch.arange(4), torch.arange(5)])[None]
    with autopack.enable(model, verify="never"):
        with pytest.raises(UnsupportedModel, match=REFUSED[model_type, name]):
            model(input_ids=ids, position_ids=where, **{name: torch.zeros(1, 3, 32, 32)})
        assert model(input_ids=ids, position_ids=where).logits.isfinite().all()


def test_models_that_take_no_text_without_images_are_refused():
    with pytest.raises(UnsupportedModel, match="takes no text without images"):
        autopack.enable(build("idefics", attn_implementation="eager"), verify="never")


def padded(model: Any, side: str) -> tuple[dict[str, Any], torch.Tensor]:
    """A padded batch of three documents with images, and its mask."""
    found = documents(model, [(3, IMAGE, 2), (IMAGE, 9, IMAGE, 4), (7,)])
    columns = max(map(len, found))
    call = images.row(model, found)
    for name in found[0].tokens:
        rows = [d.tokens[name][0] for d in found]
        call[name] = torch.stack([_pad(row, columns, side) for row in rows])
    mask = torch.stack([_pad(torch.ones(len(d), dtype=torch.long), columns, side) for d in found])
    return call, mask


def _pad(row: torch.Tensor, columns: int, side: str) -> torch.Tensor:
    space = columns - len(row)
    return torch.nn.functional.pad(row, (space, 0) if side == "left" else (0, space))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("model_type", ["qwen2_vl", "qwen3_5", "gemma3", "llava", "paligemma", "mllama"])
def test_padded_batches_with_images_give_what_they_gave(model_type, side):
    stock, model = twins(model_type)
    if model_type == "mllama":
        found = documents_of_text(stock)
        call, mask = {"input_ids": torch.stack([_pad(d, 9, side) for d in found])}, None
        mask = torch.stack([_pad(torch.ones(len(d), dtype=torch.long), 9, side) for d in found])
    else:
        call, mask = padded(stock, side)
    labels = torch.where((call["input_ids"] < 100) & (mask == 1), call["input_ids"], -100)
    if side == "left":  # stock would compare the first token of a document with a prediction made at padding
        labels[:, 1:][mask[:, :-1] == 0] = -100
    stock.train()
    model.train()
    with autopack.enable(model) as handle:
        found = model(**call, attention_mask=mask, labels=labels)
        found.loss.backward()
        tally = handle.enabled.tally
    expected = stock(**call, attention_mask=mask, labels=labels, use_cache=False)
    expected.loss.backward()
    real = mask.bool()
    if not (model_type == "qwen3_5" and side == "left"):  # stock carries a state out of left padding
        assert error(found.logits[real], expected.logits[real]) <= FLOAT32
        assert float(found.loss.detach()) == pytest.approx(float(expected.loss.detach()), rel=1e-4)
        for mine, theirs in zip(gradients(model), gradients(stock), strict=True):
            assert (mine - theirs).abs().max() <= 1e-4 + 1e-3 * theirs.abs().max()
    if model_type in ("gemma3", "paligemma"):  # their masks are made before the text model: nothing left to unpad
        assert tally.batches == 0
        assert sum(tally.left.values()) >= 1
    else:
        assert tally.batches == 1


def test_a_label_after_padding_keeps_a_batch_of_images_as_it_came():
    """The text model would be unpadded, and the head above it would predict that label from zeros."""
    stock, model = twins("llava")
    call, mask = padded(stock, "left")
    labels = torch.where((call["input_ids"] < 100) & (mask == 1), call["input_ids"], -100)
    with autopack.enable(model) as handle:
        found = model(**call, attention_mask=mask, labels=labels, use_cache=False).loss
        assert handle.enabled.tally.batches == 0
        assert any("predicted at padding" in reason for reason in handle.enabled.tally.left)
    assert torch.equal(found, stock(**call, attention_mask=mask, labels=labels, use_cache=False).loss)


def documents_of_text(model: Any) -> list[torch.Tensor]:
    return [tiny.tokens(model.config, 1, n, seed=n)[0] for n in (5, 9, 7)]


class TestArguments:
    @pytest.mark.parametrize(
        "name", ["pixel_values", "image_grid_thw", "pixel_values_videos", "image_sizes", "mm_encoder_outputs"]
    )
    def test_what_holds_media(self, name):
        assert media.holds_media(name)

    @pytest.mark.parametrize(
        "name", ["input_ids", "token_type_ids", "mm_token_type_ids", "vision_feature_layer", "labels", "audio_codes"]
    )
    def test_what_does_not(self, name):
        assert not media.holds_media(name)

    def test_encoder_outputs_hold_what_they_say(self):
        assert media.kinds("mm_encoder_outputs", {"image": 1, "audio": 2}) == {"image", "sound"}


def test_every_type_that_takes_images_has_been_run_with_them():
    recorded = json.loads(RESULTS.read_text())
    measured = {name for name, cells in recorded.items() if any(c.get("images") == "exact" for c in cells.values())}
    for kind in ("image", "video"):
        said = {t for family in registry.families() for t in family.media_types.get(kind, ())}
        assert said <= measured
    for model_type, cells in recorded.items():
        assert not any("LEAK" in (cell["status"], cell.get("images")) for cell in cells.values()), model_type


def test_videos_are_not_taken_for_images():
    model = build("qwen2_vl")
    video = as_videos(model, documents(model)[0])
    assert "video_grid_thw" in images.row(model, [video])
    assert int(video.tokens["mm_token_type_ids"].max()) == 2
