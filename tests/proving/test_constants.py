"""Third-party code that holds the vocabulary's size as a number has a twin of that vocabulary."""

import pytest
import torch
from torch.nn import functional as F
from transformers import LlamaForCausalLM

import autopack
from autopack import tiny
from tests.engine import Call, check

SIZE = 311


class Holding(LlamaForCausalLM):
    loss = None

    def forward(self, input_ids=None, labels=None, **kwargs):
        out = super().forward(input_ids, **kwargs)
        if labels is not None:
            out["loss"] = type(self).loss(out.logits, labels)
        return out


def in_code(logits, labels):
    return F.cross_entropy(logits[:, :-1].reshape(-1, 311), labels[:, 1:].reshape(-1))


def in_a_global(logits, labels):
    return F.cross_entropy(logits[:, :-1].reshape(-1, SIZE), labels[:, 1:].reshape(-1))


@pytest.mark.parametrize("loss", [in_code, in_a_global])
def test_packed_labels_are_served(loss):
    cls = type("Mine", (Holding,), {"loss": staticmethod(loss)})
    torch.manual_seed(0)
    model, call = cls(tiny.config("llama", vocab_size=SIZE)).eval(), Call(lengths=(6, 5))
    expected = call.alone(model)
    with autopack.enable(model) as handle:
        check(call.packed(model), expected)
    assert "on a tiny copy" in handle.verified
