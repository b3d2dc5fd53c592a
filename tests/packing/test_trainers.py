"""Packed rows on their way through a trainer, which drops what its model does not name, and
documents with it."""

import copy
import random

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import DataCollatorWithFlattening, Trainer, default_data_collator

import autopack
from autopack.inspection.randomness import state_of
from autopack.integrations.boundaries import what_is_lost
from autopack.packing import PackingCollator
from tests.packing.batches import (
    KINDS,
    arguments,
    in_training,
    loss_alone,
    of_kind,
    pieces,
)
from tests.support.refusals import refused
from tests.support.trained import losses_of

pytestmark = pytest.mark.usefixtures("nothing_left_behind")
CAPACITY = 40
UNNAMED = ["bloom", "mamba", "mpt", "rwkv", "falcon_mamba"]
"""Types whose forward does not name position_ids."""
ROUNDING = 1e-5
STEP = {"per_device_train_batch_size": 1, "max_steps": 1}


def _documents(count=24, **columns):
    draw = np.random.default_rng(0)
    made = [
        {"input_ids": draw.integers(3, 90, size=int(n)).tolist()}
        for n in draw.integers(4, 15, size=count)
    ]
    return [
        {**row, **{name: make(row["input_ids"]) for name, make in columns.items()}} for row in made
    ]


def _rows(kind="Dataset", **columns):
    return autopack.pack(of_kind(_documents(**columns), kind), CAPACITY)


def _trainer(model, tmp_path, rows, kind=Trainer, keep=False, **given):
    args = arguments(tmp_path, remove_unused_columns=not keep, **STEP)
    return kind(model, args, train_dataset=rows, **({"data_collator": PackingCollator()} | given))


def _first_loss(trainer):
    trainer.train()
    return losses_of(trainer)[0]


def _alone(model, trainer, rows):
    """The loss of the documents alone of the row that the trainer sees first."""
    row = next(iter(trainer.get_train_dataloader()))["input_ids"][0]
    lengths = next(
        found["seq_lengths"] for found in rows if list(found["input_ids"]) == row.tolist()
    )
    return loss_alone(model, [part.tolist() for part in row.split(list(lengths))]).item()


@pytest.mark.parametrize("kind", ["Dataset", "stream"])
@pytest.mark.parametrize("model_type", [*UNNAMED, "llama"])
def test_enabled_trainers_keep_documents_and_others_that_drop_them_are_refused(
    model_type, kind, tmp_path
):
    rows = _rows(kind)

    def trainer(keep=False):
        return _trainer(in_training(model_type), tmp_path, rows, keep=keep)

    wanted = pytest.approx(_alone(in_training(model_type), trainer(keep=True), rows), rel=ROUNDING)
    keeping, dropping = trainer(), trainer()
    with autopack.enable(keeping) as handle:
        assert _first_loss(keeping) == wanted
        assert "data keep: seq_lengths" in repr(handle)
    with autopack.enable(dropping.model):
        if model_type == "llama":
            assert _first_loss(dropping) == wanted
            return
        with refused("trainer-loses-documents"):
            dropping.train()
    assert abs(_first_loss(trainer()) - wanted.expected) > 1e-3  # what would have been trained on


def test_evaluation_is_looked_at_too(tmp_path):
    model = in_training("bloom")
    trainer = _trainer(model, tmp_path, None, eval_dataset=_rows())
    with autopack.enable(model), refused("trainer-loses-documents"):
        trainer.evaluate()
    with autopack.enable(trainer):
        assert trainer.evaluate()["eval_loss"] > 0


def test_a_collator_that_takes_rows_for_documents(tmp_path):
    trainer = _trainer(
        in_training("llama"), tmp_path, _rows(), data_collator=DataCollatorWithFlattening()
    )
    with refused(
        "trainer-loses-documents", match="DataCollatorWithFlattening makes one document of a row of"
    ):
        autopack.enable(trainer)
    assert not autopack.is_enabled(trainer.model)


def test_rows_that_begin_with_long_documents(tmp_path):
    """Those of a plan do: many of one document, and then all others."""
    long = [{"input_ids": [*range(3, 43)]}] * 40
    rows = autopack.pack(Dataset.from_list([*long, *_documents()]), CAPACITY)
    assert {len(row["seq_lengths"]) for row in rows.select(range(40))} == {1}
    for data in (rows, rows.select([*range(40), 40])):
        assert "Trainer drops" in what_is_lost(_trainer(in_training("bloom"), tmp_path, data))
    flattened = _trainer(
        in_training("llama"), tmp_path, rows, data_collator=DataCollatorWithFlattening()
    )
    assert "makes one document" in what_is_lost(flattened)


def test_every_trainer_of_a_model_is_looked_at(tmp_path):
    """One may stand where another stood in memory."""
    model, rows = in_training("bloom"), _rows()
    with autopack.enable(model):
        for _ in range(3):
            _first_loss(_trainer(model, tmp_path, rows, keep=True))
            with refused("trainer-loses-documents"):
                _trainer(model, tmp_path, rows).train()
        copied = copy.deepcopy(model)
        autopack.disable(copied)


def test_a_collator_that_takes_no_row_alone(tmp_path):
    def pairs(examples):
        if len(examples) < 2:
            raise ValueError("wanted pairs")
        return default_data_collator(examples)

    trainer = _trainer(in_training("bloom"), tmp_path, _rows(), data_collator=pairs)
    assert "Trainer drops" in what_is_lost(trainer)


def test_what_enable_has_kept_is_given_back(tmp_path):
    trainer = _trainer(in_training("bloom"), tmp_path, _rows())
    before = trainer._signature_columns
    handle = autopack.enable(trainer)
    assert autopack.enable(trainer).kept == handle.kept == ("seq_lengths", "position_ids")
    autopack.disable(trainer)
    assert trainer._signature_columns is before
    assert what_is_lost(trainer)


def test_nothing_is_drawn_from_random_states(tmp_path):
    class Draws:
        def __call__(self, examples):
            random.random(), np.random.rand(), torch.rand(1)
            return PackingCollator()(examples)

    trainer = _trainer(in_training("llama"), tmp_path, _rows(), data_collator=Draws())
    before = state_of(trainer.model)
    assert what_is_lost(trainer) is None
    assert state_of(trainer.model) == before


def test_padding_that_positions_stand_still_at_is_no_document(tmp_path):
    """Such data are ordinary, and the collator pads them further."""
    rows = _documents()
    for row in rows:
        real = len(row["input_ids"]) - 2
        row |= {"attention_mask": [0, 0] + [1] * real, "position_ids": [0, 0, *range(real)]}
    trainer = _trainer(
        in_training("llama"), tmp_path, Dataset.from_list(rows), data_collator=default_data_collator
    )
    assert what_is_lost(trainer) is None


@pytest.mark.parametrize(
    "rows",
    [
        {"a": 1},
        [(1, 2)],
        [{"text": "a"}],
        [{"input_ids": [1], "seq_lengths": 1}],
        [{"input_ids": [1, 2], "source": "web"}],
        [{"input_ids": "abc", "seq_idx": [0, 1]}],
        [],
    ],
)
def test_data_of_any_form_are_left_to_whoever_loads_them(rows, tmp_path):
    trainer = _trainer(in_training("llama"), tmp_path, None)
    trainer.train_dataset = rows
    assert what_is_lost(trainer) is None


def _last_two(ids):
    return [0] * (len(ids) - 2) + [1, 1]


@pytest.mark.parametrize("key", ["completion_mask", "assistant_masks"])
class TestTargets:
    """`completion_mask` and `assistant_masks` say which tokens are targets."""

    @pytest.mark.parametrize("kind", KINDS)
    def test_packing_makes_them_labels_unless_some_are_there(self, key, kind):
        for row in _rows(kind, **{key: _last_two}):
            assert key not in row
            wanted = [[-100] * (len(ids) - 2) + ids[-2:] for ids in pieces(row)]
            assert pieces(row, "labels") == wanted
        for row in _rows(kind, **{key: _last_two, "labels": list}):
            assert pieces(row, key) == [_last_two(ids) for ids in pieces(row)]
            assert pieces(row, "labels") == [[-100, *ids[1:]] for ids in pieces(row)]

    def test_a_trainer_that_drops_them(self, key, tmp_path):
        model, data = in_training("llama"), Dataset.from_list(_documents(**{key: _last_two}))
        trainer = _trainer(model, tmp_path, data)
        # the prompt is trained on
        assert (next(iter(trainer.get_train_dataloader()))["labels"] != -100).sum() > 2
        with (
            autopack.enable(model),
            refused("trainer-loses-documents"),
        ):
            trainer.train()
        with autopack.enable(trainer) as handle:
            assert handle.kept == (key,)
            assert (next(iter(trainer.get_train_dataloader()))["labels"] != -100).sum() == 2
