"""Packed rows on their way through a trainer, which drops what its model does not name, and documents with it."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments, default_data_collator

import autopack
from autopack import tiny
from autopack.integrations.boundaries import what_is_lost
from tests.packing.test_pack import sft_trainer
from tests.support.refusals import refused

pytestmark = pytest.mark.usefixtures("nothing_left_behind")
CAPACITY = 40
UNNAMED = ["bloom", "mamba", "mpt", "rwkv", "falcon_mamba"]
"""Types whose forward does not name position_ids."""
ROUNDING = 1e-5


def _documents(count=24, **columns):
    draw = np.random.default_rng(0)
    made = [{"input_ids": draw.integers(3, 90, size=int(n)).tolist()} for n in draw.integers(4, 15, size=count)]
    return [{**row, **{name: make(row["input_ids"]) for name, make in columns.items()}} for row in made]


def _rows(kind="dataset", **columns):
    data = Dataset.from_list(_documents(**columns))
    return autopack.pack(data if kind == "dataset" else data.to_iterable_dataset(), CAPACITY)


def _model(model_type):
    model = tiny.build(model_type).train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


def _trainer(model, tmp_path, rows, kind=Trainer, arguments=TrainingArguments, **given):
    options = {"remove_unused_columns": given.pop("keep", None) is None}
    args = arguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=1,
        max_steps=1,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
        **options,
    )
    return kind(model, args, train_dataset=rows, **({"data_collator": autopack.PackingCollator()} | given))


def _first_loss(trainer):
    trainer.train()
    return trainer.state.log_history[0]["loss"]


def _alone(model, trainer, rows):
    """The loss of the documents alone of the row that the trainer sees first."""
    row = next(iter(trainer.get_train_dataloader()))["input_ids"][0].tolist()
    lengths = next(found["seq_lengths"] for found in rows if list(found["input_ids"]) == row)
    losses, targets = [], [n - 1 for n in lengths]
    for ids in torch.tensor(row).split(list(lengths)):
        losses.append(model(input_ids=ids[None], labels=ids[None], use_cache=False).loss.item())
    return sum(loss * n for loss, n in zip(losses, targets, strict=True)) / sum(targets)


@pytest.mark.parametrize("kind", ["dataset", "stream"])
@pytest.mark.parametrize("model_type", [*UNNAMED, "llama"])
class TestBoundaries:
    def test_an_enabled_trainer_keeps_them(self, model_type, kind, tmp_path):
        model, rows = _model(model_type), _rows(kind)
        expected = _alone(model, _trainer(model, tmp_path, rows, keep=True), rows)
        trainer = _trainer(model, tmp_path, rows)
        with autopack.enable(trainer) as handle:
            assert _first_loss(trainer) == pytest.approx(expected, rel=ROUNDING)
            assert "data keep seq_lengths" in repr(handle)

    def test_an_enabled_model_in_a_trainer_that_drops_them(self, model_type, kind, tmp_path):
        model, rows = _model(model_type), _rows(kind)
        expected = _alone(model, _trainer(model, tmp_path, rows, keep=True), rows)
        trainer = _trainer(model, tmp_path, rows)
        with autopack.enable(model):
            if model_type == "llama":
                assert _first_loss(trainer) == pytest.approx(expected, rel=ROUNDING)
                return
            with refused("trainer-loses-documents", match=r"Trainer drops .*position_ids.*enable\(trainer\)"):
                trainer.train()
        assert abs(_first_loss(_trainer(model, tmp_path, rows)) - expected) > 1e-3  # what would have been trained on


def test_evaluation_is_looked_at_too(tmp_path):
    model, rows = _model("bloom"), _rows()
    trainer = _trainer(model, tmp_path, None, eval_dataset=rows)
    with autopack.enable(model), refused("trainer-loses-documents", match="Trainer drops"):
        trainer.evaluate()
    with autopack.enable(trainer):
        assert trainer.evaluate()["eval_loss"] > 0


def test_a_collator_that_takes_rows_for_documents(tmp_path):
    model, rows = _model("llama"), _rows()
    trainer = _trainer(model, tmp_path, rows, data_collator=DataCollatorWithFlattening())
    with refused("trainer-loses-documents", match="DataCollatorWithFlattening makes one document of a row of"):
        autopack.enable(trainer)
    assert not autopack.is_enabled(model)


def test_rows_that_begin_with_long_documents(tmp_path):
    """Those of a plan do: many of one document, and then all others."""
    long = [{"input_ids": [*range(3, 43)]}] * 40
    rows = autopack.pack(Dataset.from_list([*long, *_documents()]), CAPACITY)
    assert {len(row["seq_lengths"]) for row in rows.select(range(40))} == {1}
    model = _model("bloom")
    trainer = _trainer(model, tmp_path, rows)
    assert "Trainer drops" in what_is_lost(trainer)
    few = rows.select([*range(40), 40])
    assert "Trainer drops" in what_is_lost(_trainer(model, tmp_path, few))
    flattened = _trainer(_model("llama"), tmp_path, rows, data_collator=DataCollatorWithFlattening())
    assert "makes one document" in what_is_lost(flattened)


def test_every_trainer_of_a_model_is_looked_at(tmp_path):
    """One may stand where another stood in memory."""
    model, rows = _model("bloom"), _rows()
    with autopack.enable(model):
        for _ in range(3):
            _first_loss(_trainer(model, tmp_path, rows, keep=True))
            with refused("trainer-loses-documents", match="Trainer drops"):
                _trainer(model, tmp_path, rows).train()
        copied = copy.deepcopy(model)
        autopack.disable(copied)


def test_a_collator_that_takes_no_row_alone(tmp_path):
    def pairs(examples):
        if len(examples) < 2:
            raise ValueError("wanted pairs")
        return default_data_collator(examples)

    trainer = _trainer(_model("bloom"), tmp_path, _rows(), data_collator=pairs)
    assert "Trainer drops" in what_is_lost(trainer)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("model_type", ["llama", "bloom"])
def test_trls_collator_takes_rows_for_documents(model_type, tmp_path):
    model, rows = _model(model_type), _rows()
    arguments = _trainer(model, tmp_path, rows).args
    trainer = sft_trainer(model=model, args=arguments, train_dataset=rows)
    with refused("trainer-loses-documents", match="makes one document of a row of"):
        autopack.enable(trainer)
    with autopack.enable(model), refused("trainer-loses-documents", match="makes one document of a row of"):
        trainer.train()
    expected = _alone(model, _trainer(model, tmp_path, rows, keep=True), rows)
    trainer = sft_trainer(model=model, args=arguments, train_dataset=rows, data_collator=autopack.PackingCollator())
    with autopack.enable(trainer):
        assert _first_loss(trainer) == pytest.approx(expected, rel=ROUNDING)


def test_what_enable_has_kept_is_given_back(tmp_path):
    model, rows = _model("bloom"), _rows()
    trainer = _trainer(model, tmp_path, rows)
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
            return autopack.PackingCollator()(examples)

    trainer = _trainer(_model("llama"), tmp_path, _rows(), data_collator=Draws())
    before = random.getstate(), np.random.get_state()[2], torch.get_rng_state()
    assert what_is_lost(trainer) is None
    assert random.getstate() == before[0]
    assert np.random.get_state()[2] == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])


def test_data_without_documents_are_nobodys_business(tmp_path):
    rows = Dataset.from_list([{"input_ids": row["input_ids"], "source": "web"} for row in _documents()])
    trainer = _trainer(_model("llama"), tmp_path, rows)
    with autopack.enable(trainer) as handle:
        assert not handle.kept
        assert _first_loss(trainer) > 0


def test_padding_that_positions_stand_still_at_is_no_document(tmp_path):
    """Such data are ordinary, and the collator pads them further."""
    rows = [{"input_ids": ids, "attention_mask": [0, 0, *[1] * (len(ids) - 2)]} for ids in map(_ids, _documents())]
    rows = [{**row, "position_ids": [0, 0, *range(len(row["input_ids"]) - 2)]} for row in rows]
    trainer = _trainer(_model("llama"), tmp_path, Dataset.from_list(rows), data_collator=default_data_collator)
    assert what_is_lost(trainer) is None


@pytest.mark.parametrize(
    "rows",
    [
        {"a": 1},
        [(1, 2)],
        [{"text": "a"}],
        [{"input_ids": [1], "seq_lengths": 1}],
        [{"input_ids": "abc", "seq_idx": [0, 1]}],
        [],
    ],
)
def test_data_of_any_form_are_left_to_whoever_loads_them(rows, tmp_path):
    trainer = _trainer(_model("llama"), tmp_path, None)
    trainer.train_dataset = rows
    assert what_is_lost(trainer) is None


def _ids(row):
    return row["input_ids"]


def test_rows_that_trl_has_cut_are_named_so():
    rows = _rows()
    with refused("unusable-data", match=r"was the row cut to 20 tokens\? TRL's SFTConfig"):
        autopack.PackingCollator()([{**rows[0], **{k: rows[0][k][:20] for k in ("input_ids", "position_ids")}}])


class TestTargets:
    """`completion_mask` and `assistant_masks` say which tokens are targets."""

    KEYS = ("completion_mask", "assistant_masks")

    @staticmethod
    def _last_two(ids):
        return [0] * (len(ids) - 2) + [1, 1]

    @pytest.mark.parametrize("key", KEYS)
    @pytest.mark.parametrize("kind", ["dataset", "stream"])
    def test_packing_makes_them_labels(self, key, kind):
        rows = list(_rows(kind, **{key: self._last_two}))
        assert key not in rows[0]
        for row in rows:
            ends = np.cumsum(row["seq_lengths"])
            wanted = sorted({*(ends - 1), *(ends - 2)})
            assert np.flatnonzero(np.asarray(row["labels"]) != -100).tolist() == wanted
            assert np.asarray(row["labels"])[wanted].tolist() == np.asarray(row["input_ids"])[wanted].tolist()

    def test_labels_that_are_there_stay(self):
        rows = _rows(completion_mask=self._last_two, labels=list)
        assert "completion_mask" in rows.column_names
        for row in rows:
            starts = np.cumsum(row["seq_lengths"]) - row["seq_lengths"]
            wanted = np.array(row["input_ids"])
            wanted[starts] = -100
            assert row["labels"] == wanted.tolist()

    @pytest.mark.parametrize("key", KEYS)
    def test_a_trainer_that_drops_them(self, key, tmp_path):
        model, data = _model("llama"), Dataset.from_list(_documents(**{key: self._last_two}))
        trainer = _trainer(model, tmp_path, data)
        assert (next(iter(trainer.get_train_dataloader()))["labels"] != -100).sum() > 2  # the prompt is trained on
        with autopack.enable(model), refused("trainer-loses-documents", match=f"drops {key} of its data"):
            trainer.train()
        with autopack.enable(trainer) as handle:
            assert handle.kept == (key,)
            assert (next(iter(trainer.get_train_dataloader()))["labels"] != -100).sum() == 2

    def test_weights_count_them(self):
        data = Dataset.from_list(_documents(completion_mask=self._last_two))
        for row in autopack.pack(data, CAPACITY):
            weights = autopack.PackingCollator(loss_weights="document")([row])["loss_weights"]
            assert (weights > 0).sum() == 2 * len(row["seq_lengths"])
