"""A changed model is looked at in its next call, also inside generation and transforms of
torch.func."""

import pytest
import torch

import autopack
from autopack import tiny
from tests.conftest import positions
from tests.engine import Call, check, ids
from tests.subjects import WithoutTwin, put_own_layer
from tests.support.refusals import refused

pytestmark = pytest.mark.usefixtures("nothing_left_behind")
LENGTHS = (5, 7)


def without_twin():
    model = tiny.build("llama")
    model.__class__ = WithoutTwin
    return model


def generate(model, ids):
    model.generate(ids, max_new_tokens=3, do_sample=False)


def differentiate(model, ids, **given):
    def total(parameters):
        return torch.func.functional_call(
            model, parameters, (), {"input_ids": ids, "use_cache": False, **given}
        )[0].sum()

    return torch.func.grad(total)(dict(model.named_parameters()))


@pytest.mark.parametrize(
    "build", [without_twin, lambda: tiny.build("llama")], ids=["no twin", "twin"]
)
@pytest.mark.parametrize("first", [generate, differentiate])
@pytest.mark.parametrize("packed", [True, False])
def test_calls_after_it_are_exact(build, first, packed):
    model = build().eval()
    call = Call(labels=None, lengths=LENGTHS, given={"use_cache": False})
    with autopack.enable(model) as handle:
        put_own_layer(model)
        first(model, ids(lengths=LENGTHS))
        with torch.no_grad():
            found = (call.packed if packed else call.padded)(model)
        assert handle.checked.checks > 0
        assert packed or handle.tally.batches == 1
    with torch.no_grad():
        check(found, call.alone(model))


def test_a_packed_call_that_cannot_be_checked_here_is_refused_and_only_that_one():
    model = without_twin().eval()
    tokens, where = ids(lengths=LENGTHS), positions(LENGTHS)
    with autopack.enable(model):
        put_own_layer(model)
        with refused("recorded-call", match="Call it once outside"):
            differentiate(model, tokens, position_ids=where)
        assert model(input_ids=tokens, position_ids=where, use_cache=False).logits.isfinite().all()
        differentiate(model, tokens, position_ids=where)
