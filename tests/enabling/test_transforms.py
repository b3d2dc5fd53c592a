"""Transforms of torch over an enabled model: torch.func's derivatives are exact, what has no values
is refused."""

import pytest
import torch
from torch.func import functional_call, grad, vmap

import autopack
from autopack import tiny
from tests.conftest import FLOAT64, alone, error, llama, positions, token_ids
from tests.engine import declared
from tests.support.padded import batch, mask_of
from tests.support.refusals import refused

pytestmark = pytest.mark.usefixtures("nothing_left_behind")
LENGTHS = (5, 12, 7)
IDS = token_ids(1, sum(LENGTHS))
PACKED = {"input_ids": IDS, "position_ids": positions(LENGTHS), "labels": IDS, "use_cache": False}


def _loss(model, call):
    return lambda parameters: functional_call(model, parameters, kwargs=call).loss


def _furthest(found, expected):
    return max(float((found[name] - expected[name]).abs().max()) for name in expected)


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "mamba", "lfm2", "bert"])
@pytest.mark.parametrize("padded", [False, True], ids=["packed", "padded"])
def test_gradients_are_those_of_backward(model_type, padded):
    task = "masked-lm" if model_type == "bert" else "causal-lm"
    model = tiny.build(model_type, task=task, dtype=torch.float64).eval()
    call = {} if model_type == "bert" else {"use_cache": False}
    if padded:
        call |= batch("causal LM", mask_of((4, 9)))
    else:
        call |= {"input_ids": IDS, "labels": IDS, **declared(model, lengths=LENGTHS)}
    with autopack.enable(model):
        model(**call).loss.backward()
        parameters = {name: p for name, p in model.named_parameters() if p.grad is not None}
        found = grad(_loss(model, call))(parameters)
    assert _furthest(found, {name: p.grad for name, p in parameters.items()}) < FLOAT64


class TestWithoutValues:
    """Where documents begin cannot be read: the call is refused, and tokens alone are what they are
    to stock."""

    def test_rows_one_by_one(self):
        model, stock = llama(), llama()
        rows, where = IDS.view(4, 6), positions((2, 4)).expand(4, 6)

        def run(ids, position_ids=None):
            position_ids = None if position_ids is None else position_ids[None]
            return model(input_ids=ids[None], position_ids=position_ids, use_cache=False).logits[0]

        with autopack.enable(model):
            with refused("recorded-call", match=r"no values.*torch.vmap"):
                vmap(run)(rows, where)
            assert error(vmap(run)(rows), stock(input_ids=rows).logits) < FLOAT64
            # nothing is left in force
            assert error(model(**PACKED).logits, alone(stock, IDS, LENGTHS)) < FLOAT64

    def test_exported(self):
        model, stock = llama(), llama()
        with autopack.enable(model):
            with refused("recorded-call", match=r"no values.*torch.export"):
                torch.export.export(
                    model, (), {name: PACKED[name] for name in ("input_ids", "position_ids")}
                )
            tokens = torch.export.export(model, (), {"input_ids": IDS, "use_cache": False})
        assert (
            error(
                tokens.module()(input_ids=IDS, use_cache=False).logits, stock(input_ids=IDS).logits
            )
            < FLOAT64
        )


class _Traced(torch.nn.Module):
    def __init__(self, model, second):
        super().__init__()
        self.model, self.second = model, second

    def forward(self, ids, other):
        return self.model(input_ids=ids, **{self.second: other}, use_cache=False).logits


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
class TestTraced:
    """A trace keeps what the host has read, so it may hold neither documents nor padding."""

    def test_packed_rows_are_refused(self):
        model = llama()
        with autopack.enable(model), refused("recorded-call"):
            torch.jit.trace(_Traced(model, "position_ids"), (IDS, positions(LENGTHS)))

    def test_padding_stays(self):
        model, stock = llama().train(), llama()
        ids, first = IDS.view(2, 12), torch.ones(2, 12, dtype=torch.long)
        first[0, 7:], second = 0, first.flip(0)
        with autopack.enable(model) as handle:
            traced = torch.jit.trace(_Traced(model, "attention_mask"), (ids, first))
            assert (
                error(traced(ids, second)[1, :7], stock(input_ids=ids[1:, :7]).logits[0]) < FLOAT64
            )
            assert "traced" in repr(handle)
