"""Examples, and what is asked of every batch and every row, for the tests of packing."""

import json
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerFast, TrainingArguments

from autopack import tiny
from autopack.errors import InvalidPacking
from autopack.packing import PackingCollator
from tests.engine import IGNORED, mean_loss
from tests.subjects import without_dropout
from tests.support.trained import QUIET

ABC = [{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}, {"input_ids": [6, 7, 8, 9]}]
WORDS = [f"w{number}" for number in range(78)]
TABLES = json.loads(Path(__file__).with_name("collated.json").read_text())


def rows_of(table):
    """The rows of a table of collated.json, under all of its headings."""
    return [row for under in TABLES[table].values() for row in under]


def refused(examples, *parts, **options):
    """Want the collator to refuse these examples, with all of these parts in its message."""
    with pytest.raises(InvalidPacking) as error:
        PackingCollator(**options)(examples)
    for part in parts:
        assert part in str(error.value)


class Documents(Dataset):
    """Documents of these lengths, each of which begins with its own index."""

    def __init__(self, lengths):
        self.lengths = lengths

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        return {"input_ids": list(range(index, index + self.lengths[index]))}


KINDS = ("list", "Dataset", "stream")


def of_kind(made, kind):
    """These examples in a list, a dataset or a stream."""
    if kind == "list":
        return made
    data = pytest.importorskip("datasets").Dataset.from_list(made)
    return data.to_iterable_dataset() if kind == "stream" else data


def pieces(row, name="input_ids"):
    """A column of a packed row, cut into its documents."""
    assert sum(row["seq_lengths"]) == len(row["input_ids"])
    return [list(row[name][a:b]) for a, b in pairwise(accumulate(row["seq_lengths"], initial=0))]


def flan_like(count, seed=0):
    """Lognormal lengths with the mean of FLAN_20k, 471, clipped at 4096."""
    drawn = np.random.default_rng(seed).lognormal(np.log(471) - 0.5, 1.0, count)
    return np.clip(np.round(drawn), 1, 4096).astype(np.int64)


def documents_of(rows):
    """The tokens of all documents of packed rows."""
    return [document for row in rows for document in pieces(row)]


def documents_in(batch):
    """The documents of a packed or padded batch, as its positions and its mask tell them apart."""
    ids = batch["input_ids"]
    positions = batch.get("position_ids", torch.arange(ids.shape[1]).expand_as(ids)).flatten()
    real = batch.get("attention_mask", torch.ones_like(ids)).flatten().bool()
    starts = (positions == positions.min()).nonzero()[:, 0].tolist()
    parts = [ids.flatten()[a:b][real[a:b]].tolist() for a, b in pairwise([*starts, ids.numel()])]
    return [part for part in parts if part]


def tokenizer():
    """Of padding, an end and `WORDS`."""
    numbers = {word: number for number, word in enumerate(["<pad>", "<eos>", *WORDS])}
    made = Tokenizer(models.WordLevel(numbers, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


def arguments(folder, kind=TrainingArguments, **options):
    """The defaults of a trainer, but on the CPU, in float32 and quiet; it logs each step."""
    quiet = {**QUIET, "logging_steps": 1, "bf16": False, "dataloader_pin_memory": False}
    return kind(str(folder), **quiet | options)


def in_training(model_type):
    """A tiny model that is trained, and draws no dropout."""
    return without_dropout(tiny.build(model_type).train())


def loss_alone(model, documents, weights=None):
    """The mean loss over all targets of documents by themselves, or over documents with these
    weights."""
    losses, counts = [], []
    for document in documents:
        example = document if isinstance(document, dict) else {"input_ids": document}
        ids = torch.tensor([example["input_ids"]])
        labels = torch.tensor([example["labels"]]) if "labels" in example else ids
        if count := int((labels[:, 1:] != IGNORED).sum()):
            losses.append(model(input_ids=ids, labels=labels, use_cache=False).loss)
            counts.append(count)
    return mean_loss(losses, counts if weights is None else weights)
