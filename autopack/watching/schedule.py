"""The calls that are checked: 1, 2, 4, 8 and so on, and those that go beyond the calls checked before.

A proof runs a few dozen tokens. Code may begin to mix them at more, at a token that it has not met, in an argument that
it was not given.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from autopack.auditing.cases import tokens_named
from autopack.calls.call import Call
from autopack.calls.encoder_decoder import PairCall
from autopack.inspection import media, torches
from autopack.layout.host import host_values
from autopack.layout.packed import PackedLayout

TRAINS = "mode", True, True
"""The kind of calls in training mode with gradients."""


def shape_of(call: Call, closely: bool) -> tuple[tuple[int, ...], set[Any]]:
    """Return the sizes and kinds (see `Checked`) of a call that packs, or runs a padded batch without its padding.

    Tokens and media are read on the host only for code that is checked `closely`.
    """
    padded = is_padded(call)
    kinds: set[Any] = {(padded, name) for name, value in call.arguments.items() if value is not None}
    kinds.add(("mode", call.module.training, torch.is_grad_enabled()))
    inputs = call.inputs
    if call.prefixes is not None:
        kinds.add("rows that begin alike")
    if padded:
        kinds.add(("padding on the right", _is_on_the_right(call)))
    if inputs is not None:
        weight = next(call.module.parameters(), None)
        lowered = torches.autocast_dtype(inputs.device.type)
        kinds |= {("dtype", None if weight is None else weight.dtype), ("autocast", lowered)}
    tokens: set[int] = set()
    if closely:
        ids = call.arguments.get("input_ids")
        tokens = set(host_values(ids).reshape(-1).tolist()) if isinstance(ids, torch.Tensor) else set()
        kinds |= {("token", token) for token in tokens_named(call.module.config) & tokens}
    of_media = _sizes_of_media(call) if closely else (0, 0)
    return (*_sizes_of(call), max(tokens, default=0), *of_media), kinds


def is_padded(call: Call) -> bool:
    """Return True if a call brings a padded batch."""
    if isinstance(call, PairCall):
        pair = call.find_pair() if call.one_sided_layout() is None else None
        return call.one_sided_layout() is None and (pair is None or not pair.packs)
    return call.declared.layout is None


def _is_on_the_right(call: Call) -> bool:
    if isinstance(call, PairCall):
        pair = call.find_pair()
        return pair is None or all(half.places.on_the_right for half in pair.halves)
    return call.declared.real is None or call.padding.on_the_right


def _sizes_of(call: Call) -> tuple[int, int, int, int]:
    """Return the first four sizes of a call (see `Checked`); zero for what is only declared further in."""
    rows = 0 if call.inputs is None else call.inputs.shape[0]
    layouts: list[PackedLayout]
    if isinstance(call, PairCall):
        one = call.one_sided_layout()
        pair = call.find_pair() if one is None else None
        layouts = [half.layout for half in pair.halves] if pair is not None else [] if one is None else [one]
    else:
        layouts = [] if call.declared.layout is None else [call.declared.layout]
        real = call.declared.real
        if not layouts and real is not None:  # which runs as one row
            return int(real.sum(1).max()), rows, rows, int(real.sum())
    longest = documents = columns = 0
    for layout in layouts:
        longest, columns = max(longest, layout.max_seqlen), max(columns, layout.columns)
        documents = max(documents, len(layout.bounds) - 1)
    return longest, documents, rows, columns


def _sizes_of_media(call: Call) -> tuple[int, int]:
    """Return the numbers in the largest media tensor of a call, and the longest of their sides in places or pixels."""
    values = tree_leaves([call.arguments[name] for name in media.given(call.arguments)])
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    sides = [max(value.shape[1:], default=0) for value in tensors if value.is_floating_point()]
    # Of images of which only the sum of all has a size, a grid of whole numbers says how large each is.
    grids = [int(value.max()) for value in tensors if not value.is_floating_point() and value.numel()]
    return max((value.numel() for value in tensors), default=0), max([*sides, *grids], default=0)
