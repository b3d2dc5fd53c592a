"""Attention in a model's own code, as releases before 4.48 and models from elsewhere have it: found by what it does.

One small decoder in the forms that transformers 4.44 to 4.57 has them: positions by column, tables of rotations cut to
the tokens of a call, masks of several shapes, a bias that layers hand on. No family names any of it.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

import autopack
from autopack import UnsupportedModel, registry
from autopack.inspection import source
from autopack.mixers import RELATIVE
from autopack.registry import Family
from tests.conftest import FLOAT64, LEAK, alone, alone_loss, error, gradients, positions, token_ids, weights_like

ROWS = ((7, 1, 9, 3), (2, 14, 4))
HEADS, SIZE, COLUMNS = 2, 8, 64


class OldConfig(PretrainedConfig):
    model_type = "old"


class OldPositionalTable(nn.Embedding):
    """Numbers tokens by adding up a mask, as OPT's did."""

    def forward(self, attention_mask: torch.Tensor) -> torch.Tensor:
        return super().forward(attention_mask.long().cumsum(1) * attention_mask.long())


class OldEmbeddings(nn.Module):
    """Tokens and columns in one module, as DistilBERT's were."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.position_embeddings = nn.Embedding(128, 16), nn.Embedding(COLUMNS, 16)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.words(input_ids) + self.position_embeddings(torch.arange(input_ids.shape[1]))


class OldRotary(nn.Module):
    """A table of as many rotations as a call has tokens."""

    def forward(self, value: torch.Tensor, seq_len: int) -> tuple[torch.Tensor, torch.Tensor]:
        angles = torch.arange(seq_len, dtype=value.dtype)[:, None] * (0.5 ** torch.arange(SIZE // 2, dtype=value.dtype))
        angles = angles.repeat(1, 2)
        return angles.cos(), angles.sin()


def rotate(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    left, right = states.chunk(2, -1)
    return states * cos[at][:, None] + torch.cat([-right, left], -1) * sin[at][:, None]


class OldAttention(nn.Module):
    """Attention by heads; `form` says of which shape its mask is."""

    def __init__(self, form: str, rotates: bool):
        super().__init__()
        self.form, self.rotary_emb = form, OldRotary() if rotates else None
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(
        self, hidden: torch.Tensor, attention_mask: torch.Tensor | None = None, position_ids: torch.Tensor | None = None
    ) -> tuple[torch.Tensor]:
        rows, columns, _ = hidden.shape
        query, key, value = (s.view(rows, columns, HEADS, SIZE).transpose(1, 2) for s in self.qkv(hidden).chunk(3, -1))
        if self.rotary_emb is not None:
            cos, sin = self.rotary_emb(value, seq_len=columns)
            query, key = rotate(query, cos, sin, position_ids), rotate(key, cos, sin, position_ids)
        return (self.out(self._attend(query, key, value, attention_mask).transpose(1, 2).reshape(rows, columns, 16)),)

    def _attend(self, query, key, value, mask):
        scores = torch.matmul(query, key.transpose(2, 3)) / math.sqrt(SIZE)
        if self.form == "pairs":  # (columns, columns), for all rows, and nothing for padding
            scores = scores.masked_fill(mask.bool(), float("-inf"))
        elif self.form == "queries first":  # (rows, columns, 1, columns)
            scores = torch.where(mask.transpose(1, 2), scores, torch.finfo(scores.dtype).min)
        else:
            scores = scores + mask
        return nn.functional.softmax(scores, -1) @ value


class OldKernelAttention(OldAttention):
    """The class beside it for sdpa, which falls back to that above it, as they did."""

    def forward(self, hidden, attention_mask=None, position_ids=None):
        if attention_mask is None:
            return super().forward(hidden, attention_mask, position_ids)
        rows, columns, _ = hidden.shape
        query, key, value = (s.view(rows, columns, HEADS, SIZE).transpose(1, 2) for s in self.qkv(hidden).chunk(3, -1))
        made = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask)
        return (self.out(made.transpose(1, 2).reshape(rows, columns, 16)),)


class OldBiasAttention(nn.Module):
    """T5's: the first layer makes a bias of distances, counts the mask in, and hands both on."""

    def __init__(self, has_bias: bool):
        super().__init__()
        self.has_relative_attention_bias, self.n_heads, self.gradient_checkpointing = has_bias, HEADS, False
        self.qkv = nn.Linear(16, 48)
        if has_bias:
            self.table = nn.Embedding(2 * COLUMNS, HEADS)

    def compute_bias(self, queries: int, keys: int, device=None) -> torch.Tensor:
        distance = torch.arange(keys)[None] - torch.arange(queries)[:, None] + COLUMNS
        return self.table(distance).permute(2, 0, 1)[None]

    def forward(self, hidden_states, mask=None, key_value_states=None, position_bias=None, past_key_value=None):
        rows, columns, _ = hidden_states.shape
        states = self.qkv(hidden_states).chunk(3, -1)
        query, key, value = (s.view(rows, columns, HEADS, SIZE).transpose(1, 2) for s in states)
        if position_bias is None:
            position_bias = self.compute_bias(columns, columns) + mask
        weights = nn.functional.softmax(torch.matmul(query, key.transpose(2, 3)) + position_bias, -1)
        return torch.matmul(weights, value).transpose(1, 2).reshape(rows, columns, 16), None, position_bias


def causal_mask(form: str, mask: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The mask as a model made it for a call, from that of padding."""
    columns = mask.shape[1]
    seen = torch.ones(columns, columns, dtype=torch.bool).tril() & mask.bool()[:, None]
    if form == "pairs":
        return torch.ones(columns, columns).triu(1)
    if form == "queries first":
        return seen[:, :, None]
    return torch.zeros_like(seen, dtype=like.dtype).masked_fill(~seen, torch.finfo(like.dtype).min)[:, None]


class OldForCausalLM(PreTrainedModel):
    config_class = OldConfig
    form, kind, rotates, positions = "additive", OldAttention, False, OldPositionalTable

    def __init__(self, config: OldConfig):
        super().__init__(config)
        self.tokens = OldEmbeddings() if self.positions is OldEmbeddings else nn.Embedding(128, 16)
        if self.positions is OldPositionalTable:
            self.embed_positions = OldPositionalTable(COLUMNS, 16)
        self.layers = nn.ModuleList(self.kind(self.form, self.rotates) for _ in range(2))
        self.head = nn.Linear(16, 128)

    def get_input_embeddings(self) -> nn.Module:
        return self.tokens.words if self.positions is OldEmbeddings else self.tokens

    def _run(self, input_ids, attention_mask, position_ids=None, labels=None):
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        hidden = self.tokens(input_ids)
        if self.positions is OldPositionalTable:
            hidden = hidden + self.embed_positions(mask)
        for layer in self.layers:
            hidden = hidden + layer(hidden, causal_mask(self.form, mask, hidden), position_ids)[0]
        return self._output(self.head(hidden), labels)

    def _output(self, logits, labels):
        loss = None
        if labels is not None:
            loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutput(loss=loss, logits=logits)

    def forward(self, input_ids=None, attention_mask=None, labels=None, use_cache=None):
        return self._run(input_ids, attention_mask, labels=labels)


class ByTable(OldForCausalLM):
    """OPT's numbering, and a mask to add."""


class HandingOnToTheLoss(PreTrainedModel):
    """BioGPT from 4.48 to 4.52: what its head takes by any name goes to its loss, and nothing to the backbone."""

    config_class, base_model_prefix = OldConfig, "model"

    def __init__(self, config: OldConfig):
        super().__init__(config)
        self.model = ByTable(config)

    def get_input_embeddings(self) -> nn.Module:
        return self.model.get_input_embeddings()

    def _loss(self, logits, labels, position_ids=None):
        return self.model._output(logits, labels).loss

    def forward(self, input_ids=None, attention_mask=None, labels=None, use_cache=None, **others):
        logits = self.model(input_ids, attention_mask).logits
        return CausalLMOutput(loss=self._loss(logits, labels, **others), logits=logits)


class ByColumns(OldForCausalLM):
    positions = OldEmbeddings


class InAKernel(OldForCausalLM):
    kind = OldKernelAttention


class PairsForAll(OldForCausalLM):
    form = "pairs"


class QueriesFirst(OldForCausalLM):
    form = "queries first"


class Rotating(OldForCausalLM):
    """Takes positions, and cuts its table of rotations."""

    positions, rotates = None, True

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, labels=None, use_cache=None):
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1]).expand_as(input_ids)
        return self._run(input_ids, attention_mask, position_ids, labels)


class BiasedConfig(PretrainedConfig):
    model_type = "old-biased"


class Biased(OldForCausalLM):
    """Layers hand a bias on."""

    config_class, positions = BiasedConfig, None

    def __init__(self, config: OldConfig):
        super().__init__(config)
        self.layers = nn.ModuleList(OldBiasAttention(number == 0) for number in range(3))

    def _run(self, input_ids, attention_mask, position_ids=None, labels=None):
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        hidden, bias = self.tokens(input_ids), None
        for layer in self.layers:
            made, _, bias = layer(hidden, mask=causal_mask("additive", mask, hidden), position_bias=bias)
            hidden = hidden + made
        return self._output(self.head(hidden), labels)


FORMS = [ByTable, HandingOnToTheLoss, ByColumns, InAKernel, PairsForAll, QueriesFirst, Rotating, Biased]


@pytest.fixture(autouse=True, scope="module")
def of_biases():
    """The way of T5, which a family has to name: nothing in the code says that a bias is handed on."""
    family = Family("biases", frozenset({"old-biased"}), "bias", mixers={"OldBiasAttention": RELATIVE}, positions=False)
    registry.register(family)
    yield
    registry._registered.remove(family)


def build(kind) -> OldForCausalLM:
    torch.manual_seed(0)
    model = kind(kind.config_class(pad_token_id=0)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    return model.eval()


def packed(rows=ROWS, seed: int = 0) -> dict[str, torch.Tensor]:
    ids = token_ids(len(rows), sum(rows[0]), seed)
    return {"input_ids": ids, "position_ids": positions(*rows)}


def leak_of_stock(model: OldForCausalLM, row: dict[str, torch.Tensor], expected: torch.Tensor) -> float:
    taken = {n: v for n, v in row.items() if n == "input_ids" or isinstance(model, Rotating)}
    return error(model(**taken).logits, expected)


@pytest.mark.parametrize("kind", FORMS)
def test_documents_of_packed_rows_get_what_they_get_alone(kind):
    model, row = build(kind), packed()
    expected = alone(model, row["input_ids"], *ROWS)
    wanted_loss = alone_loss(model, row["input_ids"], *ROWS)
    weights = weights_like(expected)
    (expected * weights).sum().backward()
    wanted = gradients(model)
    assert leak_of_stock(model, row, expected) > LEAK
    with autopack.enable(model) as handle:
        assert "by a twin of " in handle.verified
        found = model(**row).logits
        assert error(found, expected) < FLOAT64
        (found * weights).sum().backward()
        assert max(error(a, b) for a, b in zip(gradients(model), wanted, strict=True)) < 1e-8  # of sums of many
        assert abs(float(model(**row, labels=row["input_ids"]).loss / wanted_loss) - 1) < 1e-9
    assert leak_of_stock(model, row, expected) > LEAK


@pytest.mark.parametrize("kind", FORMS)
def test_another_document_changes_nothing(kind):
    model, row = build(kind), packed()
    with autopack.enable(model):
        before = model(**row).logits
        row["input_ids"][0, 8:17] = row["input_ids"][1, 8:17]  # the third document of the first row
        after = model(**row).logits
    changed = (before - after).abs().amax(-1)
    assert float(changed[0, 8:17].max()) > LEAK
    changed[0, 8:17] = 0
    assert float(changed.max()) < FLOAT64


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", [kind for kind in FORMS if kind is not PairsForAll])  # which takes no padding mask
def test_padded_batches_are_those_of_stock(kind, side):
    model, lengths = build(kind), (5, 12, 9)
    ids = token_ids(3, 12)
    mask = torch.stack([(torch.arange(12) < n).long() for n in lengths])
    mask = mask.flip(1) if side == "left" else mask
    batch = {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}
    batch["labels"] = ids.masked_fill((mask == 0) | (nn.functional.pad(mask, (1, 0))[:, :-1] == 0), -100)
    stock = model(**batch)
    with autopack.enable(model):
        found = model(**batch)
    assert error(found.logits[mask.bool()], stock.logits[mask.bool()]) < FLOAT64
    assert abs(float(found.loss / stock.loss) - 1) < 1e-9


@pytest.mark.exhaustive
@settings(max_examples=12)
@given(st.lists(st.integers(1, 12), min_size=2, max_size=6), st.sampled_from(FORMS), st.integers(0, 99))
def test_any_layout(lengths, kind, seed):
    model, row = build(kind), packed((tuple(lengths),), seed)
    expected = alone(model, row["input_ids"], tuple(lengths))
    with autopack.enable(model):
        assert error(model(**row).logits, expected) < FLOAT64


@pytest.mark.parametrize("kind", [ByTable, InAKernel, Rotating])
def test_without_looking_at_the_code_the_model_is_refused(kind, monkeypatch):
    monkeypatch.setattr("autopack.inspection.modules.attends_by_itself", lambda cls: False)
    with pytest.raises(UnsupportedModel, match="no place to keep documents apart"):
        autopack.enable(build(kind))


def test_where_positions_are_not_counted_anew_the_audit_refuses(monkeypatch):
    monkeypatch.setattr("autopack.inspection.modules.counting_columns", lambda root, mixers: ([], []))
    with pytest.raises(UnsupportedModel, match="audited it, and it is not exact"):
        autopack.enable(build(ByTable))


class OldForgetfulAttention(OldBiasAttention):
    def forward(self, hidden_states, mask=None, key_value_states=None, position_bias=None, past_key_value=None):
        states, _, bias = super().forward(hidden_states, mask, key_value_states, position_bias, past_key_value)
        return states, None, bias + 0


class Forgetful(Biased):
    """Layers make another bias of the one that they are given."""

    def __init__(self, config: OldConfig):
        super().__init__(config)
        self.layers = nn.ModuleList(OldForgetfulAttention(number == 0) for number in range(3))


def test_a_bias_that_is_not_handed_on_is_refused():
    with pytest.raises(UnsupportedModel, match="does not hand on the bias"):
        autopack.enable(build(Forgetful))


def test_rotations_that_are_cut_are_seen_in_the_code():
    assert source.cuts_rotations(OldAttention)
    assert source.cuts_rotations(OldKernelAttention)  # by the forward above it
    assert not source.cuts_rotations(OldBiasAttention)


@pytest.mark.parametrize("cls", [OldPositionalTable, OldEmbeddings, OldRotary, OldForCausalLM, nn.Linear])
def test_what_does_not_weigh_tokens_is_no_attention(cls):
    assert not source.attends_by_itself(cls)


class Mine(nn.Module):
    """Attention without rotations, as somebody writes it."""

    def __init__(self, size: int):
        super().__init__()
        self.qkv = nn.Linear(size, 3 * size)

    def forward(self, hidden_states, attention_mask=None, **kwargs):
        query, key, value = self.qkv(hidden_states).chunk(3, -1)
        scores = query @ key.transpose(1, 2) / query.shape[-1] ** 0.5
        later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        return scores.masked_fill(later, float("-inf")).softmax(-1) @ value, None


def llama_with(attention: nn.Module) -> PreTrainedModel:
    model = autopack.tiny.build("llama", dtype=torch.float64)
    model.model.layers[1].self_attn = attention.double()
    return model


def test_a_users_attention_in_a_layer_of_llama_is_served_after_an_audit():
    model = llama_with(Mine(64))
    row = packed()
    expected = alone(model, row["input_ids"], *ROWS)
    assert error(model(**row, use_cache=False).logits, expected) > LEAK
    with autopack.enable(model) as handle:
        assert "by an audit of this very model" in handle.verified
        assert error(model(**row).logits, expected) < FLOAT64


def test_a_users_attention_that_nothing_can_stand_at_is_refused():
    class Inside(Mine):
        """A class that is not found by its name."""

        def forward(self, hidden_states, attention_mask=None, **kwargs):
            return super().forward(hidden_states, attention_mask, **kwargs)

    with pytest.raises(UnsupportedModel, match="audited it, and it is not exact"):
        autopack.enable(llama_with(Inside(64)))
