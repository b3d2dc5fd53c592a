"""The batches whose common row beginnings are computed once, and reasons against others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from autopack.inspection import masks, torches
from autopack.inspection.foreign import hooks_of, looks_at_rows
from autopack.layout import LEAST_SHARED, common_beginning
from autopack.layout.declarations import Declared
from autopack.layout.host import host_values, recall
from autopack.layout.packed import real_documents, real_tokens, rows_as_documents
from autopack.layout.prefixes import Prefixes, Stretch
from autopack.layout.ways import LAYOUT_KWARGS
from autopack.runtime.model import EnabledModel

SHARE = 0.1
"""Least share of a batch's real tokens to save, weighed by the model's part that runs once."""
MIXING = 0.8
"""Largest share of weights in mixers, which compute every document alone, that is worth it."""
_OF_TOKENS = {
    "input_ids",
    "attention_mask",
    "position_ids",
    "labels",
    "shift_labels",
    "cache_position",
}
_OF_LOSSES = {"completion_mask", "assistant_masks", "special_tokens_mask", "loss_weights"}
"""Values per token that collators make for losses: transformers' forwards do not read them."""
_OF_COLUMNS = {"logits_to_keep", "num_logits_to_keep"}
_NAMES_OF_NOISE = ("drop", "noise")


def why_not(model: EnabledModel) -> str | None:
    """Return why a model may not compute common row beginnings once; None if it may."""
    anatomy, traits = model.anatomy, model.traits
    if not model.options.share:
        return "share=False"
    if model.unknown_code is not None:
        return (
            "third-party code may keep state, or sum gradients in its own way "
            f"({model.unknown_code})"
        )
    if anatomy.halves is not None or not (anatomy.one_way and (anatomy.causal or traits.recurs)):
        return (
            "its tokens see later ones (a bidirectional model), so a shared prefix differs from "
            "row to row"
        )
    if traits.mixing_weights > MIXING:
        return (
            f"modules like {type(anatomy.mixers[0]).__name__} hold nearly all of its weights, and "
            "run every document from its first token"
        )
    if traits.adjusted:
        return "its queries are scaled by the columns that they stand in"
    if anatomy.has_row_dependent_rotary:
        return "its rotary frequencies depend on the longest position of a document"
    if not masks.has_mask_interface():
        return "transformers before 4.53 makes masks in the code of each model"
    if traits.dense or traits.reads_padding or traits.whole_model_reason is not None:
        return "its tokens get something of the whole batch"
    if anatomy.chunked and model.chunk_sizes:
        return "its layers take a number of tokens at a time"
    if model.options.sequence_parallel is not None:
        return "ranks share its rows"
    return model.said_by_twins.get(("prefixes",))


def found_in(call: Any, declared: Declared) -> Prefixes | None:
    """Return the common beginnings of documents that are to run once, or None if all run whole.

    Counts the reason in the tally if documents begin alike and run whole after all. `call` is an
    `autopack.calls.call.Call`, and `declared` its declaration: packed rows, or rows of a batch with
    a document each. Tokens on a device are compared only if the host has them anyway.
    """
    ids, given, layout = call.arguments.get("input_ids"), call.arguments, declared.layout
    if type(ids) is not Tensor or ids.is_meta or torches.is_recorded():
        return None  # without values, or whose values would be kept
    if ids.dim() != 2:
        return None
    if layout is None:
        may_share = len(ids) > 1
    else:  # a fixed number of bounds is declared for graphs of rows of a fixed length
        entry, slots = call.entry, () if layout.slots is None else layout.slots
        may_share = len(slots) <= len(layout.bounds) and entry.level not in call.model.pooling
        may_share &= entry.head is None and not call.wants_weights
        may_share &= entry.holds_models or not (call.has_labels or call.wants_last_logits)
    if not may_share:
        return None
    if call.of_head is not None or call.continues or "inputs_embeds" in call.given:
        return None
    mask = given.get("attention_mask")
    if mask is not None and getattr(mask, "shape", None) != ids.shape:
        return None  # one that the caller has prepared, for which a row of stretches has no place
    known = (
        _OF_TOKENS
        if layout is None
        else _OF_TOKENS.union(LAYOUT_KWARGS, _OF_LOSSES.difference(call.entry.names))
    )
    if not all(map(_is_single_value, map(given.get, call.given.difference(known, _OF_COLUMNS)))):
        return None
    if "position_ids" in call.given and declared.positions is None:
        return None  # of several sections
    tokens = declared.tokens
    if tokens is None:
        here = ids if ids.device.type == "cpu" else recall({"input_ids": ids}).get("input_ids")
        if here is None:
            return None
        tokens = host_values(here)
    share = SHARE / (1 - call.traits.mixing_weights)
    if layout is None:
        real = declared.real_of(tokens.shape)
        lengths, counted = real.sum(axis=1), np.broadcast_to(np.arange(real.shape[1]), real.shape)
    else:
        real = real_tokens(layout)
        lengths, counted = (
            layout.sizes[real_documents(layout)],
            np.arange(layout.columns) - layout.starts,
        )
    if len(lengths) < 2 or not lengths.all():
        return None
    positions = counted if declared.positions is None else declared.positions
    found = find(tokens[real], positions[real], lengths, LEAST_SHARED, share)
    if found is None:
        return None
    reason = next(_reasons_apart(call), None)
    if reason is not None:
        if call.outer is None:
            call.model.tally.apart[reason] += 1
        return None
    row = (
        rows_as_documents(real, ids.device, declared.positions)
        if layout is None
        else layout.without_padding()
    )
    return Prefixes(*found, row.device, row)


def _reasons_apart(call: Any) -> Iterator[str]:
    """Yield the reasons why documents of a call that begin alike have to run whole."""
    if call.wants_router_loss:
        yield "the losses of its routers count tokens"
    if call.wants_states and torch.is_grad_enabled():
        yield "hidden states are asked for, and a shared token has another gradient in each row"
    if _has_dropout_on(call.module):
        yield "dropout or noise is on, which every row draws for itself"
    parts = [module for module in call.module.modules() if module is not call.module]
    if any(looks_at_rows(hook) for part in parts for hook in hooks_of(part).values()):
        yield "a hook looks into its layers, and would see the row that runs"
    why = call.model.ask_twin("prefixes")
    if why is not None:
        yield why


def _is_single_value(value: object) -> bool:
    """Return True for a number, string or one-element tensor, which is the same for all tokens."""
    if isinstance(value, Tensor):
        return value.numel() == 1
    return isinstance(value, bool | int | float | str)


def _has_dropout_on(model: nn.Module) -> bool:
    """Return True if some module has dropout or noise on, which stock draws for each row."""
    for module in model.modules():
        is_dropout = isinstance(module, nn.modules.dropout._DropoutNd)
        rates = vars(module).items() if module.training else ()
        for name, value in rates:
            named = name == "p" if is_dropout else any(word in name for word in _NAMES_OF_NOISE)
            if named and (is_dropout or isinstance(value, float)) and value > 0:
                return True
    return False


def find(
    tokens: np.ndarray, positions: np.ndarray, lengths: np.ndarray, least: int, share: float
) -> tuple[tuple[Stretch, ...], np.ndarray] | None:
    """Return (stretches, columns) of a row with common beginnings once; None if it saves little.

    `columns` has the column in that row of each token of the documents.

    `tokens` and `positions`, (T,) ints, belong to documents of these `lengths`, end to end. Tokens
    are common if they are equal in both. Shared stretches have at least `least` tokens, and at
    least the `share` of all tokens is saved.
    """
    ends = np.cumsum(lengths)
    firsts = tokens[ends - lengths]
    if len(np.unique(firsts)) == len(firsts):
        return None
    keys = (tokens.astype(np.int64) << 32) | positions.astype(np.int64)
    keyed = np.split(keys, ends[:-1])
    order = sorted(range(len(keyed)), key=lambda number: keyed[number].tobytes())
    common = [common_beginning(keyed[one], keyed[other]) for one, other in pairwise(order)]
    if max(common, default=0) < least or sum(common) < share * len(tokens):
        return None
    stretches, columns = _tree(common, lengths[order].tolist(), least)
    if len(tokens) - stretches[-1].end < max(1, share * len(tokens)):
        return None
    return tuple(stretches), np.concatenate([columns[place] for place in np.argsort(order)])


def _tree(
    common: Sequence[int],
    lengths: Sequence[int],
    least: int,
) -> tuple[list[Stretch], list[np.ndarray]]:
    """Return the stretches of a row of sorted documents, and the columns of each document's tokens.

    `common` is the number of tokens that each has in common with the next one.
    """
    stretches: list[Stretch] = []
    columns = [np.empty(0, dtype=np.int64)] * len(lengths)
    chain: tuple[int, ...] = ()
    waiting = [(0, len(lengths), columns[0], chain)]
    while waiting:
        begin, stop, shared, chain = waiting.pop()
        is_leaf, depth = stop - begin == 1, len(shared)
        end = lengths[begin] if is_leaf else min(common[begin : stop - 1])
        if end - depth >= (1 if is_leaf else least):
            first = stretches[-1].end if stretches else 0
            chain = (*chain, len(stretches))
            stretches.append(Stretch(first, first + end - depth, depth, chain))
            shared = np.append(shared, np.arange(first, first + end - depth))
        if is_leaf:
            columns[begin] = shared
            continue
        cuts = [begin, *(i + 1 for i in range(begin, stop - 1) if common[i] == end), stop]
        waiting += [
            (one, other, shared, chain)
            for one, other in zip(cuts[-2::-1], cuts[:0:-1], strict=True)
        ]
    return stretches, columns
