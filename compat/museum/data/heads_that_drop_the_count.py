"""A head takes the number of targets of a step, and does not divide by it.

counting: transformers#47688

The trainer sees that the forward takes further arguments, gives it the number of targets of the
step, and leaves the division to it. The head drops the number: losses and gradients grow with the
number of micro-batches.
"""

from __future__ import annotations

from typing import Any

from transformers import BertConfig, BertForMaskedLM

from compat.museum.data import _trainer


def net():
    sizes: dict[str, Any] = {
        "vocab_size": _trainer.VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 32,
    }
    sizes |= {"num_attention_heads": 2, "num_hidden_layers": 2, "max_position_embeddings": 64}
    return BertForMaskedLM(BertConfig(**sizes))


def mistaken():
    return _trainer.trainer(net=net())


def sound():
    return _trainer.trainer(net=net(), gradient_accumulation_steps=1)
