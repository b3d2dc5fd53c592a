"""XLM and Flaubert: how many tokens of a row count is the number of those that are no padding token.

The states of as many columns from the left are kept, the others become zero. Padding between documents or at the left
of a row would so take as many tokens at its right end along, and padding behind documents, which attends to itself
alone, would see nothing, so that gradients are no numbers. In packed rows every column counts. A document that
holds the padding token as one of its own would end earlier alone, and is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autopack.errors import UnsupportedModel
from autopack.family import Family, Tiny
from autopack.mixers import Alone
from autopack.patching import Site
from autopack.runtime.scope import running_scope


def _count_every_column(original: Callable[..., Any], site: Site) -> Callable[..., Any]:
    def get_masks(slen: int, lengths: torch.Tensor, causal: bool, padding_mask: torch.Tensor | None = None) -> Any:
        scope = running_scope()
        layout = None if scope is None else scope.layout
        if layout is None or padding_mask is not None or (len(lengths), slen) != (layout.rows, layout.columns):
            return original(slen, lengths, causal, padding_mask)
        wanted = [slen] * layout.rows
        if layout.is_padding is not None:
            for (row, first, end), is_padding in zip(layout.spans, layout.is_padding, strict=True):
                wanted[row] -= (end - first) * int(is_padding)
        found = lengths.tolist()
        if any(f < w for f, w in zip(found, wanted, strict=True)):
            raise UnsupportedModel(
                f"the rows hold {wanted} tokens, but the model counts {found} by its padding token (config.pad_index), "
                f"and would cut the documents that hold it short. Give padding an attention_mask of 0, and use another "
                f"token in documents."
            )
        return original(slen, torch.full_like(lengths, slen), causal, None)

    return get_masks


FAMILY = Family(
    name="xlm",
    model_types=frozenset({"flaubert", "xlm"}),
    how="the model's own attention, documents alone",
    attends=False,
    mixers={"MultiHeadAttention": Alone(by_columns=True)},
    sites=tuple(
        Site(
            f"transformers.models.{name}.modeling_{name}",
            "get_masks",
            _count_every_column,
            parameters=("slen", "lengths", "causal", "padding_mask"),
        )
        for name in ("flaubert", "xlm")
    ),
    tiny=Tiny(configs={"xlm": {"causal": True}}),
)
