"""Longformer: windows in chunks of rows that the model pads, and tokens with global attention.

Its model pads rows to a multiple of the largest window before the embeddings, so its attention sees more columns than
the layout has. Here every document is padded to such a multiple, as it is alone, and only its own tokens with global
attention are global to it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from autopack.errors import UnsupportedModel
from autopack.family import AFTER_PAD_TOKEN, Family, Tiny
from autopack.layout.batches import Batches, equally_long
from autopack.mixers import MixerCall, Way


class _InWindows(Way):
    attends = True
    recurs = False
    in_parts = False  # its model pads the rows before
    words = "documents alone, in windows"
    work = "the model's own attention, documents of one length as a batch, padded to the window"

    def run(self, call: MixerCall) -> Any:
        layout = call.layout
        mixer: Any = call.mixer
        rows, mask = call.arguments["hidden_states"], call.arguments["attention_mask"]
        hidden, seen = rows[:, : layout.columns], mask[:, : layout.columns]  # below 0 is padding, above it global
        if call.want_weights and bool((seen > 0).any()):
            raise UnsupportedModel(
                f"{type(mixer).__name__} gives attention weights in a form that depends on the number of tokens with "
                f"global attention, which packed documents do not share. Leave output_attentions or "
                f"global_attention_mask out, or run the documents one per row."
            )
        windows = mixer.config.attention_window
        window: int = max(windows) if isinstance(windows, list | tuple) else windows
        found = Batches.grouped(layout, equally_long)
        outputs = []
        for batch in found.batches:
            length = batch.shape[1]
            more = -length % window
            own = functional.pad(batch.spread(seen), (0, more), value=torch.finfo(seen.dtype).min)
            output = call.original(
                mixer,
                functional.pad(batch.spread(hidden), (0, 0, 0, more)),
                attention_mask=own,
                is_index_masked=own < 0,
                is_index_global_attn=own > 0,
                is_global_attn=bool((own > 0).any()),
                output_attentions=call.want_weights,
            )
            outputs.append(tuple(part[:, :length] for part in output))
        added = (0, rows.shape[1] - layout.columns)
        return tuple(functional.pad(part, (0, 0) * (part.dim() - 2) + added) for part in found.together(outputs))


FAMILY = Family(
    name="longformer",
    model_types=frozenset({"longformer"}),
    how="the model's own attention, documents alone",
    attends=False,
    mixers={"LongformerSelfAttention": _InWindows()},
    numbering={"longformer": AFTER_PAD_TOKEN},
    tiny=Tiny(configs={"longformer": {"attention_window": [4, 4]}}),
)
