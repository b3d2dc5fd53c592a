"""Whose exactness tests hold: tiny models in float64 by their types, and classes that users make of
them."""

import copy
from functools import cache

import torch
from torch import nn
from transformers import LlamaForCausalLM

from autopack import tiny

DECODERS = (
    "llama gemma3_text qwen2_moe gpt2 gpt_neox opt bloom falcon mamba mamba2 bamba mpt".split()
)
"""Decoders with rotary, learned and no positions, distance biases, windows, experts, recurrences,
and both."""
ATTENDING = "llama gemma3_text qwen2_moe gpt2 gpt_neox opt phi olmo2 starcoder2 stablelm".split()
"""Decoders that attend through transformers' attention interface."""
ENCODERS = "bert roberta distilbert electra albert deberta-v2 mpnet modernbert".split()
"""Masked language models."""


def crossed(one, other, each=2):
    """Pairs in which every element of `one` meets `each` of `other`, and all of `other` have their
    turn.

    All pairs would take minutes: an audit on the spot takes a second.
    """
    step = max(1, len(other) // each)
    return [(a, other[(i + j * step) % len(other)]) for i, a in enumerate(one) for j in range(each)]


def alternating(pairs, other):
    """The pairs, with an element of `other` beside each, in turn."""
    return [(*pair, other[i % len(other)]) for i, pair in enumerate(pairs)]


def turned(pairs):
    """The pairs, each with its second element before its first."""
    return [(second, first, *rest) for first, second, *rest in pairs]


@cache
def _built(model_type, task, overrides):
    given = dict(overrides)
    implementation, dtype = (
        given.pop("attn_implementation", None),
        given.pop("dtype", torch.float64),
    )
    for wanted in [implementation] if implementation else ["sdpa", "eager"]:
        try:
            model = tiny.build(
                model_type, task=task, attn_implementation=wanted, dtype=dtype, **given
            )
            if getattr(model.config, "_experts_implementation", None) is not None:
                model.set_experts_implementation("eager")  # the default has no kernel for float64
            return model
        except tiny.CannotBuild as error:
            if implementation or wanted == "eager" or "does not support" not in str(error):
                raise
    raise AssertionError("unreachable")


def build(model_type="llama", task="causal-lm", **overrides):
    """A tiny model in float64 without dropout; the same arguments give the same parameters."""
    hashable = {name: value for name, value in overrides.items() if value.__hash__ is not None}
    if len(hashable) == len(overrides):
        return copy.deepcopy(
            _built(model_type, task, tuple(sorted(hashable.items(), key=lambda item: item[0])))
        )
    return _built.__wrapped__(model_type, task, tuple(overrides.items()))


def subclass(model, forward, name="Chat", **members):
    """Make the model one of a subclass of its class with this forward, as if it had been built as
    one."""
    model.__class__ = type(
        name, (type(model),), {"forward": forward, "__module__": "users_code", **members}
    )


def rebuilt(model, cls):
    """A model of a class of the user's, built by its own constructor, with the parameters of
    `model`."""
    other = cls(copy.deepcopy(model.config)).to(model.dtype)
    other.load_state_dict(model.state_dict())
    return other.eval()


def layers_of(model):
    """The layers of a model, or of a half of it."""
    return next(m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m))


def without_dropout(model):
    """The model, whose heads may have modules of dropout that draw other numbers in each run."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


class WithoutTwin(LlamaForCausalLM):
    """A class that nothing but its author can make, so there is no twin of it."""

    def __init__(self, config, wanted):
        super().__init__(config)


class OwnLinear(nn.Linear):
    """A layer of the user's, which no record covers, so that a proof is needed."""

    def forward(self, states):
        return super().forward(states) * 1.0


class Mixes(nn.Module):
    """Hands every token something of those before it."""

    def forward(self, x):
        return x + x.cumsum(1)


def put_own_layer(model):
    """Put a layer of the user's into a Llama, which computes the same."""
    mlp = model.model.layers[0].mlp
    mine = OwnLinear(mlp.gate_proj.in_features, mlp.gate_proj.out_features, bias=False)
    mine.load_state_dict(mlp.gate_proj.state_dict())
    mlp.gate_proj = mine
