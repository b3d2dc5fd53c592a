"""A tiny language model of the museum's own: plain, and sound in every call.

Exhibits override a method of `Plain`, or the part of it that mixes tokens. A part gets the states
of tokens (rows, columns, channels), the mask, the positions, and the numbers of the documents that
tokens belong to (rows, columns). Weights are random: nothing is trained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
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

    def turned(self, hidden_states: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values (rows, heads, columns, channels), the first two
        turned."""
        parts = self.inner(hidden_states).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        angles = self.angles(position_ids).to(hidden_states.dtype)[:, None]
        return turn(parts[0], angles), turn(parts[1], angles), parts[2]

    def weights(self, scores: Tensor, documents: Tensor) -> Tensor:
        """Return the weights of keys by their scores."""
        return scores.softmax(-1)

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor, position_ids: Tensor, documents: Tensor
    ) -> Tensor:
        """Return the new states."""
        query, key, value = self.turned(hidden_states, position_ids)
        scores = query @ key.mT / query.shape[-1] ** 0.5
        found = self.weights(scores.masked_fill(~attention_mask, -torch.inf), documents) @ value
        return self.outer(found.transpose(1, 2).flatten(2))


def turn(states: Tensor, angles: Tensor) -> Tensor:
    """Return the halves of states turned against each other by angles."""
    one, two = states.chunk(2, -1)
    return torch.cat(
        [one * angles.cos() - two * angles.sin(), one * angles.sin() + two * angles.cos()], -1
    )


class Varlen(Attention):
    """Attention by a kernel that gets all rows as one, and the bounds of the documents in it."""

    def bounds(self, documents: Tensor, position_ids: Tensor) -> list[int]:
        """Return where documents begin, counted over all rows, and where the last one ends."""
        return [*begins(documents).flatten().nonzero()[:, 0].tolist(), documents.numel()]

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor, position_ids: Tensor, documents: Tensor
    ) -> Tensor:
        """Return the new states."""
        query, key, value = (
            part.transpose(1, 2).flatten(0, 1) for part in self.turned(hidden_states, position_ids)
        )
        found = kernel(query, key, value, self.bounds(documents, position_ids))
        return self.outer(found.unflatten(0, documents.shape).flatten(2))


def kernel(query: Tensor, key: Tensor, value: Tensor, bounds: Iterable[int]) -> Tensor:
    """Return causal attention within bounds (tokens, heads, channels); outside of them nothing is
    written."""
    found = torch.zeros_like(query)
    for begin, end in pairwise(bounds):
        q, k, v = (part[begin:end].transpose(0, 1) for part in (query, key, value))
        scores = q @ k.mT / q.shape[-1] ** 0.5
        later = torch.ones_like(scores[0], dtype=torch.bool).triu(1)
        found[begin:end] = (scores.masked_fill(later, -torch.inf).softmax(-1) @ v).transpose(0, 1)
    return found


class Recurrence(nn.Module):
    """A gated sum over earlier tokens, which begins anew where a document does."""

    def __init__(self, config: PlainConfig):
        super().__init__()
        self.gate = nn.Linear(config.hidden_size, config.hidden_size)
        self.inner = nn.Linear(config.hidden_size, config.hidden_size)

    def resets(self, documents: Tensor) -> Tensor:
        """Return True where the state begins anew (rows, columns)."""
        return begins(documents)

    def forward(self, hidden_states: Tensor, documents: Tensor, **others: Any) -> Tensor:
        """Return the new states."""
        kept = self.gate(hidden_states).sigmoid() * ~self.resets(documents)[..., None]
        added = self.inner(hidden_states)
        states: list[Tensor] = []
        for column in range(documents.shape[1]):
            before = states[-1] if states else torch.zeros_like(added[:, 0])
            states.append(kept[:, column] * before + added[:, column])
        return torch.stack(states, 1)


class Convolution(nn.Module):
    """A causal convolution over a token and the two before it in its document."""

    reach: tuple[int, ...] = (0, 1, 2)
    """How many columns back the tokens stand that are read."""

    def __init__(self, config: PlainConfig):
        super().__init__()
        self.taps = nn.Parameter(torch.randn(len(self.reach), config.hidden_size))

    def reads(self, documents: Tensor, back: int) -> Tensor:
        """Return True where the token so many columns back is read (rows, columns)."""
        columns = torch.arange(documents.shape[1], device=documents.device)
        inside = (columns >= back) & (columns - back < documents.shape[1])
        return (documents == documents.roll(back, 1)) & inside

    def forward(self, hidden_states: Tensor, documents: Tensor, **others: Any) -> Tensor:
        """Return the new states."""
        read = [
            hidden_states.roll(back, 1) * self.reads(documents, back)[..., None]
            for back in self.reach
        ]
        return (torch.stack(read, -2) * self.taps).sum(-2)


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

    def balance(self, scores: Tensor, documents: Tensor, real: Tensor) -> Tensor:
        """Return how unevenly the real tokens are shared (rows, columns); 1 for evenly."""
        share = scores.softmax(-1)[real].mean(0)
        return len(share) * share.square().sum()

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
        call = self.read(input_ids, attention_mask, position_ids)
        scores = self.mixer.gate(self.embed(call))
        real = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        uneven = self.balance(scores, call.documents, self.counted(real.bool(), position_ids))
        loss = None if output.loss is None else output.loss + 0.1 * uneven
        return MoeCausalLMOutputWithPast(
            loss=loss, aux_loss=uneven, logits=output.logits, router_logits=(scores,)
        )

    def counted(self, real: Tensor, position_ids: Tensor | None) -> Tensor:
        """Return True for the tokens that are counted (rows, columns)."""
        return real
