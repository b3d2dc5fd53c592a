"""Media that packed rows cannot take, and inputs that do not fit their documents: each is refused
and says why."""

import inspect
import re
import sys

import pytest
import torch
import transformers

import autopack
from autopack import tiny
from autopack.inspection import media
from autopack.tiny import media_rows
from compat.images import documents, packed
from tests.engine import counted
from tests.multimodal.models import with_images
from tests.support.refusals import refused


def call_with(model, **others):
    return model(**{**packed(model, [documents(model)]), **others})


BAD = {
    "fewer grids than images": (lambda call: {"image_grid_thw": call["image_grid_thw"][:-1]}, None),
    "grids in another order": (
        lambda call: {"image_grid_thw": call["image_grid_thw"].roll(1, 0)},
        "image_grid_thw must hold the media of all documents",
    ),
    "no token types": (lambda call: {"mm_token_type_ids": None}, "mm_token_type_ids"),
    "a document that goes on": (
        lambda call: {
            "position_ids": call["position_ids"] + 5 * (call["position_ids"].cumsum(1) < 5)
        },
        "document 0 begins at position 5",
    ),
}


class TestBadInput:
    @pytest.fixture(scope="class")
    def model(self):
        model = with_images("qwen2_vl")
        with autopack.enable(model):
            yield model

    @pytest.mark.parametrize(("change", "match"), BAD.values(), ids=BAD)
    def test_what_does_not_fit_the_documents(self, model, change, match):
        call = packed(model, [documents(model)])
        changed = change(call)
        assert all(v is None or not torch.equal(v, call[n]) for n, v in changed.items())
        with refused("media-positions", match=match):
            model(**{**call, **changed})

    def test_embeddings_without_tokens(self, model):
        call = packed(model, [documents(model)])
        embeds = model.get_input_embeddings()(call.pop("input_ids"))
        with refused("media-positions"):
            model(**call, inputs_embeds=embeds)

    def test_an_error_leaves_what_the_model_keeps(self, model):
        model.model.rope_deltas = None
        with refused("media-positions"):
            call_with(model, mm_token_type_ids=None)
        assert model.model.rope_deltas is None
        assert call_with(model).logits.isfinite().all()


class TestNumbersOfPatches:
    """Molmo2 counts the patches of all images of a call: numbers that begin anew would pool the
    first image's."""

    @pytest.fixture(scope="class")
    def model(self):
        model = with_images("molmo2")
        with autopack.enable(model, verify=False):
            yield model

    def test_those_of_each_document_from_0(self, model):
        found = documents(model)
        rows = [media_rows.row(model, [document]) for document in found if document.images]
        numbers = torch.cat([row["image_token_pooling"] for row in rows])
        assert numbers.shape == packed(model, [found])["image_token_pooling"].shape
        with refused("media-of-others"):
            call_with(model, image_token_pooling=numbers)

    def test_one_patch_of_the_image_before(self, model):
        call = packed(model, [documents(model)])
        numbers, crops = call["image_token_pooling"].clone(), call["image_num_crops"]
        third = int(crops[:2].sum()) * call["pixel_values"].shape[1]
        numbers[numbers == third] -= 1
        with refused("media-of-others"):
            call_with(model, image_token_pooling=numbers)

    @pytest.mark.parametrize(
        ("name", "fewer"),
        [
            *(
                (name, fewer)
                for name in ("image_token_pooling", "image_grids", "image_num_crops")
                for fewer in (0, 1)
            ),
            ("pixel_values", 1),
        ],
    )
    def test_without_what_tells_whose_they_are_or_of_fewer_images(self, model, name, fewer):
        value = packed(model, [documents(model)])[name][:-1] if fewer else None
        with refused("media-of-others"):
            call_with(model, **{name: value})


REFUSED = {
    ("mllama", "cross_attention_states"): "which states are whose is not known",
    ("evolla", "protein_input_ids"): "attends to proteins across",
    ("nemotron_h_omni", "pixel_values_videos"): "it takes frames in groups",
    ("molmo2", "pixel_values_videos"): "with videos",
    ("llava", "input_features"): "with sounds",
}


@pytest.mark.parametrize(("model_type", "name"), REFUSED)
def test_media_that_are_not_served_are_refused_on_packed_rows_alone(model_type, name):
    model = with_images(model_type, attn_implementation="eager")
    ids, where = tiny.tokens(model.config, 1, 9), counted((4, 5))
    with autopack.enable(model, verify=False):
        with pytest.raises(autopack.UnsupportedModel, match=REFUSED[model_type, name]):
            model(input_ids=ids, position_ids=where, **{name: torch.zeros(1, 3, 32, 32)})
        assert model(input_ids=ids, position_ids=where).logits.isfinite().all()


LINES = {
    "udop": "patch_inds[rows, cols] = False",
    "pi0": "outputs.last_hidden_state[:, -self.config.chunk_size :]",
    "diffusion_gemma": "decoder_input_ids = torch.randint(",
}


@pytest.mark.parametrize("model_type", LINES)
def test_types_whose_documents_have_no_result_of_their_own(model_type):
    """Each names the line of upstream by which that is so."""
    model = with_images(model_type, attn_implementation="eager")
    with refused("cannot-be-packed", match=r"\(5\.23\.0, modeling_\w+\.py:\d+\)") as raised:
        autopack.enable(model, verify=False)
    if transformers.__version__ == "5.23.0":
        number = int(re.findall(r"py:(\d+)", str(raised.value))[0])
        assert (
            LINES[model_type]
            in inspect.getsource(sys.modules[type(model).__module__]).splitlines()[number - 1]
        )


NORMS = {"emu3": "model.vqmodel", "fast_vlm": "model.vision_tower"}


@pytest.mark.parametrize("model_type", NORMS)
class TestNormsOverTheBatch:
    """Emu3's tokenizer of images has `BatchNorm3d`, FastVLM's tower `BatchNorm2d`; `train()` of the
    model trains them.

    A tower of timm is not installed here: a ResNet stands in for it, whose norms are of the same
    class."""

    @pytest.fixture
    def model(self, model_type):
        model = with_images(model_type, "eager")
        with autopack.enable(model, verify=False):
            yield model.train()

    def test_images_are_refused_while_they_train(self, model, model_type):
        call = packed(model, [documents(model)])
        with refused("media-mixed"):
            model(**call)
        model.get_submodule(NORMS[model_type]).eval()
        assert model(**call).logits.isfinite().all()

    def test_stock_mixes_documents_there(self, model_type):
        """Negative control: the first document sees nothing of the second but by the norms."""
        stock = with_images(model_type, "eager")
        first, second = documents(stock)[:2]
        for train in (False, True):
            alone, beside = (
                stock.train(train)(**media_rows.row(stock, each), use_cache=False).logits[
                    0, : len(first)
                ]
                for each in ([first], [first, second])
            )
            assert (float((alone - beside).detach().abs().max()) > 0.01) == train


def test_encoder_outputs_hold_what_they_say():
    assert media.kinds("mm_encoder_outputs", {"image": 1, "audio": 2}) == {"image", "sound"}
