"""Attention masks of four dimensions that the caller has prepared, beside positions that declare
documents."""

import pytest
import torch

import autopack
from autopack import tiny
from autopack.layout.packed import PackedLayout
from autopack.layout.prepared import agreement
from tests.conftest import (
    FLOAT64,
    LEAK,
    LENGTHS,
    alone,
    alone_loss,
    error,
    gradient_error,
    gradients,
    llama,
    positions,
    token_ids,
)
from tests.support.refusals import refused

IDS = token_ids(2)
ROWS = (LENGTHS, (20, 13))
POSITIONS = positions(*ROWS)
LAYOUT = PackedLayout.from_lengths([list(row) for row in ROWS])


def together():
    """Which tokens are of one document, (rows, 1, columns, columns)."""
    return (LAYOUT.seq_idx[:, :, None] == LAYOUT.seq_idx[:, None, :])[:, None]


def padded(seen):
    """The same, where the last document of the first row is padding that sees nothing."""
    seen = seen.clone()
    seen[0, :, -LENGTHS[-1] :] = False
    return seen


def hiding_by(number):
    """A form of masks that adds a number to the scores of what is not to be seen."""
    return lambda seen: torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, number)


added = hiding_by(torch.finfo(torch.float64).min)


NUMBERS = {"minus infinity": -torch.inf, "-1e9": -1e9, "-65504": -65504.0, "-1e4": -1e4}
FORMS = {
    "bool": lambda seen: seen,
    "added": added,
    **{name: hiding_by(number) for name, number in NUMBERS.items()},
}


every_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


def test_a_bias_is_more_than_a_mask():
    assert agreement(added(together().tril()) - 0.5, LAYOUT) == "apart"


@every_form
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_mask_of_the_documents_is_served(implementation, form):
    model, stock = (llama(implementation) for _ in range(2))
    call = {"input_ids": IDS, "position_ids": POSITIONS, "labels": IDS}
    mask = form(together().tril())
    with autopack.enable(model) as handle:
        found = model(**call, attention_mask=mask)
        assert error(found.logits, alone(stock, IDS, *ROWS)) < FLOAT64
        # eager adds a bool mask, and its softmax over a longer row rounds otherwise
        if implementation == "sdpa":
            assert error(found.logits, stock(**call, attention_mask=mask).logits) < FLOAT64
        assert handle.verified
        found.loss.backward()
    loss = alone_loss(stock, IDS, *ROWS)
    loss.backward()
    assert float(found.loss.detach()) == pytest.approx(float(loss.detach()), rel=1e-6)
    assert gradient_error(gradients(model), gradients(stock)) < FLOAT64


@every_form
def test_padding_in_it_is_padding(form):
    model, stock = llama(), llama()
    mask = padded(together().tril())
    given = POSITIONS.clone()
    given[0, -LENGTHS[-1] :] = 0
    with autopack.enable(model):
        found = model(input_ids=IDS, position_ids=given, attention_mask=form(mask)).logits
    expected = alone(stock, IDS, *ROWS)
    real = mask.diagonal(dim1=2, dim2=3)[:, 0]
    assert error(found[real], expected[real]) < FLOAT64


@pytest.mark.parametrize(
    "seen", [together(), together().tril().triu(-3)], ids=["both ways", "a window"]
)
@pytest.mark.parametrize("name", FORMS)
def test_one_that_keeps_documents_apart_in_its_own_way_is_left_to_stock_if_it_hides_for_good(
    name, seen
):
    model, stock = llama(), llama()
    call = {"input_ids": IDS, "position_ids": POSITIONS, "attention_mask": FORMS[name](seen)}
    with autopack.enable(model):
        if name in ("-65504", "-1e4"):
            with refused("prepared-mask", match="large scores"):
                model(**call)
        else:
            assert torch.equal(model(**call).logits, stock(**call).logits)


@every_form
def test_one_that_lets_documents_see_each_other_contradicts_them(form):
    model = llama()
    with (
        autopack.enable(model),
        refused("prepared-mask"),
    ):
        model(
            input_ids=IDS,
            position_ids=POSITIONS,
            attention_mask=form(torch.ones_like(together()).tril()),
        )


def test_a_number_that_lets_something_through_hides_nothing():
    model, stock = llama(), llama()
    call = {
        "input_ids": IDS,
        "position_ids": POSITIONS,
        "attention_mask": hiding_by(-5.0)(together().tril()),
    }
    assert error(stock(**call).logits, alone(stock, IDS, *ROWS)) > LEAK
    with autopack.enable(model), refused("prepared-mask"):
        model(**call)


def test_a_mixer_that_no_mask_reaches_is_refused():
    model = tiny.build("bamba", attn_implementation="sdpa")
    ids = tiny.tokens(model.config, *IDS.shape)
    call = {"input_ids": ids, "position_ids": POSITIONS, "attention_mask": together()}
    with autopack.enable(model), refused("prepared-mask"):
        model(**call)
