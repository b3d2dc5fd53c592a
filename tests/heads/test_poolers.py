"""What a head makes of the tokens of a document: poolers, summaries, means, and heads of one's
own."""

import copy

import pytest
import torch
import transformers
from torch import nn
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.models.mamba.modeling_mamba import MambaModel

import autopack
from autopack import tiny
from autopack.tiny.models import randomize
from tests.conftest import FLOAT32, FLOAT64, LENGTHS, error, positions, spans
from tests.heads.models import CLASSES, IDS, agrees, packed, serves, with_head

POOLED = [
    # reads padding: documents run alone
    *(("xlm", {"summary_type": kind}) for kind in ("last", "mean", "first")),
    # leaves padding out
    *(("modernbert", {"classifier_pooling": kind}) for kind in ("mean", "cls")),
]


@pytest.mark.parametrize(("model_type", "options"), POOLED)
def test_what_a_head_makes_of_all_tokens_is_of_those_of_a_document(model_type, options):
    serves(with_head(model_type, **options), {"labels": CLASSES}, verify=False)


class T5EncoderForSequenceClassification(transformers.T5PreTrainedModel):
    """Of T5, upstream has such heads on encoder and decoder together alone."""

    def __init__(self, config):
        super().__init__(config)
        self.encoder = transformers.T5EncoderModel(config)
        self.score = nn.Linear(config.d_model, config.num_labels)
        self.post_init()

    def get_input_embeddings(self):
        return self.encoder.get_input_embeddings()

    def forward(
        self, input_ids=None, attention_mask=None, inputs_embeds=None, labels=None, **kwargs
    ):
        states = self.encoder(
            input_ids, attention_mask=attention_mask, inputs_embeds=inputs_embeds
        ).last_hidden_state
        mask = (
            torch.ones_like(states[..., 0])
            if attention_mask is None
            else attention_mask.to(states.dtype)
        )
        logits = self.score((states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)


def test_a_head_on_the_encoder_of_t5():
    model = T5EncoderForSequenceClassification(tiny.config("t5", num_labels=3)).eval()
    randomize(model, 0)
    stock, labels = copy.deepcopy(model), {"labels": CLASSES}
    documents = IDS[0].split(LENGTHS)
    row = model(input_ids=IDS, position_ids=positions(LENGTHS))
    assert len(row.logits) == 1  # stock: one result for all
    autopack.enable(model)
    # T5's norms go through float32 whatever the dtype of the model.
    agrees(model, stock, packed(model, **labels), documents, labels, FLOAT32)


def test_a_head_of_ones_own_on_a_backbone():
    model, head = MambaModel(tiny.config("mamba")).double().eval(), nn.Linear(64, 3).double()
    last = torch.tensor([b - 1 for _, b in spans(LENGTHS)])
    expected = torch.cat(
        [head(model(part).last_hidden_state[:, -1]) for part in IDS.split(LENGTHS, 1)]
    )
    with autopack.enable(model):
        found = head(packed(model).last_hidden_state[0, last])
    assert error(found, expected) < FLOAT64


def test_pretraining_has_labels_per_token_and_per_document():
    stock = transformers.BertForPreTraining(tiny.config("bert", task="masked-lm")).double().eval()
    model, next_sentence = copy.deepcopy(stock), torch.tensor([0, 1, 1, 0])
    with autopack.enable(model):
        output = packed(model, labels=IDS, next_sentence_label=next_sentence)
    parts = [stock(input_ids=part) for part in IDS.split(LENGTHS, 1)]
    logits = torch.cat([part.prediction_logits[0] for part in parts])
    relations = torch.cat([part.seq_relationship_logits for part in parts])
    assert error(output.prediction_logits[0], logits) < FLOAT64
    assert error(output.seq_relationship_logits, relations) < FLOAT64
    cross_entropy = nn.functional.cross_entropy
    assert (
        abs(output.loss - cross_entropy(logits, IDS[0]) - cross_entropy(relations, next_sentence))
        < FLOAT64
    )
