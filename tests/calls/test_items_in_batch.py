"""`num_items_in_batch`, by which trainers have a loss divide its sum: some losses do, others take no notice of it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import autopack
from autopack import tiny
from autopack.layout.token_map import mean_loss
from autopack.mixers import alone
from tests.conftest import FLOAT32, positions

ROWS = ((5, 9, 6, 5), (2, 14, 4, 5))
HEEDING = ["llama", "bloom", "mamba", "reformer", "blt"]
UNHEEDING = ["xlnet", "cpmant"]
"""Types that compute their loss themselves, whatever a trainer says."""


def _losses(model: Any, parts: list[torch.Tensor], **items: Any) -> list[float]:
    return [model(input_ids=part, labels=_labels(part), use_cache=False, **items).loss.item() for part in parts]


def _labels(ids: torch.Tensor) -> torch.Tensor:
    """Without the first: a loss that compares within a column counts as many then as one that shifts."""
    labels = ids.clone()
    labels[:, 0] = -100
    return labels


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("model_type", [*HEEDING, *UNHEEDING])
def test_the_loss_is_what_documents_alone_have_with_it(model_type, as_tensor):
    model = tiny.build(model_type).eval()
    stock = copy.deepcopy(model)
    ids = tiny.tokens(model.config, 2, 25)
    parts = [part for row, lengths in zip(ids, ROWS, strict=True) for part in row[None].split(lengths, dim=1)]
    counts = [part.shape[1] - 1 for part in parts]
    number: Any = torch.tensor(3 * sum(counts)) if as_tensor else 3 * sum(counts)  # as with three micro-batches
    means, told = _losses(stock, parts), _losses(stock, parts, num_items_in_batch=number)
    mean = sum(loss * n for loss, n in zip(means, counts, strict=True)) / sum(counts)
    assert (told == means) == (model_type in UNHEEDING)
    expected = mean if model_type in UNHEEDING else sum(told)
    labels = torch.cat([_labels(part) for part in parts], dim=1).reshape(ids.shape)
    given = {"input_ids": ids, "labels": labels, "position_ids": positions(*ROWS)}
    with autopack.enable(model):
        found = model(**given, num_items_in_batch=number).loss.item()
        plain = model(**given).loss.item()
    assert abs(found / expected - 1) <= FLOAT32
    assert abs(plain / mean - 1) <= FLOAT32


@pytest.mark.parametrize("model_type", ["xlnet", "reformer"])
def test_the_auditor_finds_a_number_that_is_handed_on_to_every_share(model_type, monkeypatch):
    """Negative control: of parts of a batch each must be told its share of the number."""

    told = []

    def whole(arguments: dict[str, Any], count: int, total: int) -> dict[str, Any]:
        told[:] = [name for name in arguments if name == "num_items_in_batch"]
        return {name: arguments[name] for name in told}

    def summed_if_told(losses: list[Any], counts: list[int], device: Any) -> torch.Tensor:
        return torch.stack(losses).sum() if told else mean_loss(losses, counts, device)

    model = tiny.build(model_type)
    with autopack.enable(model):
        assert autopack.audit(model, modes=("default",)).exact
        monkeypatch.setattr(alone, "items_of_share", whole)
        if model_type == "xlnet":
            monkeypatch.setattr(alone, "mean_loss", summed_if_told)
        report = autopack.audit(model, modes=("default",))
    assert "loss" in report.labels
