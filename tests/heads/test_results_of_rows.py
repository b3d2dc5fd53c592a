"""Forwards that make one result of every row by their own code: text towers that pick the state of
one token.

References are the stock padded batch and the documents alone, in float64; errors are relative to
the standard deviation of what is expected. A vector of another token moves it by more than `LEAK`.
"""

import copy
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import transformers
from torch import nn
from transformers.models.altclip.modeling_altclip import AltCLIPTextModel
from transformers.models.metaclip_2.modeling_metaclip_2 import MetaClip2TextModel
from transformers.models.siglip2.modeling_siglip2 import Siglip2TextModel
from transformers.models.x_clip.modeling_x_clip import XCLIPTextModel

import autopack
from autopack import tiny
from autopack.calls.outputs import ONE_PER_ROW
from autopack.tiny.models import randomize
from tests.conftest import FLOAT64, LEAK, error
from tests.engine import Limits, Result, check, in_rows, must_be_exact, numbered
from tests.support.padded import mask_of, packs_at_once
from tests.support.refusals import refused

TOWERS = {
    "AltCLIP": AltCLIPTextModel,
    "CLIP": transformers.CLIPTextModel,
    "CLIP with projection": transformers.CLIPTextModelWithProjection,
    "CLIPSeg": transformers.CLIPSegTextModel,
    "DPR": transformers.DPRContextEncoder,
    "DPR questions": transformers.DPRQuestionEncoder,
    "MetaCLIP 2": MetaClip2TextModel,
    "OWL-ViT": transformers.OwlViTTextModel,
    "OWLv2": transformers.Owlv2TextModel,
    "SigLIP": transformers.SiglipTextModel,
    "SigLIP 2": Siglip2TextModel,
    "X-CLIP": XCLIPTextModel,
}
HOOKED = {
    "BERT": transformers.BertModel,
    "BigBird": transformers.BigBirdModel,
    "RoBERTa": transformers.RobertaModel,
    "ALBERT": transformers.AlbertModel,
    "MPNet": transformers.MPNetModel,
}
"""Poolers that are modules, whose hook gives them the rows of the batch."""
VECTORS = {"CLIP with projection": "text_embeds", "ELECTRA": "last_hidden_state"}
"""The names of vectors of rows where they are no `pooler_output`."""
LENGTHS = (9, 5, 7, 5)
MASK = mask_of(LENGTHS)


def build(cls, **config):
    made = tiny.config(cls.config_class.model_type, **config)
    if hasattr(made, "is_decoder"):
        made.is_decoder = False
    model = cls(made).double().eval()
    randomize(model, 0)
    return model


def documents(seed=0):
    generator = torch.Generator().manual_seed(seed)
    # the last token of each is the one that CLIP's kind looks for
    found = [torch.randint(8, 100, (n,), generator=generator) for n in LENGTHS]
    return [torch.cat([document[:-1], torch.tensor([2])]) for document in found]


def padded(seed=0):
    return {"input_ids": in_rows(documents(seed)), "attention_mask": MASK}


def packed(padding=0):
    """A packed row; no padding tokens: DPR makes a mask of those itself, and is refused."""
    ids, number = torch.cat(documents())[None], numbered(LENGTHS)
    pad = nn.functional.pad
    return {
        "input_ids": pad(ids, (0, padding), value=5),
        "attention_mask": pad(number, (0, padding)),
    }


@dataclass(frozen=True)
class Vectors:
    """Calls of a model with a vector of this name for each row; the loss is a sum in which each
    number counts."""

    name: str
    padding: int = 0

    def of_batch(self, model):
        output = model(**padded())
        assert self.name == "last_hidden_state" or len(output[self.name]) == len(LENGTHS)
        return self._result(model, output, MASK.bool())

    def of_row(self, model):
        return self._result(
            model, model(**packed(self.padding)), packed(self.padding)["attention_mask"] > 0
        )

    def alone(self, model):
        found = [model(input_ids=document[None]) for document in documents()]
        joined = {
            self.name: torch.cat(
                [each[self.name] for each in found], int(self.name == "last_hidden_state")
            )
        }
        if "last_hidden_state" in found[0]:
            joined["last_hidden_state"] = torch.cat([each.last_hidden_state for each in found], 1)
        return self._result(model, joined, torch.ones(1, sum(LENGTHS), dtype=torch.bool))

    def _result(self, model, output, real):
        states = [output["last_hidden_state"][real]] if "last_hidden_state" in output else []
        vectors = [] if self.name == "last_hidden_state" else [*output[self.name][:, None]]
        parts = [*vectors, *states]
        loss = sum((number + 1) * part.square().sum() for number, part in enumerate(parts))
        return Result.of(model, parts, loss, Limits(FLOAT64))

    @property
    def batch(self):
        return ((self.of_batch, self.of_batch),)

    @property
    def row(self):
        return ((self.of_row, self.alone),)


def name_of(tower):
    return VECTORS.get(tower, "pooler_output")


def serves(stock, calls):
    """Want exact packed rows and padded batches, without a proof."""
    must_be_exact(partial(copy.deepcopy, stock), (*calls.row, *calls.batch), verify=False)


@pytest.mark.parametrize("tower", TOWERS)
def test_padded_batches_stay_as_they_came(tower):
    stock, name, batch = build(TOWERS[tower]), name_of(tower), padded(1)
    model = copy.deepcopy(stock)
    with packs_at_once(model, verify=False) as handle:
        for given in (batch, {key: value[1:2] for key, value in batch.items()}):
            wanted = stock(**given)[name]
            found = model(**given, return_dict=False)
            assert any(torch.is_tensor(part) and torch.equal(part, wanted) for part in found)
        assert handle.tally.batches == 0
        assert handle.tally.left[ONE_PER_ROW] == 2


EVERY = {
    **TOWERS,
    **HOOKED,
    "XLM-R": transformers.XLMRobertaModel,
    "ELECTRA": transformers.ElectraModel,
    "Chinese CLIP": transformers.ChineseCLIPTextModel,
}
"""Towers, and models with poolers of other kinds, or with none."""


@pytest.mark.parametrize("tower", EVERY)
@pytest.mark.parametrize("mode", ["eval", "train"])
def test_by_default_states_and_vectors_are_those_of_stock(tower, mode):
    """By a proof of `enable`, with gradients; in stock, too, rows differ."""
    name = name_of(tower)
    stock, calls = build(EVERY[tower]).train(mode == "train"), Vectors(name)
    must_be_exact(partial(copy.deepcopy, stock), calls.batch)
    found, alone = (run(stock).documents[: len(LENGTHS)] for run in (calls.of_batch, calls.alone))
    if name != "last_hidden_state":
        assert error(found[0], found[1]) > LEAK
        # SigLIP reads the last column, padded or not
        assert "SigLIP" in tower or error(torch.cat(found), torch.cat(alone)) <= FLOAT64


@pytest.mark.parametrize("padding", [0, 3], ids=["", "padding is no document"])
@pytest.mark.parametrize("tower", TOWERS)
def test_packed_rows_give_a_vector_for_each_document(tower, padding):
    stock, calls = build(TOWERS[tower]), Vectors(name_of(tower), padding)
    assert len(stock(**packed())[calls.name]) == 1
    serves(stock, calls)


@pytest.mark.parametrize("tower", ["CLIP", "SigLIP", "OWL-ViT"])
def test_a_row_as_long_as_a_vector_is_not_taken_for_one(tower):
    """26 real tokens, vectors of 26 numbers: (1, 26) has the shape of a value for each token."""
    cls = TOWERS[tower]
    sizes = {
        "hidden_size": 26,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "projection_size": 26,
    }
    own = tiny.config(cls.config_class.model_type)
    stock = build(cls, **{key: value for key, value in sizes.items() if hasattr(own, key)})
    serves(stock, Vectors(name_of(tower)))


@pytest.mark.parametrize("tower", [name for name in TOWERS if not name.startswith(("Alt", "DPR"))])
def test_rows_of_more_tokens_than_positions(tower):
    """26 tokens for 12 positions: the embeddings of these towers refuse such a row."""
    stock = build(TOWERS[tower], max_position_embeddings=12)
    with pytest.raises((ValueError, RuntimeError, IndexError)):
        stock(**packed())
    serves(stock, Vectors(name_of(tower)))


@pytest.mark.parametrize("kind", HOOKED)
def test_poolers_that_are_modules_run_without_padding(kind):
    stock, calls = build(HOOKED[kind]), Vectors("pooler_output")
    model = copy.deepcopy(stock)
    with packs_at_once(model, verify=False) as handle:
        one = {key: value[1:2] for key, value in padded().items()}
        assert error(model(**one).pooler_output, stock(**one).pooler_output) <= FLOAT64
        for _ in range(2):  # the second call knows what the first has seen
            check(calls.of_batch(model), calls.of_batch(stock))
            check(calls.of_row(model), calls.alone(stock))
        assert handle.tally.batches == 3
        vectors = model(**packed(), return_dict=False)[1]
        assert error(vectors, model(**packed(3)).pooler_output) <= FLOAT64
        assert len(model(input_ids=packed()["input_ids"]).pooler_output) == 1


def test_arguments_that_cannot_be_told_by_document_are_refused():
    model = build(TOWERS["CLIP"])
    with autopack.enable(model, verify=False), refused("argument-of-no-document"):
        model(**packed(), weights=torch.ones(7))


def test_a_head_of_ones_own_on_such_a_tower():
    class Head(transformers.CLIPPreTrainedModel):
        config_class = transformers.CLIPTextConfig

        def __init__(self, config):
            super().__init__(config)
            self.tower = transformers.CLIPTextModel(config)
            self.score = nn.Linear(config.hidden_size, 3)
            self.post_init()

        def get_input_embeddings(self):
            return self.tower.get_input_embeddings()

        def forward(self, input_ids=None, attention_mask=None, position_ids=None, labels=None):
            pooled = self.tower(
                input_ids, attention_mask=attention_mask, position_ids=position_ids
            ).pooler_output
            return transformers.modeling_outputs.SequenceClassifierOutput(logits=self.score(pooled))

    serves(Head(tiny.config("clip_text_model")).double().eval(), Vectors("logits"))
