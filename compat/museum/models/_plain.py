"""A tiny language model of the museum's own: plain, and sound in every call.

Exhibits override a method of `Plain`, or the part of it that mixes tokens. A part gets the states
of tokens (rows, columns, channels), the mask, the positions, and the numbers of the documents that
tokens belong to (rows, columns). Weights are random: nothing is trained.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput, MoeCausalLMOutputWithPast


class PlainConfig(PretrainedConfig):
    """The sizes of a `Plain`."""

    model_type = "museum"

    def __init__(
        self,
        vocab_size: int = 97,
        hidden_size: int = 16,
        num_attention_heads: int = 2,
        num_hidden_layers: int = 1,
        **others: Any,
    ):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_attention_heads = num_attention_heads
        self.num_hidden_layers = num_hidden_layers
        super().__init__(**others)


def begins(documents: Tensor) -> Tensor:
    """Return True at the first token of each document (rows, columns)."""
    first = torch.ones_like(documents[:, :1], dtype=torch.bool)
    return torch.cat([first, documents.diff() != 0], 1)


def places(documents: Tensor) -> Tensor:
    """Return each token's place in its document (rows, columns)."""
    columns = torch.arange(documents.shape[1], device=documents.device)
    return columns - torch.where(begins(documents), columns, 0).cummax(1).values


def together(documents: Tensor) -> Tensor:
    """Return True for two tokens of one document (rows, columns, columns)."""
    return documents[:, :, None] == documents[:, None]


def means(states: Tensor, documents: Tensor) -> Tensor:
    """Return the mean over a token's document for every token (rows, columns, channels)."""
    same = together(documents).to(states.dtype)
    return same @ states / same.sum(-1, keepdim=True)


class Attention(nn.Module):
    """Causal attention with rotations; the mask (rows, 1, columns, columns) is True where a token
    sees another."""

    def __init__(self, config: PlainConfig):
        super().__init__()
        self.heads = config.num_attention_heads
        self.inner = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.outer = nn.Linear(config.hidden_size, config.hidden_size)

    def angles(self, position_ids: Tensor) -> Tensor:
        """Return the angles by which queries and keys are turned (rows, columns, half of a
        head)."""
        half = self.outer.out_features // self.heads // 2
        return position_ids[..., None] * 0.5 ** torch.arange(half, device=position_ids.device)

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor, position_ids: Tensor, documents: Tensor
    ) -> Tensor:
        """Return the new states."""
        parts = self.inner(hidden_states).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        angles = self.angles(position_ids).to(hidden_states.dtype)[:, None]
        query, key, value = turn(parts[0], angles), turn(parts[1], angles), parts[2]
        scores = query @ key.mT / query.shape[-1] ** 0.5
        found = scores.masked_fill(~attention_mask, -torch.inf).softmax(-1) @ value
        return self.outer(found.transpose(1, 2).flatten(2))


def turn(states: Tensor, angles: Tensor) -> Tensor:
    """Return the halves of states turned against each other by angles."""
    one, two = states.chunk(2, -1)
    return torch.cat(
        [one * angles.cos() - two * angles.sin(), one * angles.sin() + two * angles.cos()], -1
    )


class Router(nn.Module):
    """Experts, of which every token gets the one that it scores highest."""

    def __init__(self, config: PlainConfig):
        super().__init__()
        self.gate = nn.Linear(config.hidden_size, 4)
        self.experts = nn.Parameter(
            torch.randn(4, config.hidden_size, config.hidden_size) / config.hidden_size**0.5
        )

    def chosen(self, scores: Tensor, documents: Tensor) -> Tensor:
        """Return True for the experts of each token (rows, columns, experts)."""
        return scores == scores.amax(-1, keepdim=True)

    def forward(self, hidden_states: Tensor, documents: Tensor, **others: Any) -> Tensor:
        """Return the new states."""
        scores = self.gate(hidden_states)
        weights = scores.softmax(-1) * self.chosen(scores, documents)
        return torch.einsum("rce,rcs,est->rct", weights, hidden_states, self.experts)


@dataclass
class Call:
    """The arguments of a call, and what a model makes of them: the number of each token's document
    in its row, and its position (rows, columns)."""

    input_ids: Tensor
    attention_mask: Tensor | None
    position_ids: Tensor | None
    documents: Tensor = field(init=False)
    positions: Tensor = field(init=False)


class Plain(PreTrainedModel):
    """A language model of one layer."""

    config_class = PlainConfig
    make_config: Callable[[], PlainConfig] = PlainConfig
    part: type[nn.Module] = Attention
    mixer: Any

    def __init__(self, config: PlainConfig | None = None):
        config = config or self.make_config()
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.mixer = self.part(config)
        self.head = nn.Linear(config.hidden_size, config.vocab_size)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Leave weights as torch draws them."""

    def get_input_embeddings(self) -> nn.Module:
        """Return the embedding of tokens."""
        return self.embedding

    def get_output_embeddings(self) -> nn.Module:
        """Return the head."""
        return self.head

    def documents(self, call: Call) -> Tensor:
        """Return the number of each token's document in its row (rows, columns).

        One begins where positions do not go on by one, and where the mask has another number: a
        segment's, or that of padding.
        """
        new = torch.zeros_like(call.input_ids, dtype=torch.bool)
        if call.position_ids is not None:
            new[:, 1:] |= call.position_ids.diff() != 1
        if call.attention_mask is not None:
            new[:, 1:] |= call.attention_mask.diff() != 0
        return new.cumsum(1)

    def positions(self, call: Call) -> Tensor:
        """Return the position of each token (rows, columns)."""
        return places(call.documents) if call.position_ids is None else call.position_ids

    def mask(self, call: Call) -> Tensor:
        """Return True where a token (rows, 1, columns, 1) sees another (rows, 1, 1, columns)."""
        return together(call.documents)[:, None].tril()

    def embed(self, call: Call) -> Tensor:
        """Return the first states: of the token, and of its position."""
        tokens = self.embedding(call.input_ids)
        columns = torch.arange(tokens.shape[-1], device=tokens.device)
        angles = call.positions[..., None] * 0.7**columns
        return tokens + angles.to(tokens.dtype).sin()

    def read(self, *given: Any) -> Call:
        """Return what a call says."""
        call = Call(*given)
        call.documents = self.documents(call)
        call.positions = self.positions(call)
        return call

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
    ) -> Any:
        """Return logits, and the loss of labels."""
        call = self.read(input_ids, attention_mask, position_ids)
        states = self.embed(call)
        mixed = self.mixer(
            states,
            attention_mask=self.mask(call),
            position_ids=call.positions,
            documents=call.documents,
        )
        logits = self.head((states + mixed).tanh())
        loss = None
        if labels is not None:
            loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutput(loss=loss, logits=logits)


def of(part: type[nn.Module]) -> type[Plain]:
    """Return a class of models whose tokens are mixed by a part."""
    return type(f"Of{part.__name__}", (Plain,), {"part": part, "__module__": part.__module__})


class Routed(Plain):
    """A language model with experts, and a loss that is least where they share tokens evenly."""

    part = Router
    make_config = partial(PlainConfig, output_router_logits=False)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_router_logits: bool | None = None,
    ) -> Any:
        """Return logits, and the loss of labels; with the router's if that is asked for."""
        output = super().forward(input_ids, attention_mask, position_ids, labels)
        if not output_router_logits:
            return output
        scores = self.mixer.gate(self.embed(self.read(input_ids, attention_mask, position_ids)))
        real = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        share = scores.softmax(-1)[self.counted(real.bool(), position_ids)].mean(0)
        uneven = len(share) * share.square().sum()
        loss = None if output.loss is None else output.loss + 0.1 * uneven
        return MoeCausalLMOutputWithPast(
            loss=loss, aux_loss=uneven, logits=output.logits, router_logits=(scores,)
        )

    def counted(self, real: Tensor, position_ids: Tensor | None) -> Tensor:
        """Return True for the tokens that are counted (rows, columns)."""
        return real
