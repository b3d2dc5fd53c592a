"""The loss that balances experts is one of the whole batch, padding too.

routers: Megatron-LM#2121

The loss that balances experts is computed over all tokens of a batch. It is no sum over documents:
each one's gradient depends on those that share its batch, and on padding.
"""

from __future__ import annotations

from typing import Any

from transformers import MixtralConfig, MixtralForCausalLM

from compat.museum.data import _trainer


def net(balances):
    sizes: dict[str, Any] = {
        "vocab_size": _trainer.VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 32,
    }
    sizes |= {
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "num_hidden_layers": 2,
    }
    config = MixtralConfig(
        **sizes, pad_token_id=0, output_router_logits=balances, router_aux_loss_coef=0.1
    )
    return MixtralForCausalLM(config)


def mistaken():
    return _trainer.trainer(net=net(True))


def sound():
    return _trainer.trainer(net=net(False))
