"""`num_items_in_batch`, by which trainers have a loss divide its sum: some losses do, others take no notice of it."""

from __future__ import annotations

import copy

import pytest
import torch

import autopack
from autopack import tiny
from autopack.mixers import alone
from tests.conftest import FLOAT32, positions
from tests.engine import mean_loss

ROWS = ((5, 9, 6, 5), (2, 14, 4, 5))
HEEDING = ["llama", "bloom", "mamba", "reformer", "blt"]
UNHEEDING = ["xlnet", "cpmant"]
"""Types that compute their loss themselves, whatever a trainer says."""


def _losses(model, parts, **items):
    return [model(input_ids=part, labels=_labels(part), use_cache=False, **items).loss.item() for part in parts]


def _labels(ids):
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
    number = torch.tensor(3 * sum(counts)) if as_tensor else 3 * sum(counts)  # as with three micro-batches
    means, told = _losses(stock, parts), _losses(stock, parts, num_items_in_batch=number)
    mean = mean_loss(means, counts)
    assert (told == means) == (model_type in UNHEEDING)
    expected = mean if model_type in UNHEEDING else sum(told)
    labels = torch.cat([_labels(part) for part in parts], dim=1).reshape(ids.shape)
    given = {"input_ids": ids, "labels": labels, "position_ids": positions(*ROWS)}
    with autopack.enable(model):
        found = model(**given, num_items_in_batch=number).loss.item()
        plain = model(**given).loss.item()
    assert abs(found / expected - 1) <= FLOAT32
    assert abs(plain / mean - 1) <= FLOAT32


def test_the_auditor_finds_a_number_that_is_handed_on_to_every_share(monkeypatch):
    """Negative control: of parts of a batch each must be told its share of the number."""

    def whole(arguments, count, total):
        return {name: arguments[name] for name in arguments if name == "num_items_in_batch"}

    model = tiny.build("reformer")
    with autopack.enable(model):
        assert autopack.audit(model, modes=("default",)).exact
        monkeypatch.setattr(alone, "items_of_share", whole)
        report = autopack.audit(model, modes=("default",))
    assert "loss" in report.labels
