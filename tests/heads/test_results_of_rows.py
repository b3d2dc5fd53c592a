"""Forwards that make one result of every row by their own code: text towers that pick the state of one token.

References are the stock padded batch and the documents alone, in float64; errors are relative to the standard deviation
of what is expected. A vector of another token moves it by more than `LEAK`.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.altclip.modeling_altclip import AltCLIPTextModel
from transformers.models.metaclip_2.modeling_metaclip_2 import MetaClip2TextModel
from transformers.models.siglip2.modeling_siglip2 import Siglip2TextModel
from transformers.models.x_clip.modeling_x_clip import XCLIPTextModel

import autopack
from autopack import tiny
from autopack.calls.outputs import ONE_PER_ROW
from autopack.tiny.models import randomize
from tests.conftest import FLOAT64, LEAK, error
from tests.engine import Limits, Result, must_be_exact
from tests.support.padded import packs_at_once, tally_of
from tests.support.refusals import refused

pytestmark = pytest.mark.usefixtures("nothing_left_behind")
TOWERS: dict[str, tuple[Any, str]] = {
    "AltCLIP": (AltCLIPTextModel, "pooler_output"),
    "CLIP": (transformers.CLIPTextModel, "pooler_output"),
    "CLIP with projection": (transformers.CLIPTextModelWithProjection, "text_embeds"),
    "CLIPSeg": (transformers.CLIPSegTextModel, "pooler_output"),
    "DPR": (transformers.DPRContextEncoder, "pooler_output"),
    "DPR questions": (transformers.DPRQuestionEncoder, "pooler_output"),
    "MetaCLIP 2": (MetaClip2TextModel, "pooler_output"),
    "OWL-ViT": (transformers.OwlViTTextModel, "pooler_output"),
    "OWLv2": (transformers.Owlv2TextModel, "pooler_output"),
    "SigLIP": (transformers.SiglipTextModel, "pooler_output"),
    "SigLIP 2": (Siglip2TextModel, "pooler_output"),
    "X-CLIP": (XCLIPTextModel, "pooler_output"),
}
HOOKED = {
    "BERT": transformers.BertModel,
    "RoBERTa": transformers.RobertaModel,
    "ALBERT": transformers.AlbertModel,
    "MPNet": transformers.MPNetModel,
}
"""Poolers that are modules, whose hook gives them the rows of the batch."""
LENGTHS = (9, 5, 7, 5)
MASK = (torch.arange(9) < torch.tensor(LENGTHS)[:, None]).long()


def build(cls: Any, **config: Any) -> Any:
    made = tiny.config(cls.config_class.model_type, **config)
    if hasattr(made, "is_decoder"):
        made.is_decoder = False
    model = cls(made).double().eval()
    randomize(model, 0)
    return model


def documents(seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    # the last token of each is the one that CLIP's kind looks for
    found = [torch.randint(8, 100, (n,), generator=generator) for n in LENGTHS]
    return [torch.cat([document[:-1], torch.tensor([2])]) for document in found]


def padded(found: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    ids = torch.nn.utils.rnn.pad_sequence(found, batch_first=True)
    return {"input_ids": ids, "attention_mask": MASK}


def packed(found: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    number = torch.repeat_interleave(torch.arange(1, 5), torch.tensor(LENGTHS))
    return {"input_ids": torch.cat(found)[None], "attention_mask": number[None]}


def agree(found: Any, expected: Any, name: str) -> None:
    assert found[name].shape == expected[name].shape
    assert error(found[name], expected[name]) <= FLOAT64
    real = MASK.bool()
    if "last_hidden_state" in expected:
        assert error(found.last_hidden_state[real], expected.last_hidden_state[real]) <= FLOAT64


def serves(model: Any, stock: Any, name: str) -> None:
    """Want stock's results of a padded batch, and of documents of a packed row what they get alone; twice."""
    found = documents()
    expected = torch.cat([stock(input_ids=document[None])[name] for document in found])
    for _ in range(2):  # the second call knows what the first has seen
        agree(model(**padded(found)), stock(**padded(found)), name)
        assert error(model(**packed(found))[name], expected) <= FLOAT64


@pytest.mark.parametrize("tower", TOWERS)
def test_padded_batches_give_a_vector_for_each_row(tower):
    cls, name = TOWERS[tower]
    stock = build(cls)
    model, first, second = copy.deepcopy(stock), padded(documents()), padded(documents(1))
    row = stock(**packed(documents()))[name]
    assert len(row) == 1  # what the forward makes of a row of all documents
    with packs_at_once(model, verify=False):
        for batch in (first, second):
            agree(model(**batch), stock(**batch), name)
        one = {key: value[1:2] for key, value in first.items()}
        agree_one = model(**one)[name], stock(**one)[name]
        assert error(*agree_one) <= FLOAT64
        tally = tally_of(model)
        assert tally.batches == 0
        assert tally.left[ONE_PER_ROW] == 3
        as_tuple = model(**second, return_dict=False)
        assert any(torch.is_tensor(part) and torch.equal(part, stock(**second)[name]) for part in as_tuple)


EVERY = {
    **TOWERS,
    **{name: (cls, "pooler_output") for name, cls in HOOKED.items()},
    "XLM-R": (transformers.XLMRobertaModel, "pooler_output"),
    "ELECTRA": (transformers.ElectraModel, "last_hidden_state"),
    "Chinese CLIP": (transformers.ChineseCLIPTextModel, "pooler_output"),
}
"""Towers, and models with poolers of other kinds, or with none."""


@pytest.mark.sampled(4)
@pytest.mark.parametrize("tower", EVERY)
@pytest.mark.parametrize("mode", ["eval", "train"])
def test_by_default_states_and_vectors_are_those_of_stock(tower, mode):
    """By a proof of `enable`, with gradients; in stock, too, rows differ."""
    cls, name = EVERY[tower]
    stock = build(cls).train(mode == "train")

    def run(model: Any) -> Result:
        output = model(**padded(documents()))
        states = output.get("last_hidden_state", ())
        parts = [row[real] for row, real in zip(states, MASK.bool(), strict=len(states) > 0)]
        if name != "last_hidden_state":
            assert len(output[name]) == len(LENGTHS)
            parts += [*output[name][:, None]]
        loss = sum((number + 1) * part.square().sum() for number, part in enumerate(parts))
        return Result.of(model, parts, loss, Limits(FLOAT64))

    must_be_exact(partial(copy.deepcopy, stock), ((run, run),))
    first, second, *_ = run(stock).documents[-len(LENGTHS) :]
    assert error(first[:1], second[:1]) > LEAK
    if name != "last_hidden_state" and "SigLIP" not in tower:  # SigLIP reads the last column, padded or not
        alone = torch.cat([stock(input_ids=document[None])[name] for document in documents()])
        assert error(stock(**padded(documents()))[name], alone) <= FLOAT64


@pytest.mark.parametrize("tower", TOWERS)
def test_packed_rows_give_a_vector_for_each_document(tower):
    cls, name = TOWERS[tower]
    stock = build(cls)
    model, found = copy.deepcopy(stock), documents()
    parts = [stock(input_ids=document[None]) for document in found]
    expected = torch.cat([part[name] for part in parts])
    assert error(stock(**packed(found))[name], expected[-1:]) > LEAK  # stock: one vector, of the row
    with autopack.enable(model, verify=False):
        output = model(**packed(found))
        assert error(output[name], expected) <= FLOAT64
        if "last_hidden_state" in output:
            states = torch.cat([part.last_hidden_state for part in parts], dim=1)
            assert error(output.last_hidden_state, states) <= FLOAT64
        row = packed(found)
        # no padding tokens: DPR makes a mask of those itself, and is refused
        row = {
            key: torch.nn.functional.pad(value, (0, 3), value=5 * (key == "input_ids")) for key, value in row.items()
        }
        assert error(model(**row)[name], expected) <= FLOAT64  # padding is no document


@pytest.mark.parametrize("tower", ["CLIP", "SigLIP", "DPR"])
def test_gradients_are_those_of_the_batch(tower):
    cls, name = TOWERS[tower]
    stock = build(cls).train()
    model, found = copy.deepcopy(stock), documents()
    stock(**padded(found))[name].square().sum().backward()
    with autopack.enable(model, verify=False):
        model(**padded(found))[name].square().sum().backward()
        for one, other in zip(model.parameters(), stock.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-9, atol=1e-9)
        stock.zero_grad(), model.zero_grad()
        for document in found:
            stock(input_ids=document[None])[name].square().sum().backward()
        model(**packed(found))[name].square().sum().backward()
        for one, other in zip(model.parameters(), stock.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("tower", ["CLIP", "SigLIP", "OWL-ViT"])
def test_a_row_as_long_as_a_vector_is_not_taken_for_one(tower):
    """26 real tokens, vectors of 26 numbers: (1, 26) has the shape of a value for each token."""
    cls, name = TOWERS[tower]
    sizes = {"hidden_size": 26, "num_attention_heads": 2, "intermediate_size": 32, "projection_size": 26}
    stock = build(cls, **{k: v for k, v in sizes.items() if hasattr(tiny.config(cls.config_class.model_type), k)})
    with autopack.enable(copy.deepcopy(stock), verify=False) as handle:
        serves(handle.model, stock, name)


@pytest.mark.parametrize("tower", [name for name in TOWERS if not name.startswith(("Alt", "DPR"))])
def test_rows_of_more_tokens_than_positions(tower):
    """26 tokens for 12 positions: the embeddings of these towers refuse such a row."""
    cls, name = TOWERS[tower]
    stock = build(cls, max_position_embeddings=12)
    with pytest.raises((ValueError, RuntimeError, IndexError)):
        stock(**packed(documents()))
    with autopack.enable(copy.deepcopy(stock), verify=False) as handle:
        serves(handle.model, stock, name)


@pytest.mark.parametrize("kind", HOOKED)
def test_poolers_that_are_modules_run_without_padding(kind):
    stock = build(HOOKED[kind])
    model, found = copy.deepcopy(stock), documents()
    with packs_at_once(model, verify=False):
        one = {key: value[1:2] for key, value in padded(found).items()}
        assert error(model(**one).pooler_output, stock(**one).pooler_output) <= FLOAT64
        serves(model, stock, "pooler_output")
        assert tally_of(model).batches == 3


def test_documents_of_one_token_each_have_poolers_too():
    """As many rows as tokens: vectors of rows have the shape of values of flattened tokens."""
    stock = build(transformers.BertModel)
    model = copy.deepcopy(stock)
    batch = {"input_ids": torch.tensor([[5, 0], [6, 0], [7, 0]]), "attention_mask": torch.tensor([[1, 0]] * 3)}
    with packs_at_once(model, verify=False):
        assert error(model(**batch).pooler_output, stock(**batch).pooler_output) <= FLOAT64
        assert tally_of(model).batches == 1


def test_a_tower_inside_a_model():
    config = tiny.config("clip")
    stock = transformers.CLIPModel(config).double().eval()
    randomize(stock, 0)
    model, batch = copy.deepcopy(stock), padded(documents())
    size = config.vision_config.image_size
    images = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0)).double()
    with autopack.enable(model, verify=False):
        for _ in range(2):
            found, expected = model(**batch, pixel_values=images), stock(**batch, pixel_values=images)
            assert error(found.logits_per_text, expected.logits_per_text) <= FLOAT64


class Summing(transformers.BertPreTrainedModel):
    """Somebody's forward that makes more than vectors of a row."""

    def __init__(self, config):
        super().__init__(config)
        self.bert = transformers.BertModel(config, add_pooling_layer=False)
        self.post_init()

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, weights=None, **kwargs):
        states = self.bert(input_ids, attention_mask=attention_mask, position_ids=position_ids).last_hidden_state
        return BaseModelOutputWithPooling(last_hidden_state=states, pooler_output=states[:, -3:].sum(1))


def test_arguments_that_cannot_be_told_by_document_are_refused():
    model = build(Summing)
    with autopack.enable(model, verify=False), refused("argument-of-no-document", match="what of weights belongs to"):
        model(**packed(documents()), weights=torch.ones(7))


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
            pooled = self.tower(input_ids, attention_mask=attention_mask, position_ids=position_ids).pooler_output
            return transformers.modeling_outputs.SequenceClassifierOutput(logits=self.score(pooled))

    model = Head(tiny.config("clip_text_model")).double().eval()
    with autopack.enable(copy.deepcopy(model), verify=False) as handle:
        serves(handle.model, model, "logits")


def test_a_vector_that_is_one_narrower_than_the_row_is_still_one_of_the_row():
    from autopack.calls.outputs import of_each_row

    output = {"pooler_output": torch.zeros(1, 64), "log_probs": torch.zeros(1, 32), "logits": torch.zeros(1, 65, 8)}
    assert of_each_row(output, 1, 65, frozenset({64})) == ["pooler_output", "log_probs"]
    assert of_each_row({"log_probs": torch.zeros(1, 64)}, 1, 65, frozenset({32})) == []
