"""The encoder and the decoder inside an encoder-decoder's call, each on its own row."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from autopack.calls.call import Call
from autopack.calls.packed import add_positions, without_what_packing_drops
from autopack.calls.plan import Plan
from autopack.errors import UnsupportedModel
from autopack.layout.host import host_values
from autopack.layout.pair import Half, Pair
from autopack.runtime.scope import Scope


class HalfAsRow(Plan):
    """One half of an encoder-decoder's call: the documents of its row; a decoder reads those of the encoder too."""

    what = "runs as the packed row of its half"
    reason = "the call around it declares documents or hides padding"

    def __init__(self, call: Call, pair: Pair):
        encoder = pair.encoder or _recordings(pair, call.arguments)
        layout = pair.decoder.layout if call.entry.decodes else encoder.layout
        if call.inputs is None or tuple(call.inputs.shape[:2]) != (1, layout.columns):
            found = "none" if call.inputs is None else tuple(call.inputs.shape)
            raise UnsupportedModel(
                f"{call.name} was to run on a row of {layout.columns} tokens and got {found}: its model "
                f"changes the tokens on their way. Train it on padded batches with autopack.enable(model, "
                f"unpad='never')."
            )
        arguments = without_what_packing_drops(call, call.arguments)
        if arguments.get("encoder_attention_mask") is not None:
            arguments["encoder_attention_mask"] = None
        if call.entry.uses_positions:
            add_positions(call, arguments, layout)
        memory = encoder.layout if call.entry.decodes else None
        if memory is not None:
            states = arguments.get("encoder_hidden_states")
            if isinstance(states, torch.Tensor) and tuple(states.shape[:2]) != (1, memory.columns):
                arguments["encoder_hidden_states"] = encoder.places.gather(states)
        self.arguments = arguments
        super().__init__(Scope(call.model, layout, memory))


def _recordings(pair: Pair, arguments: dict[str, Any]) -> Half:
    """What an encoder that ran as it is has made of its recordings or images, one per document, as one row."""
    states, mask = arguments.get("encoder_hidden_states"), arguments.get("encoder_attention_mask")
    documents = len(pair.decoder.layout.lengths)
    if not isinstance(states, torch.Tensor) or len(states) != documents:
        raise UnsupportedModel(
            f"the decoder reads {0 if states is None else len(states)} encoded recordings or images for {documents} "
            f"documents. Train the model on padded batches with autopack.enable(model, unpad='never')."
        )
    real = np.ones(states.shape[:2], dtype=bool)
    if isinstance(mask, torch.Tensor) and tuple(mask.shape) == real.shape:
        real = host_values(mask != 0)
    return Half.of_documents(real & (np.cumsum(real, axis=1) == 1), real, states.device)
