"""A run of ten steps says at most three lines of ours, whatever model and trainer it has."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

import autopack
from autopack import tiny
from tests.integration.test_trainer_logs import trainer
from tests.support.dpo import preferences, tiny_tokenizer

pytestmark = pytest.mark.usefixtures("nothing_left_behind")
MOST = 3


class Mine(nn.Linear):
    """A layer of the user's own: exact, and proven."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return super().forward(states) * 1.0


class WithoutTwin(type(tiny.build("llama"))):  # type: ignore[misc]
    """A model that no twin can be made of: the very model is audited."""

    def __init__(self, config: Any, more: Any, other: Any):
        super().__init__(config)


def with_own_layer(model: Any) -> Any:
    held = model.model.layers[0].mlp
    mine = Mine(held.gate_proj.in_features, held.gate_proj.out_features, bias=False)
    mine.load_state_dict(held.gate_proj.state_dict())
    held.gate_proj = mine
    return model


def without_a_twin(model: Any) -> Any:
    model.__class__ = WithoutTwin
    return model


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("change", [lambda model: model, with_own_layer, without_a_twin])
def test_a_trainer_of_transformers(tmp_path, caplog, change, checkpointing):
    model = change(tiny.build("llama"))
    with caplog.at_level(logging.WARNING, "autopack"):
        run = trainer(tmp_path, model=model, max_steps=10, gradient_checkpointing=checkpointing)
        autopack.enable(run)
        run.train()
        autopack.disable(run)
    said = [record.getMessage() for record in caplog.records if record.name.startswith("autopack")]
    assert len(said) <= MOST, said
    assert len(said) == len(set(said)), "nothing is said twice"


@pytest.mark.parametrize("change", [lambda model: model, with_own_layer])
def test_dpo_with_the_defaults_of_trl(tmp_path, caplog, change):
    """Two models, tags for the model card, and a reference model."""
    with caplog.at_level(logging.WARNING, "autopack"):
        run = preferences(tmp_path, change(tiny.build("llama")))
        handle = autopack.enable(run)
        run.train()
        skipped = str(handle)
        autopack.disable(run)
    said = [record.getMessage() for record in caplog.records if record.name.startswith("autopack")]
    assert len(said) <= MOST, said
    assert len(said) == len(set(said)), "nothing is said twice"
    assert "packed inside" in skipped, "and padding is gained of both"


def packing(path: Any, strategy: str, **settings: Any) -> Any:
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
def test_packing_of_trl(tmp_path, caplog, strategy, settings, cut, whole):
    """Documents that it cuts are said to be lost, once; others are checked, and nothing is said."""
    with caplog.at_level(logging.WARNING, "autopack"):
        run = packing(tmp_path, strategy, **settings)
        handle = autopack.enable(run if whole else run.model)
        run.train()
        shown = repr(handle)
        autopack.disable(run)
    said = [record.getMessage() for record in caplog.records if record.name.startswith("autopack")]
    assert ["packing_strategy='wrapped'" in line for line in said] == [True] * cut
    assert ("packing_strategy='wrapped'" in shown) == (cut and whole)
    assert "skipped" not in shown
    assert strategy == "wrapped" or "checks in 4 calls, worst" in shown
