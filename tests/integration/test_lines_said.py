"""A run of ten steps says at most three lines of ours, whatever model and trainer it has."""

import logging

import pytest

import autopack
from autopack import tiny
from tests.enabling.test_changed_models import replace_layer, without_twin
from tests.integration.test_trainer_logs import trainer
from tests.support.dpo import tiny_tokenizer

pytestmark = pytest.mark.usefixtures("nothing_left_behind")
MOST = 3


def usual():
    return tiny.build("llama")


def with_own_layer():
    """It is exact, and proven."""
    model = tiny.build("llama")
    replace_layer(model)
    return model


@pytest.fixture
def said(caplog):
    """What autopack has said."""
    caplog.set_level(logging.WARNING, "autopack")
    return lambda: [record.getMessage() for record in caplog.records if record.name.startswith("autopack")]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("make", [usual, with_own_layer, without_twin])
def test_a_trainer_of_transformers(tmp_path, said, make, checkpointing):
    run = trainer(tmp_path, model=make(), max_steps=10, gradient_checkpointing=checkpointing)
    with autopack.enable(run):
        run.train()
    assert len(said()) <= MOST, said()
    assert len(said()) == len(set(said())), "nothing is said twice"


def packing(path, strategy, **settings):
    """TRL's SFTTrainer, which packs texts of uneven length by a strategy of its own."""
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    texts = [" ".join(f"w{number}" for number in range(count)) for count in range(3, 27)]
    options = {"output_dir": str(path), "max_steps": 4, "report_to": [], "disable_tqdm": True, "use_cpu": True}
    settings = {"packing": True, **settings}
    args = trl.SFTConfig(**options, packing_strategy=strategy, max_length=32, bf16=False, **settings)
    data = datasets.Dataset.from_dict({"text": texts})
    return trl.SFTTrainer(tiny.build("llama"), args=args, train_dataset=data, processing_class=tiny_tokenizer())


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(
    ("strategy", "settings", "cut"),
    [("bfd", {}, False), ("bfd_split", {}, False), ("wrapped", {}, True), ("wrapped", {"packing": False}, False)],
)
def test_packing_of_trl(tmp_path, said, strategy, settings, cut, whole):
    """Documents that it cuts are said to be lost, once; others are checked, and nothing is said."""
    run = packing(tmp_path, strategy, **settings)
    with autopack.enable(run if whole else run.model) as handle:
        run.train()
        shown = repr(handle)
    assert ["packing_strategy='wrapped'" in line for line in said()] == [True] * cut
    assert ("packing_strategy='wrapped'" in shown) == (cut and whole)
    assert "skipped" not in shown
    assert strategy == "wrapped" or "checks in 4 calls, worst" in shown
