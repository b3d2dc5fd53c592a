"""Models of 160 M parameters that somebody has changed, and published ones of 7 B and 70 B on the meta device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention

from compat.published.measure import build


class Mine(LlamaForCausalLM):
    """A subclass with nothing of its own."""


class Chat(LlamaForCausalLM):
    """A subclass with a forward of its own, which calls that of transformers."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


class Fitted(LlamaForCausalLM):
    """A class that cannot be made from its configuration alone."""

    def __init__(self, config: LlamaConfig, scale: float):
        super().__init__(config)
        self.scale = scale


class OwnAttention(LlamaAttention):
    """An attention layer with a forward of its own, which calls that of transformers."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


class OwnLinear(nn.Linear):
    """A linear layer with a forward of its own."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return states @ self.weight.T


class OwnNorm(nn.Module):
    """An RMSNorm of one's own."""

    def __init__(self, weight: nn.Parameter, epsilon: float):
        super().__init__()
        self.weight, self.epsilon = weight, epsilon

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        wide = states.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.epsilon)
        return self.weight * normed.to(states.dtype)


class Adapter(nn.Module):
    """A linear layer of a model with a low-rank one beside it."""

    def __init__(self, base: nn.Linear, rank: int = 8):
        super().__init__()
        self.base = base.requires_grad_(False)
        made: dict[str, Any] = {"bias": False, "device": base.weight.device, "dtype": base.weight.dtype}
        self.down = nn.Linear(base.in_features, rank, **made)
        self.up = nn.Linear(rank, base.out_features, **made)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.base(states) + self.up(self.down(states))


def own_loss(logits: Any, labels: torch.Tensor, vocab_size: int, **_: Any) -> torch.Tensor:
    """The next token's cross-entropy with a penalty of one's own."""
    logits, labels = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    wanted = F.cross_entropy(logits.float(), labels)
    return wanted + 1e-4 * logits.logsumexp(-1).square()[labels != -100].mean()


def llama(cls: Any = LlamaForCausalLM) -> Any:
    """A Llama of 160 M parameters with random weights in float32."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
    }
    return cls(LlamaConfig(vocab_size=32000, max_position_embeddings=2048, **sizes))


def with_own_loss() -> Any:
    model = llama()
    model.loss_function = own_loss
    return model


def with_own_linear(model: Any = None) -> Any:
    model = model or llama()
    layer = model.model.layers[5].mlp
    made = OwnLinear(layer.down_proj.in_features, layer.down_proj.out_features, bias=False, device="meta")
    made.weight = layer.down_proj.weight
    layer.down_proj = made
    return model


def with_own_attention() -> Any:
    model = llama()
    layer = model.model.layers[5]
    made = OwnAttention(model.config, 5)
    for name, part in layer.self_attn.named_children():
        setattr(made, name, part)
    layer.self_attn = made
    return model


def with_own_norms() -> Any:
    model = llama()
    for holder in list(model.modules()):
        for name, part in list(holder.named_children()):
            if type(part).__name__ == "LlamaRMSNorm":
                setattr(holder, name, OwnNorm(part.weight, part.variance_epsilon))
    return model


def with_own_adapters(model: Any = None) -> Any:
    model = model or llama()
    for layer in model.model.layers:
        layer.self_attn.q_proj = Adapter(layer.self_attn.q_proj)
        layer.self_attn.v_proj = Adapter(layer.self_attn.v_proj)
    return model


def with_a_hook_that_looks() -> Any:
    model = llama()
    model.model.layers[3].register_forward_hook(lambda module, inputs, output: None)
    return model


def with_a_hook_that_adds() -> Any:
    def add(module: nn.Module, inputs: Any, output: Any) -> Any:
        return (output[0] + 0.1, *output[1:]) if isinstance(output, tuple) else output + 0.1

    model = llama()
    model.model.layers[3].register_forward_hook(add)
    return model


def with_peft() -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(llama(), LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))


_7B, _70B = "Llama 2 7B", "Llama 3.1 70B"
CASES: dict[str, Callable[[], Any]] = {
    "plain": llama,
    "a subclass with nothing of its own": lambda: llama(Mine),
    "a subclass with its own forward": lambda: llama(Chat),
    "a loss function of one's own": with_own_loss,
    "one linear layer of one's own": with_own_linear,
    "all norms of one's own": with_own_norms,
    "adapters of one's own": with_own_adapters,
    "a hook that looks": with_a_hook_that_looks,
    "a hook that adds": with_a_hook_that_adds,
    "LoRA of PEFT": with_peft,
    "by an audit: a class of two arguments": lambda: llama(lambda config: Fitted(config, 1.0)),
    "by an audit: attention of one's own put in": with_own_attention,
    "7 B on meta": lambda: build(_7B),
    "7 B on meta, a subclass": lambda: build(_7B, Mine),
    "7 B on meta, its own forward": lambda: build(_7B, Chat),
    "7 B on meta, one linear layer": lambda: with_own_linear(build(_7B)),
    "7 B on meta, adapters": lambda: with_own_adapters(build(_7B)),
    "70 B on meta": lambda: build(_70B),
    "70 B on meta, a subclass": lambda: build(_70B, Mine),
    "70 B on meta, one linear layer": lambda: with_own_linear(build(_70B)),
}
