"""Attention of the T5 kind: a bias for every pair of tokens, made by the first layer and handed on to the others."""

from __future__ import annotations

from typing import Any

import torch

from autopack.family import MixerCall

__all__ = ["with_bias_of_longest"]


def with_bias_of_longest(call: MixerCall) -> Any:
    """Run an attention module with the bias (1, heads, tokens, tokens) of the longest document.

    Distances are the same in every document, so that each one's bias is the beginning of it. Upstream would make one
    for the whole row, and a dense one of zeros for cross-attention; there it is (1, heads, 1, 1).
    """
    arguments, mixer = dict(call.arguments), call.mixer
    if arguments.get("position_bias") is None:
        arguments["position_bias"] = _bias(mixer, arguments, call.layout.max_seqlen)
    return call.original(mixer, arguments.pop(call.first), **arguments)


def _bias(mixer: Any, arguments: dict[str, Any], longest: int) -> torch.Tensor:
    states = arguments["hidden_states"]
    if mixer.has_relative_attention_bias and arguments.get("key_value_states") is None:
        return mixer.compute_bias(longest, longest, device=states.device)
    # Reentrant checkpointing needs a gradient of something that is handed on, as it does upstream.
    needs_gradient = mixer.gradient_checkpointing and mixer.training
    return states.new_zeros((1, mixer.n_heads, 1, 1)).requires_grad_(needs_gradient)
