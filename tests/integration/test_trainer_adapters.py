"""A trainer of another library is one adapter: which models, data and columns, and what its loss makes of a row."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import datasets
import torch

import autopack
from autopack.enabling import trainer_logs
from autopack.integrations import trainers
from autopack.integrations.trainers import TRANSFORMERS, TrainerAdapter, adapter_of
from tests.conftest import FLOAT64, alone_loss, llama, token_ids
from tests.support.refusals import refused

LENGTHS = (5, 9, 3)
IDS = token_ids(1, sum(LENGTHS))


class Loop:
    """A trainer that shares no name with transformers' own: `net`, `rows`, `make_batch`, `one_step`."""

    def __init__(self, net: Any, rows: Any, make_batch: Any, picky: bool = True):
        self.net, self.rows, self.make_batch = net, rows, make_batch
        self.args = SimpleNamespace(picky=picky)
        self._wanted: list[str] | None = None

    def _look(self) -> None:
        self._wanted = self._wanted or ["input_ids", "labels", "attention_mask"]

    def one_step(self) -> torch.Tensor:
        rows = [dict(row) for row in self.rows]
        if self.args.picky:
            self._look()
            rows = [{name: value for name, value in row.items() if name in self._wanted} for row in rows]
        return self.net(**self.make_batch(rows)).loss


LOOP = TrainerAdapter(
    "Loop",
    __name__,
    seen_in="these tests",
    model="net",
    data=("rows",),
    collator="make_batch",
    steps=("one_step",),
    columns="_wanted",
    find_columns="_look",
    drops="picky",
)


def rows() -> datasets.Dataset:
    return datasets.Dataset.from_list(
        [{"input_ids": IDS[0].tolist(), "labels": IDS[0].tolist(), "seq_lengths": [*LENGTHS]}]
    )


def loop(collator: Any = None) -> Loop:
    return Loop(llama().train(), rows(), collator or autopack.PackingCollator())


def test_another_trainer_is_one_adapter(monkeypatch):
    monkeypatch.setattr(trainers, "ADAPTERS", [LOOP, *trainers.ADAPTERS])
    trainer = loop()
    expected = alone_loss(llama().train(), IDS, LENGTHS)
    with autopack.enable(trainer) as handle:
        assert list(handle.handles) == ["net"]
        assert handle.kept == ("seq_lengths",)
        assert abs(trainer.one_step() - expected) < FLOAT64
    assert trainer._wanted is None
    assert not autopack.is_enabled(trainer.net)


def test_what_it_loses_is_found(monkeypatch):
    monkeypatch.setattr(trainers, "ADAPTERS", [LOOP, *trainers.ADAPTERS])
    trainer = loop(lambda rows: {name: torch.tensor([row[name] for row in rows]) for name in ("input_ids", "labels")})
    with refused("trainer-loses-documents", match="Loop drops seq_lengths of its packed rows"):
        autopack.enable(trainer)
    assert not autopack.is_enabled(trainer.net)


def test_a_loss_that_adds_up_rows_is_said_in_the_adapter(monkeypatch):
    monkeypatch.setattr(trainers, "ADAPTERS", [replace(LOOP, adds_up_rows=True), *trainers.ADAPTERS])
    trainer = loop()
    with autopack.enable(trainer), refused("trainer-loses-documents", match="Loop adds up the log-probabilities"):
        trainer.one_step()


def test_without_the_adapter_documents_reach_each_other():
    """The model is found by its attribute, and nobody sees to the columns."""
    trainer = loop()
    expected = alone_loss(llama().train(), IDS, LENGTHS)
    with autopack.enable(trainer) as handle:
        assert isinstance(handle, autopack.Handle)
        assert abs(trainer.one_step() - expected) > 1e-3


def test_kinds_are_told_by_class_and_package():
    def made(name: str, module: str, *bases: type) -> Any:
        return type(name, bases, {"__module__": module})()

    plain = made("Trainer", "transformers.trainer")
    assert adapter_of(plain) is TRANSFORMERS
    assert adapter_of(made("Mine", "mine", type(plain))) is TRANSFORMERS
    dpo = adapter_of(made("DPOTrainer", "trl.trainer.dpo_trainer", type(plain)))
    assert dpo is not None
    assert (dpo.adds_up_rows, dpo.columns) == (True, "_signature_columns")
    assert adapter_of(made("Trainer", "transformers.trainers")) is None
    assert adapter_of(made("DPOTrainer", "trlx", type(plain))) is TRANSFORMERS
    assert adapter_of(llama()) is None
    assert not trainer_logs.logs_packing(loop())
