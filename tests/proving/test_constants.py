"""Third-party code that holds the vocabulary's size as a number has a twin of that vocabulary."""

import pytest
import torch
from torch.nn import functional as F
from transformers import LlamaForCausalLM

import autopack
from autopack import tiny

SIZE = 311
SIZES = {"vocabulary": 311}
EXACT = 1e-5
"""Of a loss in float32."""


def shifted(logits, labels, size):
    return F.cross_entropy(logits[:, :-1].reshape(-1, size), labels[:, 1:].reshape(-1))


class InCode(LlamaForCausalLM):
    def forward(self, input_ids=None, labels=None, **kwargs):
        out = super().forward(input_ids, **kwargs)
        if labels is not None:
            out["loss"] = F.cross_entropy(out.logits[:, :-1].reshape(-1, 311), labels[:, 1:].reshape(-1))
        return out


def of_311(logits, labels):
    return shifted(logits, labels, 311)


def holding(loss):
    class Holding(LlamaForCausalLM):
        def forward(self, input_ids=None, labels=None, **kwargs):
            out = super().forward(input_ids, **kwargs)
            if labels is not None:
                out["loss"] = loss(out.logits, labels)
            return out

    return Holding


IN_GLOBAL = holding(lambda logits, labels: shifted(logits, labels, SIZE))
IN_HELPER = holding(lambda logits, labels: of_311(logits, labels))
IN_DICT = holding(lambda logits, labels: shifted(logits, labels, SIZES["vocabulary"]))


class OfHidden(LlamaForCausalLM):
    """It holds the width of its states, which no twin has: its calls are checked."""

    def forward(self, input_ids=None, labels=None, **kwargs):
        out = super().forward(input_ids, output_hidden_states=True, **kwargs)
        logits = self.lm_head(out.hidden_states[-1].reshape(-1, 40)).view_as(out.logits)
        if labels is not None:
            out["loss"] = shifted(logits, labels, SIZE)
        return out


@pytest.mark.parametrize(
    ("cls", "proven"),
    [(InCode, True), (IN_GLOBAL, True), (IN_HELPER, True), (IN_DICT, True), (OfHidden, False)],
)
def test_packed_labels_are_served(cls, proven):
    torch.manual_seed(0)
    model = cls(tiny.config("llama", vocab_size=SIZE, hidden_size=40)).eval()
    ids = torch.randint(5, 90, (1, 11), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(6), torch.arange(5)])[None]
    with torch.no_grad():
        first, second = (model(part, labels=part).loss for part in (ids[:, :6], ids[:, 6:]))
        expected = (first * 5 + second * 4) / 9
        with autopack.enable(model) as handle:
            found = model(ids, position_ids=positions, labels=ids).loss
    assert ("by a twin" in handle.verified) == proven
    assert abs(float(found - expected)) < EXACT * float(expected)
