"""Models as code from before transformers' attention interface is written: masks, positions and
biases of their own."""

import math

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from tests.engine import next_token_loss

HEADS, SIZE, COLUMNS = 2, 8, 64


class OldConfig(PretrainedConfig):
    model_type = "old"


class OldPositionalTable(nn.Embedding):
    """Table of positions that numbers tokens by adding up a mask, as OPT's did."""

    def forward(self, attention_mask):
        return super().forward(attention_mask.long().cumsum(1) * attention_mask.long())


class OldEmbeddings(nn.Module):
    """Embeddings of tokens and columns in one module, as DistilBERT's were."""

    def __init__(self):
        super().__init__()
        self.words, self.position_embeddings = nn.Embedding(128, 16), nn.Embedding(COLUMNS, 16)

    def forward(self, input_ids):
        return self.words(input_ids) + self.position_embeddings(torch.arange(input_ids.shape[1]))


class OldRotary(nn.Module):
    """Table of as many rotations as a call has tokens."""

    def forward(self, value, seq_len):
        angles = torch.arange(seq_len, dtype=value.dtype)[:, None] * (
            0.5 ** torch.arange(SIZE // 2, dtype=value.dtype)
        )
        angles = angles.repeat(1, 2)
        return angles.cos(), angles.sin()


def rotate(states, cos, sin, at):
    """Return states (rows, heads, columns, size) rotated by their positions `at`."""
    left, right = states.chunk(2, -1)
    return states * cos[at][:, None] + torch.cat([-right, left], -1) * sin[at][:, None]


def by_heads(states):
    """Return queries, keys and values, each (rows, heads, columns, size)."""
    return states.unflatten(-1, (3, HEADS, SIZE)).permute(2, 0, 3, 1, 4)


def together(states):
    """Return states (rows, heads, columns, size) as (rows, columns, heads * size)."""
    return states.transpose(1, 2).flatten(2)


class OldAttention(nn.Module):
    """Attention by heads; `form` is the shape of its mask."""

    def __init__(self, form, rotates):
        super().__init__()
        self.form, self.rotary_emb = form, OldRotary() if rotates else None
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, hidden, attention_mask=None, position_ids=None):
        columns = hidden.shape[1]
        query, key, value = by_heads(self.qkv(hidden))
        if self.rotary_emb is not None:
            cos, sin = self.rotary_emb(value, seq_len=columns)
            query, key = rotate(query, cos, sin, position_ids), rotate(key, cos, sin, position_ids)
        return (self.out(together(self._attend(query, key, value, attention_mask))),)

    def _attend(self, query, key, value, mask):
        scores = torch.matmul(query, key.transpose(2, 3)) / math.sqrt(SIZE)
        if self.form == "pairs":  # (columns, columns), for all rows, and nothing for padding
            scores = scores.masked_fill(mask.bool(), float("-inf"))
        elif self.form == "queries first":  # (rows, columns, 1, columns)
            scores = torch.where(mask.transpose(1, 2), scores, torch.finfo(scores.dtype).min)
        else:
            scores = scores + mask
        return nn.functional.softmax(scores, -1) @ value


class OldBiasAttention(nn.Module):
    """Attention as in T5: the first layer makes a bias with the mask in it, and hands both on."""

    def __init__(self, has_bias):
        super().__init__()
        self.has_relative_attention_bias, self.n_heads, self.gradient_checkpointing = (
            has_bias,
            HEADS,
            False,
        )
        self.qkv = nn.Linear(16, 48)
        if has_bias:
            self.table = nn.Embedding(2 * COLUMNS, HEADS)

    def compute_bias(self, queries, keys, device=None):
        distance = torch.arange(keys)[None] - torch.arange(queries)[:, None] + COLUMNS
        return self.table(distance).permute(2, 0, 1)[None]

    def forward(
        self,
        hidden_states,
        mask=None,
        key_value_states=None,
        position_bias=None,
        past_key_value=None,
    ):
        columns = hidden_states.shape[1]
        query, key, value = by_heads(self.qkv(hidden_states))
        if position_bias is None:
            position_bias = self.compute_bias(columns, columns) + mask
        weights = nn.functional.softmax(
            torch.matmul(query, key.transpose(2, 3)) + position_bias, -1
        )
        return together(torch.matmul(weights, value)), None, position_bias


def causal_mask(form, mask, like):
    """Return the mask that a model made for a call from the mask of padding."""
    columns = mask.shape[1]
    seen = torch.ones(columns, columns, dtype=torch.bool).tril() & mask.bool()[:, None]
    if form == "pairs":
        return torch.ones(columns, columns).triu(1)
    if form == "queries first":
        return seen[:, :, None]
    return torch.zeros_like(seen, dtype=like.dtype).masked_fill(~seen, torch.finfo(like.dtype).min)[
        :, None
    ]


class OldForCausalLM(PreTrainedModel):
    """Causal model of two layers, whose class attributes choose attention, mask and positions."""

    config_class = OldConfig
    form, kind, rotates, positions = "additive", OldAttention, False, OldPositionalTable

    def __init__(self, config):
        super().__init__(config)
        self.tokens = OldEmbeddings() if self.positions is OldEmbeddings else nn.Embedding(128, 16)
        if self.positions is OldPositionalTable:
            self.embed_positions = OldPositionalTable(COLUMNS, 16)
        self.layers = nn.ModuleList(self.kind(self.form, self.rotates) for _ in range(2))
        self.head = nn.Linear(16, 128)

    def get_input_embeddings(self):
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
        loss = None if labels is None else next_token_loss(logits, labels)
        return CausalLMOutput(loss=loss, logits=logits)

    def forward(self, input_ids=None, attention_mask=None, labels=None, use_cache=None):
        return self._run(input_ids, attention_mask, labels=labels)


class ByTable(OldForCausalLM):
    """Model with OPT's numbering, and a mask to add."""


class HandingOnToTheLoss(PreTrainedModel):
    """Model whose head hands other arguments to its loss alone, as BioGPT's from 4.48 to 4.52."""

    config_class, base_model_prefix = OldConfig, "model"

    def __init__(self, config):
        super().__init__(config)
        self.model = ByTable(config)

    def get_input_embeddings(self):
        return self.model.get_input_embeddings()

    def _loss(self, logits, labels, position_ids=None):
        return self.model._output(logits, labels).loss

    def forward(self, input_ids=None, attention_mask=None, labels=None, use_cache=None, **others):
        logits = self.model(input_ids, attention_mask).logits
        return CausalLMOutput(loss=self._loss(logits, labels, **others), logits=logits)


class ByColumns(OldForCausalLM):
    """Model that numbers columns inside of its embeddings."""

    positions = OldEmbeddings


class PairsForAll(OldForCausalLM):
    """Model with one causal mask (columns, columns) for all rows, without padding."""

    form = "pairs"


class QueriesFirst(OldForCausalLM):
    """Model with masks (rows, columns, 1, columns), queries first."""

    form = "queries first"


class Rotating(OldForCausalLM):
    """Model that takes positions, and cuts its table of rotations."""

    positions, rotates = None, True

    def forward(
        self, input_ids=None, attention_mask=None, position_ids=None, labels=None, use_cache=None
    ):
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1]).expand_as(input_ids)
        return self._run(input_ids, attention_mask, position_ids, labels)


class BiasedConfig(PretrainedConfig):
    model_type = "old-biased"


class Biased(OldForCausalLM):
    """Model whose layers hand a bias on."""

    config_class, positions = BiasedConfig, None

    def __init__(self, config):
        super().__init__(config)
        self.layers = nn.ModuleList(OldBiasAttention(number == 0) for number in range(3))

    def _run(self, input_ids, attention_mask, position_ids=None, labels=None):
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        hidden, bias = self.tokens(input_ids), None
        for layer in self.layers:
            made, _, bias = layer(
                hidden, mask=causal_mask("additive", mask, hidden), position_bias=bias
            )
            hidden = hidden + made
        return self._output(self.head(hidden), labels)


class OldForgetfulAttention(OldBiasAttention):
    """Attention as in T5 that hands on another tensor for the bias."""

    def forward(
        self,
        hidden_states,
        mask=None,
        key_value_states=None,
        position_bias=None,
        past_key_value=None,
    ):
        states, _, bias = super().forward(
            hidden_states, mask, key_value_states, position_bias, past_key_value
        )
        return states, None, bias + 0


class Forgetful(Biased):
    """Model whose layers make another bias of the one that they are given."""

    def __init__(self, config):
        super().__init__(config)
        self.layers = nn.ModuleList(OldForgetfulAttention(number == 0) for number in range(3))
