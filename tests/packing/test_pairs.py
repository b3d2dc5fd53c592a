"""Pairs before they are trained: planned by the cost of both sequences, measured as their collator cuts them."""

import numpy as np
import pytest
import trl

import autopack
from autopack.packing import PackingCollator, pair_lengths
from tests.packing.batches import KINDS, of_kind
from tests.packing.preference import dpo, pairs
from tests.support.refusals import refused

# Lengths


@pytest.mark.parametrize("most", [None, 15, 1])
def test_lengths_are_those_of_batches(most, tmp_path):
    trainer = dpo(tmp_path, max_length=10_000)
    trainer.data_collator.max_length = most
    data = trainer.train_dataset
    found = pair_lengths(data, trainer.data_collator)
    batch = trainer.data_collator([*data])
    assert found.dtype == np.int64
    assert found.tolist() == batch["attention_mask"].sum(dim=1).view(2, -1).sum(dim=0).tolist()
    order = [*range(len(data))][::-2]
    assert (pair_lengths(data.select(order), trainer.data_collator) == found[order]).all()
    assert (pair_lengths([*data], trainer.data_collator) == found).all()
    transformed = data.with_transform(lambda rows: {name: rows[name] for name in rows if name.endswith("_ids")})
    assert (pair_lengths(transformed, trainer.data_collator) == found).all()
    # A collator may hide where it cuts.
    assert (pair_lengths(data, lambda examples: trainer.data_collator(examples)) == found).all()


def test_a_prompt_counts_once_where_a_model_computes_it_once(tmp_path):
    trainer = dpo(tmp_path)
    apart, once = (pair_lengths(trainer.train_dataset, trainer.data_collator, shared) for shared in (False, True))
    assert (apart - once).tolist() == [len(ids) for ids in trainer.train_dataset["prompt_ids"]]
    data = [{"chosen_ids": [1, 2, 3, 4], "rejected_ids": [1, 2, 9]}, {"chosen_ids": [5], "rejected_ids": [6, 5]}]
    assert pair_lengths(data, REWARDS, shared=True).tolist() == [5, 3]


REWARDS = trl.trainer.reward_trainer.DataCollatorForPreference(pad_token_id=0)


@pytest.mark.parametrize(
    ("data", "collator", "code", "words"),
    [
        (lambda data: pairs(), None, "pair-sequences", "pairs 0 to .* makes no batch of them .*train_dataset"),
        (lambda data: [{"images": [], "prompt": "a"}], len, "pair-sequences", "makes 0 sequences of 1 pairs"),
        (lambda data: data.to_iterable_dataset(), None, "no-examples", "found IterableDataset"),
        (lambda data: data.select([]), None, "no-examples", "found an empty data set"),
        (lambda data: data, PackingCollator(), "pair-sequences", "PackingCollator makes no batch of them"),
        (lambda data: data, lambda examples: {"input_ids": examples}, "pair-sequences", "<lambda> makes 0 sequences"),
        (
            lambda data: [{"chosen_ids": [1], "rejected_ids": [2]}, {"chosen_ids": [1], "rejected_ids": []}],
            REWARDS,
            "unusable-data",
            "pair 1: found no tokens in its rejected sequence",
        ),
    ],
)
def test_refused_lengths(data, collator, code, words, tmp_path):
    trainer = dpo(tmp_path)
    with refused(code, match=words):
        pair_lengths(data(trainer.train_dataset), collator or trainer.data_collator)


# Pairs are no documents


TOKENS = [{"chosen_ids": [1, 2], "rejected_ids": [3, 4]}] * 2
MIXED = [{"input_ids": [5, 6], "chosen": "good", "rejected": "bad"}] * 2
LEGACY = [{"prompt_input_ids": [1], "chosen_input_ids": [1, 2], "rejected_input_ids": [1, 3]}] * 2


@pytest.mark.parametrize("examples", [TOKENS, MIXED, LEGACY, [dict(pair) for pair in pairs(2)]])
def test_pairs_are_no_documents_unless_they_are_named(examples):
    with refused("pairs-are-no-documents", match=r"example 0, found 'chosen.*pair_lengths.*both in drop_keys"):
        PackingCollator()(examples)
    for kind in KINDS:
        with refused("pairs-are-no-documents", match=r"found 'chosen.*pair_lengths.*both in drop_columns"):
            list(autopack.pack(of_kind(examples, kind), 8))
    names = [name for name in examples[0] if name.startswith(("chosen", "rejected"))]
    collate = PackingCollator(drop_keys=names)
    if examples is MIXED:
        assert collate(examples)["input_ids"].tolist() == [[5, 6, 5, 6]]
        assert autopack.pack(examples, 8, drop_columns=names)[0]["input_ids"] == [5, 6, 5, 6]
        return
    for call in (collate, lambda given: autopack.pack(given, 8, drop_columns=names)):
        with refused("unusable-data", match="tokenize first"):
            call(examples)
