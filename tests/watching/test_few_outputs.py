"""Heads that make no logits are checked by what they return: a loss alone, or fields of shifted
labels."""

import pytest
import torch
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import ModelOutput

import autopack
from tests.support.conditional import Conditional, build, row
from tests.support.refusals import refused


def loss_alone(output, labels):
    return CausalLMOutputWithPast(loss=output.loss)


def log_probs(output, labels):
    wanted = labels[:, 1:].clamp(min=0)[..., None]
    found = output.logits[:, :-1].log_softmax(-1).gather(-1, wanted).squeeze(-1)
    return ModelOutput(loss=output.loss, log_probs=found.masked_fill(labels[:, 1:] == -100, 0.0))


class Fused(Conditional):
    """A head that returns little."""

    form = None

    def forward(self, input_ids=None, labels=None, **kwargs):
        output = super().forward(input_ids=input_ids, labels=labels, **kwargs)
        return output if labels is None else type(self).form(output, labels)


def fused(form):
    model = build()
    mixes = staticmethod(lambda self, states, **_: states.shape[1] in range(100, 200))
    kind = type(
        "Users", (Fused,), {"form": staticmethod(form), "mixes": mixes, "__module__": __name__}
    )
    other = kind._from_config(model.config)
    other.load_state_dict(model.state_dict())
    return other.train()


def labelled(*lengths):
    batch = row(*lengths)
    return {**batch, "labels": batch["input_ids"].masked_fill(batch["position_ids"] == 0, -100)}


@pytest.mark.parametrize("items", [False, True])
@pytest.mark.parametrize("form", [loss_alone, log_probs])
def test_what_it_returns_is_compared(form, items, caplog):
    model = fused(form)
    batch = labelled(5, 9, 7)
    given = {"num_items_in_batch": int((batch["labels"] != -100).sum())} if items else {}
    with autopack.enable(model) as handle:
        loss = model(**batch, **given).loss
        assert handle.checked.checks == 1
        assert not handle.checked.skipped
        assert handle.checked.worst < 1e-5
        assert torch.equal(loss, model(**batch, **given).loss)
        assert "could not check" not in caplog.text
        with refused("leak-detected"):
            model(**labelled(60, 50))
