"""NLLB-MoE: experts take so many tokens of a document, whatever else is in its row, and drop the
others.

The tiny model's experts take 3 tokens of a call in training, in evaluation three tenths of them, so
that every document of more than a few tokens loses some. That every form is exact is in
test_packed_rows.py."""

import pytest
import torch

import autopack
from tests.encoder_decoder.pairs import Pairs, alone, covered, forms_of, hold
from tests.encoder_decoder.pairs import build as build_any
from tests.support.refusals import refused

pytestmark = covered


def build(**options):
    return build_any("nllb-moe", **options)


def routers(model):
    return [module for module in model.modules() if type(module).__name__ == "NllbMoeTop2Router"]


def test_evaluation_on_packed_rows_leaves_the_capacity_of_training():
    model = build()
    with torch.no_grad(), autopack.enable(model, verify=False):
        model(**Pairs.draw().one_row())
    assert [router.expert_capacity for router in routers(model)] == [3, 3]


def test_a_padded_batch_runs_as_it_came():
    """Its documents share the places of experts there, and that is what it gives without
    autopack."""
    pairs, model = Pairs.draw(), build().train()
    wanted = model(**pairs.padded())
    handle = autopack.enable(model, verify=False)
    found = model(**pairs.padded())
    assert torch.equal(found.logits, wanted.logits)
    assert torch.equal(found.loss, wanted.loss)
    assert "reads padding" in str(handle.explain(**pairs.padded()))


@pytest.mark.parametrize("policy", ["random", "sampling"])
def test_second_experts_that_are_drawn_are_refused(policy):
    with refused("cannot-be-packed"):
        autopack.enable(build(second_expert_policy=policy))


def test_by_default_packed_rows_take_labels_and_no_losses_of_routers():
    """The plain call: that routers are refused their losses, as a proof finds, is no reason to
    refuse labels."""
    pairs, model = Pairs.draw(), build().train()
    expected = alone(model, pairs)
    autopack.enable(model)
    hold(model, pairs, expected, *forms_of("nllb-moe"))
    with refused("output-asked"):
        model(**pairs.one_row(), output_router_logits=True)
