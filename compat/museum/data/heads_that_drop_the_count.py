"""A head takes the number of targets of a step, and does not divide by it."""

from __future__ import annotations

from typing import Any

from transformers import BertConfig, BertForMaskedLM

from compat.museum.data import _trainer
from compat.museum.exhibit import Exhibit


def net():
    sizes: dict[str, Any] = {
        "vocab_size": _trainer.VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 32,
    }
    sizes |= {"num_attention_heads": 2, "num_hidden_layers": 2, "max_position_embeddings": 64}
    return BertForMaskedLM(BertConfig(**sizes))


EXHIBIT = Exhibit(
    kind="counting",
    reported=("transformers#47688",),
    says="The trainer sees that the forward takes further arguments, gives it the number of "
    "targets of the step, and leaves the division to it. The head drops the number: "
    "losses and gradients grow with the number of micro-batches.",
    mistaken=lambda: _trainer.trainer(net=net()),
    sound=lambda: _trainer.trainer(net=net(), gradient_accumulation_steps=1),
)
