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

EAGER = {"attn_implementation": "eager"}


def fewer_grids(call, *_):
    return {"image_grid_thw": call["image_grid_thw"][:-1]}


def turned_grids(call, *_):
    return {"image_grid_thw": call["image_grid_thw"].roll(1, 0)}


def later(call, *_):
    """Positions of a document that goes on."""
    return {"position_ids": call["position_ids"] + 5 * (call["position_ids"].cumsum(1) < 5)}


def embedded(call, model, _):
    return {"inputs_embeds": model.get_input_embeddings()(call["input_ids"]), "input_ids": None}


def without(name):
    return lambda *_: {name: None}


def fewer(name):
    return lambda call, *_: {name: call[name][:-1]}


def two_images(call, _, found):
    return {name: call[name][:2] for name in found[0].images[0]}


def images(count):
    return lambda call, *_: {"pixel_values": torch.cat([call["pixel_values"]] * 2)[:count]}


def labels_without_images(call, *_):
    """GIT's loss leaves out as many tokens as an image has, whether there is one or not."""
    return {"pixel_values": None, "labels": call["input_ids"]}


def tokens_of_the_encoder(*labels):
    """PP-FormulaNet shifts `input_ids`, or labels, over a row without tokens for its decoder."""

    def change(call, *_):
        ids, mask = call["decoder_input_ids"], call["decoder_attention_mask"]
        given = {"input_ids": ids, "attention_mask": mask, "labels": ids}
        left = {name: value for name, value in given.items() if name in labels}
        return {"decoder_input_ids": None, "decoder_attention_mask": None, **left} | (
            {"decoder_attention_mask": mask} if "labels" in labels else {}
        )

    return change


def numbers_from_0(call, model, found):
    """Molmo2 counts the patches of all images of a call: numbers from 0 would pool the first's."""
    rows = [media_rows.row(model, [document]) for document in found if document.images]
    return {"image_token_pooling": torch.cat([row["image_token_pooling"] for row in rows])}


def patch_of_the_image_before(call, *_):
    numbers, crops = call["image_token_pooling"].clone(), call["image_num_crops"]
    third = int(crops[:2].sum()) * call["pixel_values"].shape[1]
    numbers[numbers == third] -= 1
    return {"image_token_pooling": numbers}


POSITIONS, OTHERS = "media-positions", "media-of-others"
PATCHES = ("image_token_pooling", "image_grids", "pixel_values")
BAD = {
    "fewer grids": ("qwen2_vl", fewer_grids, POSITIONS),
    "turned grids": (
        "qwen2_vl",
        turned_grids,
        POSITIONS,
        "image_grid_thw must hold the media of all documents",
    ),
    "no token types": ("qwen2_vl", without("mm_token_type_ids"), POSITIONS, "mm_token_type_ids"),
    "a document that goes on": ("qwen2_vl", later, POSITIONS, "document 0 begins at position 5"),
    "embeddings without tokens": ("qwen2_vl", embedded, POSITIONS),
    "fewer grids, numbered": ("hunyuan_vl", fewer_grids, POSITIONS),
    "turned grids, numbered": ("hunyuan_vl", turned_grids, POSITIONS),
    **{
        f"two images, {name}": (name, two_images, "halves-disagree")
        for name in ("pix2struct", "pp_formulanet", "vision-encoder-decoder")
    },
    "tokens": (
        "pp_formulanet",
        tokens_of_the_encoder("input_ids", "attention_mask"),
        "halves-disagree",
    ),
    "tokens and labels": (
        "pp_formulanet",
        tokens_of_the_encoder("input_ids", "attention_mask", "labels"),
        "decoder-tokens",
    ),
    **{
        f"{count} images, {name}": (name, images(count), OTHERS)
        for name in ("blip", "git")
        for count in (1, 4)
    },
    "labels without images": ("git", labels_without_images, "argument-of-no-document"),
    "numbers from 0": ("molmo2", numbers_from_0, OTHERS),
    "a patch of the image before": ("molmo2", patch_of_the_image_before, OTHERS),
    "without numbers": ("molmo2", without("image_token_pooling"), OTHERS),
    **{f"fewer {name}": ("molmo2", fewer(name), OTHERS) for name in PATCHES},
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_the_documents(name):
    """And the same call is served without the change."""
    model_type, change, code, *match = BAD[name]
    model = with_images(model_type, **(EAGER if model_type in ("blip", "git") else {}))
    found = documents(model)
    call = packed(model, [found])
    with autopack.enable(model, verify=model_type != "molmo2"):
        with refused(code, match=match[0] if match else None):
            model(**{**call, **change(call, model, found)})
        assert model(**call).logits.isfinite().all()


def test_an_error_leaves_what_the_model_keeps():
    model = with_images("qwen2_vl")
    with autopack.enable(model):
        with refused("media-positions"):
            model(**{**packed(model, [documents(model)]), "mm_token_type_ids": None})
        assert model.model.rope_deltas is None


REFUSED = {
    ("mllama", "cross_attention_states"): "which states are whose is not known",
    ("evolla", "protein_input_ids"): "attends to proteins across",
    ("nemotron_h_omni", "pixel_values_videos"): "it takes frames in groups",
    ("molmo2", "pixel_values_videos"): "with videos",
    ("llava", "input_features"): "with sounds",
}


@pytest.mark.parametrize(("model_type", "name"), REFUSED)
def test_media_that_are_not_served_are_refused_on_packed_rows_alone(model_type, name):
    model = with_images(model_type, **EAGER)
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
    model = with_images(model_type, **EAGER)
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
        model = with_images(model_type, **EAGER)
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
        stock = with_images(model_type, **EAGER)
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
