"""Terms of stock's loss that are predicted at padding: left out, said once by name, and no fault
for live checks."""

import pytest
import torch
from torch import nn

import autopack
from autopack import tiny
from tests.subjects import put_own_layer

MASKS = {
    "right": [[1] * 9, [1] * 5 + [0] * 4, [1] * 7 + [0] * 2],
    "left": [[1] * 9, [0] * 4 + [1] * 5, [0] * 2 + [1] * 7],
    "hole": [[1] * 9, [1, 1, 0, 0, 1, 1, 1, 1, 1], [1] * 9],
}
BOUND = 1e-5
"""Relative, of a loss in float32: rounding leaves about 1e-7. The terms left out here change it by
5e-3 or more."""


def build(own_layer=False):
    model = tiny.build("llama").train()
    if own_layer:
        put_own_layer(model)
    return model


def batch(mask, scored, shifted):
    """A batch of which tokens behind padding are `scored`; labels are also given `shifted` by the
    caller."""
    ids = tiny.tokens(tiny.config("llama"), *mask.shape)
    labels = ids.masked_fill(mask == 0, -100)
    if not scored:
        labels[:, 1:][(mask[:, 1:] == 1) & (mask[:, :-1] == 0)] = -100
    moved = (
        {"shift_labels": nn.functional.pad(labels[:, 1:], (0, 1), value=-100)} if shifted else {}
    )
    return {"input_ids": ids, "attention_mask": mask, "labels": labels, **moved}


@pytest.mark.parametrize("own_layer", [False, True])
@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("scored", [True, False])
@pytest.mark.parametrize("padding", MASKS)
def test_the_loss_is_that_without_them_and_they_are_said_once(
    padding, scored, shifted, own_layer, caplog
):
    mask, model = torch.tensor(MASKS[padding]), build(own_layer)
    wanted, stock = (
        model(**batch(mask, given, shifted)).loss.detach() for given in (False, scored)
    )
    differs = scored and padding != "right"
    assert (abs(stock - wanted) > 1e-3 * wanted) == differs, "control"
    with autopack.enable(model) as handle:
        for _ in range(3):
            found = model(**batch(mask, scored, shifted)).loss.detach()
            assert abs(found - wanted) < BOUND * wanted
        shown = repr(handle)
    said = [line for line in caplog.messages if "right behind padding" in line]
    assert len(said) == differs
    assert (
        "3 padded batches without the terms of stock's loss that are predicted at padding" in shown
    ) == differs


def test_a_label_that_only_the_caller_shifted_into_padding_keeps_padding():
    mask, model = torch.tensor(MASKS["right"]), build()
    given = batch(mask, True, True)
    given["shift_labels"] = nn.functional.pad(given["input_ids"][:, 1:], (0, 1), value=-100)
    wanted = model(**given).loss.detach()
    with autopack.enable(model) as handle:
        assert torch.equal(model(**given).loss.detach(), wanted)
        assert handle.tally.batches == 0


def test_an_audit_compares_with_what_is_promised_and_says_so(caplog):
    model = tiny.build("llama")
    with autopack.enable(model):
        report = autopack.audit(model, modes=("left-padded",))
    (result, *_) = report.results
    assert result.loss < BOUND, "the terms that are left out change it by more"
    assert "labels behind padding" in report.notes
    assert "right behind padding" not in caplog.text
