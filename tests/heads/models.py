"""Tiny models with heads, their labels, and what packed rows of them must agree with."""

import copy

import torch
from torch import nn
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.models.mamba.modeling_mamba import MambaModel, MambaPreTrainedModel

import autopack
from autopack import tiny
from autopack.registry import first_position
from autopack.tiny.models import randomize
from tests.conftest import FLOAT64, LENGTHS, positions, token_ids
from tests.support.padded import model_gradient_error

IDS = token_ids()
CLASSES = torch.tensor([0, 2, 1, 1])
STARTS, ENDS = torch.tensor([1, 3, 0, 8]), torch.tensor([2, 11, 4, 8])
TASKS = {
    "sequence-classification": {"labels": CLASSES},
    "question-answering": {"start_positions": STARTS, "end_positions": ENDS},
    "next-sentence-prediction": {"labels": torch.tensor([0, 1, 1, 0])},
}


class MambaForSequenceClassification(MambaPreTrainedModel):
    """Upstream has no such head for Mamba; this is how a user writes one."""

    def __init__(self, config):
        super().__init__(config)
        self.backbone, self.score = (
            MambaModel(config),
            nn.Linear(config.hidden_size, config.num_labels),
        )
        self.post_init()

    def forward(
        self, input_ids=None, attention_mask=None, inputs_embeds=None, labels=None, **kwargs
    ):
        states = self.backbone(
            input_ids, inputs_embeds, attention_mask=attention_mask
        ).last_hidden_state
        logits = self.score(self.pool(states, attention_mask))
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)

    def pool(self, states, mask):
        return states[:, -1] if mask is None else states[range(len(mask)), mask.sum(1) - 1]


def with_head(model_type, task="sequence-classification", dtype=torch.float64, **config):
    labels = {"num_labels": 3} if task.endswith("classification") else {}
    return tiny.build(model_type, task=task, dtype=dtype, **labels | config)


def mamba_classifier():
    model = MambaForSequenceClassification(tiny.config("mamba", num_labels=3)).eval()
    randomize(model, 0)
    return model


def results(output):
    """One tensor per output: logits, or starts and ends side by side."""
    if "start_logits" in output:
        return torch.stack([output.start_logits, output.end_logits], dim=-1)
    return output.logits


def each_alone(model, documents, labels, **arguments):
    """The results of each document run by itself, and the mean of its losses."""
    outputs = [
        model(
            input_ids=document[None],
            **{name: value[i : i + 1] for name, value in labels.items()},
            **arguments,
        )
        for i, document in enumerate(documents)
    ]
    return [results(output)[0] for output in outputs], torch.stack(
        [output.loss for output in outputs]
    ).mean()


def packed(model, *rows, ids=IDS, **arguments):
    start = first_position(model.config)
    return model(
        input_ids=ids, position_ids=positions(*(rows or [LENGTHS]), start=start), **arguments
    )


def serves(stock, labels, tolerance=FLOAT64, ids=IDS, **options):
    """Want of an enabled copy, for each document of a packed row, what the document gets alone;
    return its handle."""
    model = copy.deepcopy(stock)
    with autopack.enable(model, **options) as handle:
        agrees(
            model, stock, packed(model, ids=ids, **labels), ids[0].split(LENGTHS), labels, tolerance
        )
    return handle


def agrees(model, stock, output, documents, labels, tolerance=FLOAT64):
    """Results, loss and gradients of `output` are those of the documents alone, within rounding."""
    expected, loss = each_alone(stock, documents, labels)
    found = results(output)
    assert len(found) == len(documents)
    for result, wanted in zip(found, expected, strict=True):
        result = result[: len(wanted)] if "start_positions" in labels else result
        assert (result - wanted).abs().max() < tolerance
    assert abs(output.loss - loss) < tolerance
    if not torch.is_grad_enabled():
        return
    output.loss.backward()
    loss.backward()
    # they sum over all tokens and layers
    assert model_gradient_error(model, stock) < 10 * tolerance
    model.zero_grad()
    stock.zero_grad()
