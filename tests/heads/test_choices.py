"""Padded batches of choices run without their padding: the model in the head gets its rows, and
gives them back."""

import pytest
import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES as HEADS

import autopack
from autopack import tiny
from tests.subjects import without_dropout
from tests.support.padded import agree, loss_error, mask_of, tally_of, twins
from tests.support.refusals import refused

STAYS = {
    "canine": "documents are run alone",
    "convbert": "reads others than the first token",
    "fnet": "reads padding",
    "mobilebert": "reads padding",
    "nystromformer": "reads padding",
    "roformer": "reads others than the first token",
    "xlm": "the token that the head reads is padding",
    "yoso": "reads padding",
}
"""Types whose padded batches keep their padding whatever head they have."""
NOT_HERE = {"funnel", "mra", "longformer", "xlnet"}
"""Stock's heads of these want tokens, take masks of another form or documents of some lengths
alone."""


def pair(model_type, **options):
    torch.manual_seed(0)
    config = tiny.config(model_type, task="multiple-choice", **options)
    return twins(
        without_dropout(transformers.AutoModelForMultipleChoice.from_config(config).train())
    )


def choices(config, side="right"):
    """Two questions of three choices."""
    mask = mask_of((12, 6, 9, 4, 12, 7), side).view(2, 3, -1)
    torch.manual_seed(3)
    ids = torch.randint(8, 60, mask.shape).masked_fill(mask == 0, config.pad_token_id or 0)
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([1, 0])}


@pytest.mark.parametrize("model_type", sorted(set(HEADS) - NOT_HERE))
def test_every_type(model_type):
    stock, model = pair(model_type)
    with autopack.enable(model):
        agree(model, stock, choices(stock.config))
        left = " ".join(tally_of(model).left)
        assert tally_of(model).batches == (model_type not in STAYS), left
        assert STAYS.get(model_type, "") in left


@pytest.mark.parametrize(
    ("model_type", "options", "side"),
    [("bert", {}, "left"), ("flaubert", {"summary_type": "mean"}, "right")],
    ids=["a first token that is padding", "a summary of other tokens"],
)
def test_what_reads_padding_keeps_it(model_type, options, side):
    stock, model = pair(model_type, **options)
    with autopack.enable(model):
        agree(model, stock, choices(stock.config, side))
        assert not tally_of(model).batches


def test_what_another_head_reads_keeps_its_padding():
    """The control: a mean over all columns of a choice, which zeros at padding would change."""
    stock, model = pair("bert")

    class Mean(type(stock)):
        def forward(self, input_ids, attention_mask=None, labels=None, **kwargs):
            rows = [each.flatten(0, 1) for each in (input_ids, attention_mask)]
            states = self.bert(input_ids=rows[0], attention_mask=rows[1], **kwargs)[0]
            logits = self.classifier(states.mean(1)).view(input_ids.shape[:2])
            loss = torch.nn.functional.cross_entropy(logits, labels)
            return transformers.modeling_outputs.MultipleChoiceModelOutput(loss=loss, logits=logits)

    stock.__class__ = model.__class__ = Mean
    inputs = choices(stock.config)
    with autopack.enable(model):
        agree(model, stock, inputs)
        assert not tally_of(model).batches
    with autopack.enable(model, verify=False):
        assert loss_error(model(**inputs).loss, stock(**inputs).loss) > 1e-3


def test_there_is_nothing_to_audit():
    _, model = pair("bert")
    with refused("nothing-to-audit"):
        autopack.audit(model)
