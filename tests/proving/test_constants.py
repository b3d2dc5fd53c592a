"""Third-party code that holds sizes of the model as numbers has no twin, and its checked calls are served."""

import pytest
import torch
from torch.nn import functional as F
from transformers import LlamaForCausalLM

import autopack
from autopack import tiny
from tests.engine import Call, check


class OfVocabulary(LlamaForCausalLM):
    def forward(self, input_ids=None, labels=None, **kwargs):
        out = super().forward(input_ids, **kwargs)
        if labels is not None:
            out["loss"] = F.cross_entropy(out.logits[:, :-1].reshape(-1, 311), labels[:, 1:].reshape(-1))
        return out


class OfHidden(OfVocabulary):
    def forward(self, input_ids=None, labels=None, **kwargs):
        out = super().forward(input_ids, labels, output_hidden_states=True, **kwargs)
        out["logits"] = self.lm_head(out.hidden_states[-1].reshape(-1, 40)).view_as(out.logits)
        return out


@pytest.mark.parametrize("cls", [OfVocabulary, OfHidden])
def test_packed_labels_are_served(cls):
    torch.manual_seed(0)
    model, call = cls(tiny.config("llama", vocab_size=311, hidden_size=40)).eval(), Call(lengths=(6, 5))
    expected = call.alone(model)
    with autopack.enable(model) as handle:
        check(call.packed(model), expected)
    assert "by checks of its calls" in handle.verified
