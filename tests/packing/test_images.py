"""Documents with pictures in packed rows: planned, packed, collated and trained on as alone."""

import datasets
import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from transformers import Trainer

import autopack
from autopack import PackingCollator, tiny
from autopack.tiny import media_rows
from autopack.tiny.images import IMAGE
from compat.images import documents
from tests.multimodal.models import twins_with_images
from tests.packing.batches import KINDS, arguments, pieces
from tests.support.refusals import refused

TOLERANCE = 2e-5
"""float32, relative to values near 1: other orders of sums leave about 1e-6, and another picture
changes 1e-2."""
pytest.importorskip("transformers", "5.0")  # whose processor of Qwen2-VL works without torchvision
PROCESSOR = transformers.Qwen2VLImageProcessorPil(
    patch_size=8, merge_size=2, min_pixels=16 * 16, max_pixels=48 * 48
)
PLACEHOLDER, START, END = 127, 124, 125
PICTURED = ((1,), (), (2, 3), (4,), (), (5,))
"""The pictures of each document, by number."""


def picture(number):
    width, height = 16 * (1 + number % 3), 16 * (1 + number % 2)
    pixels = np.random.default_rng(number).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(pixels)


def example(model, number):
    """A document as a processor leaves it, with its pictures beside the tokens."""
    text = tiny.tokens(model.config, 4 + number, seed=number).tolist()
    pictures = [picture(n) for n in PICTURED[number]]
    ids = text[:2]
    for each in pictures:
        grid = PROCESSOR(images=[each], return_tensors="np")["image_grid_thw"][0]
        ids += [START, *[PLACEHOLDER] * int(grid.prod() // 4), END]
    ids += text[2:]
    types = [int(i == PLACEHOLDER) for i in ids]
    labels = [-100 if i in (PLACEHOLDER, START, END) else i for i in ids]
    return {"input_ids": ids, "mm_token_type_ids": types, "labels": labels, "images": pictures}


def alone(model, given):
    """The output for one document by itself, with what the processor makes of its pictures."""
    pixels = dict(PROCESSOR(images=given["images"], return_tensors="pt")) if given["images"] else {}
    tokens = {n: torch.tensor([given[n]]) for n in ("input_ids", "mm_token_type_ids", "labels")}
    return model(
        **tokens, **pixels, attention_mask=torch.ones_like(tokens["input_ids"]), use_cache=False
    )


@pytest.fixture(name="twins")
def _twins():
    return twins_with_images("qwen2_vl")


def pictured(model):
    """All examples."""
    return [example(model, n) for n in range(len(PICTURED))]


def with_pictures(examples):
    """The examples in a dataset, whose pictures are features."""
    return datasets.Dataset.from_list(examples).cast_column(
        "images", datasets.Sequence(datasets.Image())
    )


def close(found, expected, **options):
    torch.testing.assert_close(found, expected, **{"rtol": TOLERANCE, "atol": TOLERANCE, **options})


def test_pictures_in_another_order_change_what_documents_get(twins):
    """Negative control: the order is all that ties a picture to its document."""
    stock, model = twins
    examples = [example(stock, n) for n in (0, 3)]
    examples[1] = {**examples[0], "images": [picture(1 + 6)]}  # as large as the first
    batch = PackingCollator.for_model(model, image_processor=PROCESSOR)(examples)
    turned = {
        **batch,
        "pixel_values": batch["pixel_values"].roll(len(batch["pixel_values"]) // 2, 0),
    }
    autopack.enable(model)
    assert float((model(**turned).logits - model(**batch).logits).detach().abs().max()) > 1e-2


@pytest.mark.parametrize("form", KINDS)
def test_packed_rows_keep_the_pictures_of_their_documents(twins, form):
    stock, model = twins
    examples = pictured(stock)
    data = examples if form == "list" else with_pictures(examples)
    rows = list(autopack.pack(data.to_iterable_dataset() if form == "stream" else data, 64))
    assert len(rows) > 1
    collate = PackingCollator.for_model(model, image_processor=PROCESSOR)
    autopack.enable(model)
    by_ids = {tuple(e["input_ids"]): e for e in examples}
    for row in rows:
        logits = model(**collate([row])).logits[0].split([*row["seq_lengths"]])
        for ids, found in zip(pieces(row), logits, strict=True):
            close(found, alone(stock, by_ids.pop(tuple(ids))).logits[0])
    assert not by_ids


def trainer_of(model, folder, data, collate=None, **options):
    collate = collate or PackingCollator.for_model(model, image_processor=PROCESSOR)
    args = arguments(folder, max_steps=1, learning_rate=0.0, **options)
    return Trainer(model, args, train_dataset=data, data_collator=collate)


def test_a_trainer_with_its_defaults_gets_the_pictures(twins, tmp_path):
    _, model = twins
    rows = autopack.pack(with_pictures(pictured(model)), 64)
    trainer = trainer_of(model, tmp_path, rows, per_device_train_batch_size=len(rows))
    with autopack.enable(trainer) as handle:
        assert "images" in handle.kept
        assert next(iter(trainer.get_train_dataloader()))["image_grid_thw"].shape == (5, 3)


def test_a_trainer_that_drops_pictures_is_refused_at_its_first_step(twins, tmp_path):
    _, model = twins
    trainer = trainer_of(
        model, tmp_path, autopack.pack(datasets.Dataset.from_list(pictured(model)), 64)
    )
    autopack.enable(model)
    with refused("trainer-loses-documents"):
        trainer.train()


@pytest.mark.sampled(6)
@pytest.mark.parametrize("rows", [None, 3])
@pytest.mark.parametrize(
    "model_type",
    "qwen2_vl llava llava_next gemma3 gemma4 paligemma idefics3 smolvlm mistral3 molmo2 "
    "blip git".split(),
)
def test_what_a_processor_made_of_each_document_is_joined(model_type, rows):
    """Every form in which types take pixels: patches, squares, tiles, by row, beside sizes and
    positions; one for each document."""
    own = {"attn_implementation": "eager"} if model_type in ("blip", "git") else {}
    stock, model = twins_with_images(model_type, **own)
    parts = ((3, IMAGE), (IMAGE, 4), (7,), (2, IMAGE, 3, IMAGE, 4))
    made = documents(stock, parts)
    examples = [media_rows.row(stock, [d]) for d in made]
    columns = 2 * max(map(len, made)) if rows else None
    collate = PackingCollator.for_model(model, max_length=columns, rows=rows, labels="none")
    batch = collate(examples)
    assert rows is None or len(batch["input_ids"]) == rows
    autopack.enable(model)
    logits = model(**batch).logits
    logits = logits.flatten(0, 1)[
        batch.get("attention_mask", torch.ones_like(batch["input_ids"])).flatten().bool()
    ]
    for each, found in zip(examples, logits.split([len(d) for d in made]), strict=True):
        mask = torch.ones_like(each["input_ids"])
        expected = stock(**each, attention_mask=mask, use_cache=False).logits[0, -len(found) :]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_pixels_of_several_sizes_are_padded_as_processors_pad_them():
    one, other = np.ones((2, 3, 4, 5), np.float32), np.ones((1, 3, 6, 4), np.float32)
    documents = [
        {"input_ids": [1], "pixel_values": one},
        {"input_ids": [2]},
        {"input_ids": [3], "pixel_values": other},
    ]
    batch = PackingCollator()(documents)
    assert batch["pixel_values"].shape == (3, 3, 6, 5)
    assert batch["pixel_values"].sum() == one.sum() + other.sum()


@pytest.mark.parametrize("form", ["numpy", "torch"])
@pytest.mark.parametrize("pictured", [((1,), (2,), (3,)), PICTURED, ((1, 7), (3, 9))], ids=str)
def test_datasets_that_format_pictures_as_arrays(form, pictured):
    """Pictures of one size in a document become one array, those of several an array of objects or
    a list."""
    examples = [
        {"input_ids": [*range(1, 4 + n)], "images": [picture(k) for k in of]}
        for n, of in enumerate(pictured)
    ]
    collate = PackingCollator(image_processor=PROCESSOR)
    wanted, formatted = collate(examples), with_pictures(examples).with_format(form)
    documents = [formatted[n] for n in range(len(examples))]
    of_data, of_list = (autopack.pack(given, 64, "sequential") for given in (formatted, documents))
    for given in (documents, [*of_data], of_list):
        found = collate(given)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    with refused("unusable-data", match="found pictures.*pass image_processor"):
        PackingCollator()(documents)


@pytest.mark.parametrize("overflow", ["split", "truncate"])
def test_documents_that_are_cut_keep_no_pictures(overflow):
    examples = [{"input_ids": [1] * n, "images": [picture(n)]} for n in (3, 9)]
    with refused(
        "unusable-data",
        match="1 documents are cut, and their 'images' are not; use overflow='drop'",
    ):
        autopack.pack(examples, 8, overflow=overflow)
    assert len(autopack.pack(examples, 8, overflow=overflow, drop_columns=["images"])) >= 1
    with refused("unusable-data", match="9 tokens and \\['images'\\], which are not cut with them"):
        PackingCollator(max_length=8, overflow="truncate", image_processor=PROCESSOR)(examples)
