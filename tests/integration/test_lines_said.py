"""A run of ten steps says at most three lines of ours, whatever model and trainer it has."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopack
from autopack import tiny
from tests.integration.test_trainer_logs import trainer

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


def preferences(path: Path, model: Any, **settings: Any) -> Any:
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    tokenizer = tiny_tokenizer()
    words = [f"w{number}" for number in range(60)]
    texts = [" ".join(words[first : first + count]) for first, count in zip(range(0, 40, 2), range(3, 23), strict=True)]
    pairs = {"prompt": texts, "chosen": texts[::-1], "rejected": texts}
    options = {"output_dir": str(path), "max_steps": 10, "report_to": [], "disable_tqdm": True, "use_cpu": True}
    args = trl.DPOConfig(**options, per_device_train_batch_size=2, save_strategy="no", bf16=False, **settings)
    data = datasets.Dataset.from_dict(pairs)
    reference = copy.deepcopy(model)
    return trl.DPOTrainer(model=model, ref_model=reference, args=args, train_dataset=data, processing_class=tokenizer)


def tiny_tokenizer() -> Any:
    tokenizers = pytest.importorskip("tokenizers")
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3, **{f"w{number}": number + 4 for number in range(60)}}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="</s>", bos_token="<s>")


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
