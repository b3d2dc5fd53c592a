"""FSMT: both halves on documents alone, whatever such a call may bring; what other types have, too,
is in test_packed_rows.py."""

import pytest
import torch

import autopack
from tests.encoder_decoder.pairs import LOGITS, Pairs, build, covered, worst
from tests.engine import LEAK
from tests.support.refusals import refused

pytestmark = covered


def drawn():
    model = build("fsmt")
    return Pairs.for_model(model), model


@pytest.mark.parametrize("use_cache", [None, False])
@torch.no_grad()
def test_without_labels_it_hides_later_tokens_where_stock_does(use_cache):
    """Stock makes no mask where it may fill a cache: a document without labels gets something else
    than with them."""
    pairs, model = drawn()
    options = {"labels": None} if use_cache is None else {"labels": None, "use_cache": use_cache}
    wanted = [model(**{**call, **options}).logits[0] for call in pairs.each()]
    with_labels = [model(**call).logits[0] for call in pairs.each()]
    autopack.enable(model, verify=False)
    found = pairs.of("one_row", model(**{**pairs.one_row(), **options}).logits)
    assert worst(found, wanted) < LOGITS
    changed = worst(with_labels, wanted)
    assert changed > LEAK if use_cache is None else changed < LOGITS


def test_the_audit_finds_it_exact_whatever_its_cache_hides():
    _, model = drawn()
    assert model.config.use_cache
    autopack.enable(model, verify=False)
    report = autopack.audit(model)
    assert report.exact, report
    assert "use_cache=False" in report.notes["documents alone"]


def test_tokens_that_it_would_take_from_the_encoder_are_refused():
    _, model = drawn()
    autopack.enable(model, verify=False)
    with refused("decoder-tokens"):
        model(**Pairs.draw().one_row())
