"""The code of the documentation, run as it stands there, page by page; docs/packing.md has
tests/docs/test_recipes.py.

One list, `PAGES`, says what the blocks of each page, or section of it, take for granted. A block
that no test runs has to say why."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from transformers import PreTrainedModel

import autopack
from autopack import registry, tiny
from tests.conftest import positions
from tests.packing.batches import WORDS, arguments, loss_alone, tokenizer
from tests.support import pages

pytestmark = pytest.mark.usefixtures("nothing_left_behind")
ELSEWHERE = {
    "packing.md": "tests/docs/test_recipes.py",
    "losses.md#every-document-alike": "tests/docs/test_recipes.py",
}
"""Pages, and sections of pages, whose blocks other tests run, one by one."""
NOT_RUN = {
    "it audits 187 models, which takes minutes": 1,
    "it is a file of tests, run by tests/auditing/test_testing.py": 1,
}
"""Why blocks are not run, and how many for each reason: what is added to a page is added here."""
ROUNDING = 1e-4
WITHIN = 0.3
"""Numbers that a page shows may be off by so much: those of other machines, releases and
kernels."""


@dataclass(frozen=True)
class Page:
    """What the blocks of a page take for granted, what stands for what is too large, and what holds
    afterwards."""

    there: Callable[[], dict[str, Any]] = dict
    instead: Mapping[str, str] = field(default_factory=dict)
    holds: Callable[[dict[str, Any]], bool] = lambda names: True
    needs: tuple[str, ...] = ()
    anew: bool = False
    """Whether every block begins anew, and what holds is asked after each."""


def steps():
    from tests.steps.steps_of import DOCUMENTS, texts, trainer

    made, batches = (
        trainer("llama", texts),
        [texts(DOCUMENTS[first : first + 4]) for first in (0, 4)],
    )
    optimizer = torch.optim.SGD(made.model.parameters(), lr=1e-3)
    return {
        "autopack": autopack,
        "trainer": made,
        "model": made.model,
        "steps": [batches],
        "optimizer": optimizer,
    }


def audited():
    from compat.museum.data import _trainer

    return {"torch": torch, "trainer": _trainer.trainer()}


def sentences(count=16):
    draw = random.Random(0)
    return [" ".join(draw.choices(WORDS, k=draw.randint(3, 30))) for _ in range(count)]


def examples():
    return [{"input_ids": tokenizer()(text)["input_ids"]} for text in sentences()]


def llama():
    return tiny.build("llama", attn_implementation="sdpa", max_position_embeddings=512)


def folders():
    """A model, a tokenizer and data in the working directory, as scripts load them."""
    for written in (llama(), tokenizer()):
        written.save_pretrained("path/to/model")
    texts = sentences()
    datasets.Dataset.from_dict({"text": texts}).to_json("train.jsonl")
    pairs = zip(texts[::2], texts[1::2], reversed(texts[::2]), strict=True)
    names = ("prompt", "chosen", "rejected")
    datasets.Dataset.from_list([dict(zip(names, pair, strict=True)) for pair in pairs]).to_json(
        "pairs.jsonl"
    )
    return {"examples": examples()}


def loop():
    """What a loop has: a model, a batch of packed rows, and data to make others of."""
    data = examples()
    return {
        "autopack": autopack,
        "torch": torch,
        "model": llama().train(),
        "dataset": data,
        "lengths": [len(each["input_ids"]) for each in data],
        "micro_batches": [data[:3], data[3:10], data[10:]],
        "batch": autopack.PackingCollator()(data[:4]),
    }


def as_alone(names):
    """Whether the loss of a block, if it has one, is that of the batch's documents alone."""
    return (
        "loss" not in names
        or abs(names["loss"].item() - loss_alone(llama(), examples()[:4]).item()) < ROUNDING
    )


def one_process():
    """What a loop has, and a process group of this process alone; test_processes.py has more of
    them."""
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group(
            "gloo", rank=0, world_size=1, store=torch.distributed.HashStore()
        )
    there = loop()
    return there | {
        "rows": there["batch"],
        "group": torch.distributed.group.WORLD,
        "rank": 0,
        "ranks": 1,
    }


def encoder():
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Pooling, Transformer

    tokenizer().save_pretrained("tower")
    tiny.build("bert", task="masked-lm", pad_token_id=0).base_model.save_pretrained("tower")
    modules = [Transformer("tower"), Pooling(32)]
    SentenceTransformer(modules=modules, device="cpu").save("path/to/encoder")
    return {"sentences": sentences()}


def padded_batch():
    ids = torch.tensor([[5, 6, 7, 8], [9, 10, 0, 0]])
    mask = (ids > 0).long()
    return loop() | {"ids": ids, "mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def classifier():
    from transformers import AutoModelForSequenceClassification, Trainer

    tiny.build("llama", task="sequence-classification", pad_token_id=0).save_pretrained(
        "path/to/model"
    )
    data = [each | {"labels": number % 2} for number, each in enumerate(examples())]
    return {
        "AutoModelForSequenceClassification": AutoModelForSequenceClassification,
        "Trainer": Trainer,
        "args": arguments(Path("out"), max_steps=2),
        "dataset": datasets.Dataset.from_list(data),
        "autopack": autopack,
    }


def with_media(model, kind, placeholder, **options):
    """A row of two documents with a medium each, which is no target."""
    from autopack.tiny import images, media_rows, sounds

    make = {"image": images.document, "sound": sounds.document}[kind]
    documents = [make(model, (4, kind, 3), seed=seed, **options) for seed in range(2)]
    row = media_rows.row(model, documents)
    media = {}
    for document in documents:
        for name, value in document.images[0].items():
            media.setdefault(name, []).append(value)
    return {
        "autopack": autopack,
        "torch": torch,
        "model": model,
        "ids": row["input_ids"],
        "types": row.get("mm_token_type_ids"),
        "positions": positions([len(document) for document in documents]),
        "media": media,
        "labels": row["input_ids"].masked_fill(row["input_ids"] == placeholder, -100),
    }


def pictures():
    """A row with pictures, and examples with pictures as a processor leaves them."""
    from tests.multimodal.models import with_images
    from tests.packing.test_images import PROCESSOR, example

    model = with_images("qwen2_vl")
    there = with_media(model, "image", model.config.image_token_id)
    pixels, grids = (there["media"][name] for name in ("pixel_values", "image_grid_thw"))
    found = [example(model, number) for number in range(3)]
    return there | {"pixels": pixels, "grids": grids, "processor": PROCESSOR, "examples": found}


def recordings():
    """A row with sounds of one length."""
    from tests.multimodal.test_sounds import with_sounds

    model = with_sounds("qwen3_asr")
    there = with_media(model, "sound", model.config.audio_token_id, frames=22)
    features, masks = (there["media"][name] for name in ("input_features", "input_features_mask"))
    return there | {"features": features, "masks": masks}


def halves():
    """An encoder-decoder, which the page takes for enabled, and the row that its comments show."""
    model = tiny.build("t5", task="seq2seq")
    autopack.enable(model)
    return {
        "autopack": autopack,
        "model": model,
        "ids": torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12, 13, 0]]),
        "segments": torch.tensor([[1, 1, 1, 2, 2, 3, 3, 3, 3, 0]]),
        "labels": torch.tensor([[20, 21, 22, 23, 24, 25, -100, -100]]),
        "label_segments": torch.tensor([[1, 1, 2, 2, 2, 3, 0, 0]]),
    }


def two_steps(names):
    """Return True if the last trainer of a page has trained for its two steps."""
    return names["trainer"].state.global_step == 2


QUIET = {"max_steps=2)": "max_steps=2, use_cpu=True, disable_tqdm=True)"}
TRL = {"max_steps=2)": "max_steps=2, use_cpu=True, bf16=False, disable_tqdm=True)"}

PAGES = {
    "README.md": Page(holds=lambda names: names["loss"].item() > 0),
    "tutorial.md": Page(holds=lambda names: abs(names["packed"] - names["single"]) < ROUNDING),
    "leaks.md": Page(),
    "families.md": Page(holds=lambda names: names["report"].exact),
    "design.md": Page(holds=lambda names: names["logits"].shape[:2] == (1, 9)),
    "testing.md": Page(audited, holds=lambda names: not names["report"].exact),
    "steps.md#steps-by-tokens": Page(
        steps, holds=lambda names: "autopack: Trainer" in repr(names["handle"])
    ),
    "unpadding.md": Page(
        padded_batch, holds=lambda names: names["outputs"].logits.shape[:2] == (2, 4)
    ),
    "steps.md#rows-that-begin-alike": Page(
        padded_batch, holds=lambda names: names["logits"].shape[:2] == (2, 4)
    ),
    "distributed.md#engines": Page(one_process, holds=as_alone),
    "distributed.md#rows-that-ranks-share": Page(
        one_process,
        holds=lambda names: abs(names["model"](**names["rows"]).loss - names["loss"]) < ROUNDING,
    ),
    "losses.md#how-a-call-declares-its-documents": Page(loop),
    "losses.md#what-a-mean-is-taken-over": Page(loop, holds=as_alone, anew=True),
    "losses.md#heads": Page(classifier, needs=("accelerate",)),
    "losses.md#encoder-decoders": Page(halves),
    "media.md#a-packed-call": Page(
        pictures, holds=lambda names: names["batch"]["image_grid_thw"].shape[1] == 3, needs=("PIL",)
    ),
    "media.md#sounds": Page(recordings),
    "trainers.md#transformers-trainer": Page(folders, QUIET, two_steps, ("accelerate",)),
    "trainers.md#trl": Page(folders, TRL, two_steps, ("trl",)),
    "trainers.md#accelerate": Page(folders, needs=("accelerate",)),
    "trainers.md#lightning": Page(
        folders,
        {
            "logger=False": (
                'logger=False, accelerator="cpu", enable_progress_bar=False, '
                "enable_model_summary=False"
            )
        },
        lambda names: names["trainer"].global_step == 2,
        ("lightning",),
    ),
    "trainers.md#a-loop-of-your-own": Page(folders),
    "trainers.md#sentence-transformers": Page(
        encoder, QUIET, lambda names: len(names["vectors"]) == 16, ("sentence_transformers",)
    ),
    "trainers.md#lora-evaluation-generation": Page(loop, {}, as_alone, ("peft",), anew=True),
}


@pytest.fixture(name="in_a_folder")
def _in_a_folder(tmp_path, monkeypatch):
    """Pages write where they stand, register families and import what they wrote: all of that goes
    away again."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "_registered", [])
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    torch._dynamo.reset()


@pytest.mark.sampled(6)
@pytest.mark.parametrize("page", PAGES)
def test_a_page(page, in_a_folder):
    what = PAGES[page]
    for package in what.needs:
        pytest.importorskip(package)
    names = {}
    for block in pages.blocks(page):
        if block.reason is None:
            if what.anew or not names:
                disable_all(names)
                names |= {"__name__": "page", **what.there()}
            found = pages.run(block, names, what.instead)
            if block.printed is not None:
                assert pages.same_text(found, block.printed, WITHIN), f"{block} prints\n{found}"
            assert not what.anew or what.holds(names), block
    assert what.holds(names)
    disable_all(names)


@pytest.mark.parametrize("lacking", ['"ToyMixer": ROWS, ', ', "ToyPositions": RESTARTING'])
def test_a_family_that_names_too_little_is_refused(lacking, in_a_folder):
    """What docs/families.md says of its walk: a way that is missing cannot be trained on."""
    names = {"__name__": "page"}
    *before, last = pages.blocks("families.md")
    for block in before:
        pages.run(block, names, {lacking: ""})
    with pytest.raises(autopack.UnsupportedModel, match="it is not exact"):
        pages.run(last, names, {})


def disable_all(names):
    """Take back what the page enabled, as the end of its process would."""
    for value in names.values():
        for module in list(value.modules()) if isinstance(value, torch.nn.Module) else []:
            if isinstance(module, PreTrainedModel) and autopack.is_enabled(module):
                autopack.disable(module)
    names.clear()


def test_every_block_is_run_or_says_why_not():
    reasons = Counter()
    for block in (block for page in pages.pages() for block in pages.blocks(page)):
        known = [
            name
            for name in (*PAGES, *ELSEWHERE)
            if name in (block.page, f"{block.page}#{block.section}")
        ]
        assert len(known) == 1, f"{block} has Python code that no test runs"
        reasons.update([block.reason] if block.reason is not None else [])
    assert reasons == NOT_RUN


def test_no_fence_is_missed():
    """Negative control of the pattern: every fence of Python in the pages is a block."""
    for path in pages.DOCS.rglob("*.md"):
        fences = sum(line.strip() == "```python" for line in path.read_text().splitlines())
        assert len(list(pages.blocks(str(path.relative_to(pages.DOCS))))) == fences, path
