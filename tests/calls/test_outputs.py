"""Outputs of unpadded calls: tensors of the form of the batch, and logits beside a loss only where
they are used."""

import copy
import pickle

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.modeling_outputs import BaseModelOutputWithPooling, CausalLMOutputWithPast

import autopack
from autopack.auditing.fields import Side, Sides, WrongShape
from autopack.calls.outputs import restore
from autopack.layout.token_map import TokenMap
from tests.support.padded import PADDED, batch, build, mask_of, twins
from tests.support.refusals import refused

REAL = np.array([[1, 1, 0], [1, 1, 1]], bool)
PADDING = TokenMap.of_real(REAL, torch.device("cpu"))
PADDING.where  # noqa: B018  # made here, and not by the first test, which may be in inference mode
TOKENS, VOCABULARY = 5, 4

ROW = torch.randn(1, TOKENS, VOCABULARY, requires_grad=True)


def output():
    hidden = (ROW * 2, ROW * 3)
    return restore(
        CausalLMOutputWithPast(loss=ROW.sum(), logits=ROW * 1, hidden_states=hidden), PADDING
    )


READERS = {
    "attribute": lambda o: (o.logits, o.hidden_states),
    "tuple": lambda o: o.to_tuple()[1:],
    "dict.items": lambda o: [value for name, value in dict.items(o) if name != "loss"],
    "leaves": lambda o: (pytree.tree_leaves(o)[1], tuple(pytree.tree_leaves(o)[2:])),
}
"""It is the output of the model's own class; its fields are attributes and items."""


@pytest.mark.parametrize("read", READERS.values(), ids=list(READERS))
def test_every_way_of_reading_gives_the_batch(read):
    found = output()
    logits, hidden = read(found)
    assert isinstance(hidden, tuple)
    for factor, tensor in enumerate((logits, *hidden), 1):
        assert torch.equal(tensor, PADDING.restore(ROW * factor))
        assert tensor.requires_grad
    assert type(logits) is torch.Tensor
    assert type(found) is CausalLMOutputWithPast
    assert found.logits is logits


USERS = {
    "a function": lambda x: torch.nn.functional.cross_entropy(
        x.flatten(0, 1), torch.zeros(6, dtype=torch.long)
    ),
    "a list": lambda x: torch.stack([x, x]),
    "an operation of aten": lambda x: torch.ops.aten.sin(x),
    "compiled code": lambda x: torch.compile(lambda y: (y * 2).sum(), backend="eager")(x),
    "a function with a backward of its own": lambda x: _Twice.apply(x),
    "a change in place": lambda x: x.mul_(2),
    "numbers": lambda x: torch.tensor(x.tolist()),
    "grad_fn": lambda x: torch.zeros(()) if x.grad_fn is not None else None,
}


class _Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


@pytest.mark.parametrize("use", USERS.values(), ids=list(USERS))
def test_logits_that_nobody_has_read_are_the_tensor_itself(use):
    assert torch.equal(use(dict.__getitem__(output(), "logits")), use(PADDING.restore(ROW * 1)))


def test_pickles_and_copies_hold_plain_tensors():
    with torch.no_grad():
        row = torch.randn(1, TOKENS, VOCABULARY)
        found = restore(CausalLMOutputWithPast(loss=row.sum(), logits=row), PADDING)
    for again in (pickle.loads(pickle.dumps(found)), copy.deepcopy(found)):
        assert type(again) is CausalLMOutputWithPast
        assert type(again.logits) is torch.Tensor
        assert torch.equal(again.logits, PADDING.restore(row))


def test_what_is_first_read_without_gradients_has_them_all_the_same():
    """Metrics are read under no_grad, before a loss is made of the same logits."""
    found = output()
    with torch.no_grad():
        found.logits.argmax(-1)
    assert found.logits.requires_grad
    found = output()
    with torch.inference_mode():
        assert found.logits.requires_grad
    assert not found.logits.is_inference()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_a_forward_without_gradients_gives_has_none(mode):
    with mode():
        found = output()
    assert not found.logits.requires_grad


def test_other_outputs():
    router, pooled = torch.randn(TOKENS, 7), torch.randn(2, VOCABULARY)
    assert torch.equal(restore(ROW, PADDING), PADDING.restore(ROW))
    hidden, again = restore((ROW, pooled), PADDING)
    assert hidden.shape == (2, 3, VOCABULARY)
    assert again is pooled
    found = restore(
        {"x": ROW, "router_logits": (router, router), "none": None, "loss": torch.tensor(1.0)},
        PADDING,
    )
    assert [r.shape for r in found["router_logits"]] == [(6, 7)] * 2
    assert found["none"] is None
    found = restore(
        BaseModelOutputWithPooling(last_hidden_state=ROW, pooler_output=pooled), PADDING
    )
    assert found.pooler_output is pooled


def test_a_layer_without_a_router_has_one_number_in_place_of_logits():
    """Switch Transformers before 5: of no row, and of no document either."""
    nothing, logits = torch.zeros(1, dtype=torch.long), torch.randn(TOKENS, 7)
    found = restore({"decoder_router_logits": ((nothing,), (logits,))}, PADDING)[
        "decoder_router_logits"
    ]
    assert found[0][0] is nothing
    assert found[1][0].shape == (6, 7)
    for odd in (nothing, torch.zeros(1, 3, 9)):
        with refused("unpad-refused"):
            restore({"odd": odd}, PADDING)
    sides = Sides([Side(np.array([[0, 0, 1, 1, 1]]))])
    name = "decoder_router_logits[0][0]"
    got, _, unknown = sides.split({name: nothing}, [{name: nothing}, {name: nothing.clone()}])
    assert got == [{name: nothing}] * 2
    assert not unknown
    # Of a head that begins with zeros every document has the same, and one result for all of them
    # is wrong.
    for zeros in (nothing, torch.zeros(1, 2)):
        with pytest.raises(WrongShape, match="which is not made of those alone"):
            sides.split({"logits": zeros}, [{"logits": zeros}, {"logits": zeros}])
    with pytest.raises(WrongShape, match="which is not made of those alone"):
        sides.split({"one": torch.ones(1)}, [{"one": torch.ones(1)}, {"one": torch.zeros(1)}])


class _Logits(TorchDispatchMode):
    """The largest number of tokens in the memory of any tensor over the vocabulary that is made."""

    __module__ = "torch.tests"  # in a mode of somebody else's, calls are checked, which makes more

    def __init__(self, vocabulary, hidden):
        super().__init__()
        self.vocabulary = vocabulary
        self.hidden = hidden
        self.tokens = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(result):
            shape = tensor.shape if isinstance(tensor, torch.Tensor) else ()
            if shape[-1:] == (self.vocabulary,) and self.hidden not in shape:  # and no weight
                memory = tensor.untyped_storage().nbytes() // tensor.element_size()
                self.tokens = max(self.tokens, memory // self.vocabulary)
        return result


def test_logits_that_nobody_reads_are_never_made_for_padding():
    stock, model = twins(build("llama", vocab_size=512))
    inputs = batch("causal LM", mask_of(PADDED))
    sizes = {}
    for name, which, read in (
        ("stock", stock, False),
        ("unread", model, False),
        ("read", model, True),
    ):
        if which is model:
            autopack.enable(model, check_every=0)  # a check runs the batch as stock does
        with _Logits(512, stock.config.hidden_size) as made:
            outputs = which(**inputs)
            if read:
                outputs.logits.sum()
            outputs.loss.backward()
        sizes[name] = made.tokens
    autopack.disable(model)
    assert sizes == {
        "stock": len(PADDED) * max(PADDED),
        "unread": sum(PADDED),
        "read": len(PADDED) * max(PADDED),
    }
