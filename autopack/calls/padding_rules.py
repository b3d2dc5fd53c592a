"""The calls that stay as they came, here or for good, and the reasons why padded batches do.

A batch that may give other results without its padding is left alone: a padded batch is an ordinary
call, and exact without autopack. Reasons are given one at a time, in the order in which they are
written here; the first one counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from autopack.calls import outputs, refusals
from autopack.calls.call import Call, CallPlan
from autopack.calls.rows import NOT_IN_ROWS, has_a_place
from autopack.inspection import media
from autopack.inspection.configs import text_config
from autopack.inspection.heads import activation_of, looks_for_padding, pools_single_tokens
from autopack.inspection.state import State
from autopack.layout.host import host_values
from autopack.layout.token_map import TokenMap
from autopack.runtime.padding_read import LOOKS, LOOKS_AT_STATE
from autopack.runtime.scope import Activation
from autopack.runtime.tally import Tally

PASSED_ON = {
    "labels",
    "num_items_in_batch",
    "return_dict",
    "use_cache",
    "output_attentions",
    "output_hidden_states",
}
PASSED_ON |= {"output_router_logits", "ignore_index"}
"""Arguments that forwards take by `**kwargs` and whose meaning is the same everywhere."""
UNREAD = {"margin"}
"""Arguments that trainers pass and models do not read: a margin per pair (TRL's rewards)."""
_OF_REACH = re.compile(r"window|chunk(?!_size_feed_forward)|local_attention")
"""Names of fields with attention's reach; a chunked feed-forward layer sees each token alone.

Types that attend by blocks run documents alone, and keep their padding for that.
"""
_SCORING = (("transformers.pipelines.", "_forward"), ("sentence_transformers.", ".*"))
"""Modules and functions that call a model and drop the cache."""


class PassThrough(CallPlan):
    """Plan that runs a call as it came, neither packed nor without its padding.

    If the reason is `LOOKS` or `LOOKS_AT_STATE`, the run shows if results at padding are read or
    kept.
    """

    def __init__(self, call: Call, reason: str, *given: Any, keeps_padding: bool = False):
        super().__init__(call, reason, *given)
        self._keeps_padding = keeps_padding
        looks = reason in (LOOKS, LOOKS_AT_STATE) and call.module.training
        self._state = State(call.module) if looks else None

    def count(self, tally: Tally) -> None:
        """Count the reason in the tally if a padded batch keeps its padding."""
        if self._keeps_padding:
            tally.left[self.reason] += 1

    def finish(self, ended: Activation, module: nn.Module, output: Any) -> Any:
        """Observe, if due, if results at padding are read or kept as state; return None."""
        read, looks = self.scope.model.padding_read, self.reason == LOOKS
        if read is not None and self._state is not None:
            read.look_at_state(self._state, counts=not looks)
        if read is not None and looks:
            read.look(output, self.call.sides, self.call.inputs)


class Delegate(CallPlan):
    """Plan that leaves a padded batch to an inner entry, which may run it without padding.

    `real` is a mask of its tokens, given if it is to be observed whether results at padding are
    read.
    """

    what = "is left to the model inside"
    defers = True

    def __init__(self, call: Call, reason: str, *given: Any, real: np.ndarray | None = None):
        super().__init__(call, reason, *given)
        self.of_head, read = call.of_head, call.model.padding_read
        self._read = None if read is None or real is None or not read.is_due() else read
        self._real, self._ran = real, 0 if read is None else read.ran

    def finish(self, ended: Activation, module: nn.Module, output: Any) -> Any:
        """If an inner entry left padding out, make reads of results there raise; return None."""
        read = self._read
        # else the model inside has left the padding where it was
        if read is not None and torch.is_grad_enabled() and read.ran > self._ran:
            read.look(output, [("", self._real)], refuses=True)


def reasons_anywhere(call: Call, padding: TokenMap) -> Iterator[str]:
    """Yield the reasons why a batch has to stay padded at every entry."""
    traits, model_type, head = call.traits, call.anatomy.model_type, call.entry.head
    if head is not None and head.picks:
        yield "its head reads a token of each choice that the call names"
    if call.model.proof.why_not_unpadded is not None:
        yield call.model.proof.why_not_unpadded
    if call.declared.jumps:
        yield "its position_ids jump"
    if call.model.neighbours.hands_rows_to_layers(call.module):
        yield "PEFT's layers are given something for each row (adapter_names, task_ids)"
    for reason, _ in refusals.obstacles(call):
        yield reason
    returns_cache = call.wants("use_cache", *call.anatomy.configs) and (
        call.anatomy.causal or traits.recurs
    )
    returns_cache = returns_cache and not (call.module.training or "labels" in call.given)
    # lm-eval, sentence-transformers and the model step of a pipeline ignore it.
    if (
        returns_cache
        and call.noted is None
        and not any(call.model.is_called_from(*place) for place in _SCORING)
    ):
        yield "evaluation without labels may want the cache (use_cache=False would unpad it)"
    if call.wants_weights:
        yield "attention weights are wanted"
    if not padding.real.any(axis=1).all():
        yield "a row holds nothing but padding"
    if call.labelled_padding:
        ignored = call.ignored_label
        yield f"padding is labelled and counts in the loss (labels are not {ignored} there)"
    if (head is not None and head.spans) or not call.given.isdisjoint(
        ("start_positions", "end_positions")
    ):
        yield "its answer, or the loss of it, compares all columns of a row, padding included"
    if call.entry.reads_one_token_per_row and _read_token_is_padding(call, padding):
        yield "the token that the head reads is padding in some row"
    if traits.whole_model_reason is not None:
        yield "documents are run alone, and gain nothing from a packed row"
    if traits.reads_padding:
        yield f"{model_type} reads padding, so without it tokens would get something else"
    if traits.image_mask in call.given:
        yield "its text attends to the images of the row"
    if traits.counts_columns and not padding.on_the_right:
        yield f"{model_type} counts columns by itself, and the padding is not on the right"
    if call.anatomy.has_row_dependent_rotary and not _keeps_largest_position(call, padding):
        yield "rotary frequencies depend on the longest row, and every row ends in padding"
    if traits.recurs and padding.has_holes:
        yield "padding lies between tokens, and state is carried over it"
    for size in call.model.chunk_sizes:
        if padding.tokens % size:
            yield f"its layers take {size} tokens at a time, not {padding.tokens}"
    if traits.dense and padding.tokens**2 > padding.shape[0] * padding.shape[1] ** 2:
        yield f"{model_type} scores all pairs of a row, and one row of all documents has more pairs"
    if padding.has_holes and any(
        _limits_attention_below(c, padding.shape[1]) for c in call.anatomy.configs
    ):
        yield "padding lies between tokens, and attention windows count it"
    read = call.model.padding_read
    if read is not None and call.module.training:
        why = read.why_state_stays(call.module)
        if why is not None:
            yield why
    if (head is None or call.wants_states) and not padding.real.all():
        yield from _reasons_of_readers(call, padding)


def reasons_here(call: Call, padding: TokenMap) -> Iterator[str]:
    """Yield the reasons why one entry cannot run a batch unpadded, although an inner one may."""
    entry, given, traits = call.entry, call.arguments, call.traits
    if entry.level in call.model.pooling:
        yield outputs.ONE_PER_ROW
    if entry.head is not None and entry.head.of_choices:
        yield "its rows are choices of questions"
    if entry.has_other_head:
        yield "the head takes the padded form"
    if pools_single_tokens(call.module) and activation_of(call.module) is None:
        yield "the pooler is handed one token of every row"
    if entry.foreign is not None:
        yield f"{entry.foreign}, and takes the padded form"
    known = {"position_ids", "shift_labels", *entry.names, *PASSED_ON, *NOT_IN_ROWS}
    for name, value in given.items():
        if name in UNREAD and name not in entry.names:
            continue
        if name not in known and value is not None and value is not False:
            yield f"{name} is no argument of the model's own forward"
        in_order = traits.unpads_images and not call.wants_tuple and call.holds_served_media(name)
        in_order = in_order and not any(map(call.why_media_meet, media.kinds(name, value)))
        if not (in_order or has_a_place(name, value, padding)):
            yield f"{name} has no place in a packed row"
    if call.wants_last_logits:
        yield "the last logits of every row are asked for"
    if traits.uses_positions:
        if not entry.takes_positions:
            yield "the forward takes no position_ids"
        if "position_ids" not in call.given and not (
            padding.on_the_right or traits.knows_padded_positions
        ):
            model_type = call.anatomy.model_type
            yield f"how {model_type} counts positions after padding is not known; pass position_ids"


def _reasons_of_readers(call: Call, padding: TokenMap) -> Iterator[str]:
    """Yield the reasons why a batch stays padded since code may read results at padding.

    A head with one result per row has no results there.
    """
    read = call.model.padding_read
    if read is None or call.inputs is None:
        return
    # Whoever asks a head with one result per row for states makes something of them beside its
    # loss.
    by_labels = call.has_labels and not (call.entry.head is not None and call.wants_states)
    if not (by_labels or call.anatomy.causal) and (hidden := _hidden_tokens(call, padding)):
        found = ", ".join(map(str, hidden))
        yield f"its mask hides other tokens than the pad token ({found}), which may be read"
    is_trained = any(parameter.requires_grad for parameter in call.module.parameters())
    why = read.why_to_keep(call.inputs, by_labels, is_trained)
    if why is not None:
        yield why


def _hidden_tokens(call: Call, padding: TokenMap) -> list[int]:
    """Return up to three masked token ids other than the pad token; [] if it cannot be told."""
    pad = getattr(text_config(call.config), "pad_token_id", None)
    ids = call.arguments.get("input_ids")
    if not isinstance(pad, int) or not isinstance(ids, torch.Tensor) or ids.shape != padding.shape:
        return []
    hidden = host_values(ids)[~padding.real]
    return sorted(set(hidden[hidden != pad].tolist()))[:3]


def _keeps_largest_position(call: Call, padding: TokenMap) -> bool:
    """Return True if a real token has the batch's largest position, so that unpadding keeps it."""
    positions = call.declared.positions
    # its documents are numbered from their first tokens
    if positions is None and call.traits.recurs:
        return bool(padding.real.all(axis=1).any())
    if positions is None:
        return bool(padding.real[:, -1].any())
    return bool(positions[padding.real].max() == positions.max())


def _read_token_is_padding(call: Call, padding: TokenMap) -> bool:
    """Return True if a head or pooler that reads one token per row reads padding in some row.

    An encoder may be configured as a decoder and keep its head or pooler; a head of a decoder that
    does not look for padding may read one end or the other.
    """
    causal = call.anatomy.causal
    if call.entry.has_pooler and not padding.real[:, 0].all():
        return True
    if not (causal and looks_for_padding(call.module)):
        ends = [0, -1] if causal and call.entry.head is not None else [0]
        return not padding.real[:, ends].all()
    pad_token_id, ids = text_config(call.config).pad_token_id, call.arguments.get("input_ids")
    if ids is None or pad_token_id is None:
        return not padding.real[:, -1].all()
    last = (np.arange(padding.shape[1]) * (host_values(ids) != pad_token_id)).argmax(1)
    return not padding.real[range(padding.shape[0]), last].all()


def _limits_attention_below(config: Any, columns: int) -> bool:
    """Return True if a configuration limits attention to fewer than `columns` tokens."""
    windows = (value for name, value in vars(config).items() if _OF_REACH.search(name))
    reaches = (
        reach
        for value in windows
        for reach in (value if isinstance(value, list | tuple) else [value])
    )
    return any(isinstance(reach, int) and 0 < reach < columns for reach in reaches)
