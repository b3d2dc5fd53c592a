"""A kind of trainer is one adapter, which says what its loss makes of a row; kinds are told by
class and package."""

import transformers

import autopack
from autopack.integrations import trainers
from autopack.integrations.trainers import TrainerAdapter
from tests.conftest import llama
from tests.packing.test_trainers import _rows, _trainer
from tests.support.refusals import refused


class AddingUp(transformers.Trainer):
    """A trainer of another library, whose loss adds up the log-probabilities of a row."""


def test_a_loss_that_adds_up_rows_is_said_in_the_adapter(monkeypatch, tmp_path):
    adapter = TrainerAdapter("AddingUp", __name__, adds_up_rows=True)
    monkeypatch.setattr(trainers, "ADAPTERS", [adapter, *trainers.ADAPTERS])
    trainer = _trainer(llama().train(), tmp_path, _rows(), kind=AddingUp)
    with autopack.enable(trainer), refused("trainer-loses-documents"):
        trainer.train()
