"""What mixes tokens in a packed forward comes to the place where documents are kept apart, or the
call raises.

`verify=False` stands for everything that an audit and the look at the code would have found before.
"""

import pytest
import torch
from torch import nn

import autopack
from autopack import tiny
from autopack.inspection.modules import attention_modules
from tests.engine import counted
from tests.subjects import ATTENDING
from tests.support.refusals import refused

IDS = tiny.tokens(None, 1, 9)
WHERE = counted((4, 5))


def attending_by_itself(attention, width):
    """A forward of the user's: causal attention over the row, past every interface."""
    heads, parts = 2, nn.Linear(width, 3 * width, bias=False)

    def forward(hidden_states, *args, **kwargs):
        queries, keys, values = (
            part.unflatten(-1, (heads, -1)).transpose(1, 2)
            for part in parts(hidden_states).chunk(3, dim=-1)
        )
        mixed = nn.functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return mixed.transpose(1, 2).flatten(2), None

    return forward


@pytest.mark.parametrize("model_type", ATTENDING)
def test_attention_that_goes_past_its_site_raises(model_type):
    model = tiny.build(model_type)
    first = attention_modules(model)[0]
    with autopack.enable(model, verify=False):
        model(input_ids=IDS, position_ids=WHERE)
        first.forward = attending_by_itself(first, model.config.hidden_size)
        with refused(
            "other-code", match=f"{type(first).__name__} has run in a packed forward without"
        ):
            model(input_ids=IDS, position_ids=WHERE)
        model(input_ids=IDS)  # a row of one document has nothing to keep apart
    # What would have come back: the second document sees the first.
    alone = model(input_ids=IDS[:, 4:], position_ids=WHERE[:, 4:]).logits
    packed = model(input_ids=IDS, position_ids=WHERE, use_cache=False).logits[:, 4:]
    assert float((packed - alone).abs().max() / alone.std()) > 1e-2


@pytest.mark.parametrize("model_type", ATTENDING)
def test_a_stranger_that_attends_over_the_packed_row_raises(model_type):
    teacher, model = tiny.build(model_type), tiny.build(model_type)

    class Student(type(model)):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            output.logits = output.logits + teacher(input_ids=kwargs["input_ids"]).logits
            return output

    model.__class__ = Student
    with autopack.enable(model, verify=False):
        with refused("call-within-call"):
            model(input_ids=IDS, position_ids=WHERE)
        expected = model(input_ids=IDS).logits
    assert torch.equal(model(input_ids=IDS).logits, expected)
