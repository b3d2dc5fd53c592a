"""Which padded batches stay as they came, and why.

What cannot be told to give the same without its padding is left alone: a padded batch is an ordinary call, and exact
without autopack. Rules are asked in order; each says why a batch has to stay, or None.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from autopack.calls.call import CACHES, DROPPED
from autopack.calls.unpadded import has_a_place
from autopack.inspection.poolers import activation_of, pools_single_tokens
from autopack.integrations.accelerate import covered_mixer
from autopack.layout.declarations import IGNORED_LABEL, LAYOUT_KWARGS

if TYPE_CHECKING:
    from torch import nn

    from autopack.calls.call import Call
    from autopack.layout.padding import Padding

Rule = Callable[["Call", "Padding"], str | None]

PASSED_ON = {"labels", "num_items_in_batch", "return_dict", "use_cache", "output_attentions", "output_hidden_states"}
PASSED_ON |= {"output_router_logits"}
"""Arguments that forwards take by `**kwargs` and that mean what they mean everywhere."""
_OF_ROWS = {"position_ids", "shift_labels", *DROPPED, *LAYOUT_KWARGS}
_TRANSPARENT = {"accelerate", "deepspeed", "liger_kernel", "peft", "torch", "transformers"}
"""Packages whose replacement of a model's forward takes and gives what the forward did."""
_LAST_LOGITS = ("logits_to_keep", "num_logits_to_keep")


def first_reason(rules: tuple[Rule, ...], call: Call, padding: Padding) -> str | None:
    """What the first rule says that speaks against running a batch without its padding."""
    return next((reason for rule in rules if (reason := rule(call, padding)) is not None), None)


def _always(call: Call) -> bool:
    return call.model.options.unpad == "always"


def _wants_cache(call: Call, padding: Padding) -> str | None:
    filled = any(_is_filled(call.arguments.get(name)) for name in CACHES)
    return "a cache is wanted" if call.arguments.get("use_cache") or filled else None


def _generates(call: Call, padding: Padding) -> str | None:
    if torch.is_grad_enabled():
        return None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != "transformers.generation.utils":
        frame = frame.f_back
    return None if frame is None else "generation"


def _evaluates(call: Call, padding: Padding) -> str | None:
    if _always(call) or call.module.training or call.arguments.get("labels") is not None:
        return None
    anatomy, wanted = call.model.anatomy, call.arguments.get("use_cache")
    if wanted is None:
        wanted = any(getattr(config, "use_cache", False) for config in anatomy.configs)
    if not (wanted and anatomy.causal):
        return None
    return "evaluation without labels may want the cache (use_cache=False or unpad='always' would unpad it)"


def _wants_weights(call: Call, padding: Padding) -> str | None:
    return "attention weights are wanted" if call.wants_weights else None


def _reads_encoder(call: Call, padding: Padding) -> str | None:
    return "it attends to encoder states" if call.arguments.get("encoder_hidden_states") is not None else None


def _has_empty_row(call: Call, padding: Padding) -> str | None:
    return None if padding.real.any(axis=1).all() else "a row holds nothing but padding"


def _labels_padding(call: Call, padding: Padding) -> str | None:
    if _always(call) or not call.labelled_padding:
        return None
    return f"padding is labelled and counts in the loss (labels are not {IGNORED_LABEL} there)"


def _compares_columns(call: Call, padding: Padding) -> str | None:
    given = any(call.arguments.get(name) is not None for name in ("start_positions", "end_positions"))
    return "the loss compares all columns of a row, padding included" if given and not _always(call) else None


def _reads_one_token(call: Call, padding: Padding) -> str | None:
    """A head or pooler that reads padding: the first column of an encoder, the last token of a decoder."""
    if not call.entry.reads_one_token_per_row:
        return None
    pad_token_id, ids = call.module.config.get_text_config().pad_token_id, call.arguments.get("input_ids")
    if not call.model.anatomy.causal:
        read = padding.real[:, 0]
    elif ids is None or pad_token_id is None:
        read = padding.real[:, -1]
    else:
        columns = torch.arange(padding.columns, device=ids.device)
        read = padding.real[range(padding.rows), (columns * (ids != pad_token_id)).argmax(1).cpu().numpy()]
    return None if read.all() else "the token that the head reads is padding in some row"


def _runs_alone(call: Call, padding: Padding) -> str | None:
    alone = call.model.traits.whole_model_reason is not None
    return "documents are run alone, and gain nothing from a packed row" if alone else None


def _reads_padding(call: Call, padding: Padding) -> str | None:
    if not call.model.traits.reads_padding:
        return None
    return f"{call.model.anatomy.model_type} reads padding, so without it tokens would get something else"


def _has_refused_argument(call: Call, padding: Padding) -> str | None:
    refused = call.model.traits.refused_arguments
    given = next((name for name in refused if call.arguments.get(name) is not None), None)
    return None if given is None else f"{given} was given, and {refused[given]}"


def _counts_columns(call: Call, padding: Padding) -> str | None:
    if not call.model.traits.counts_columns or padding.on_the_right:
        return None
    return f"{call.model.anatomy.model_type} counts columns by itself, and the padding is not on the right"


def _has_covered_mixer(call: Call, padding: Padding) -> str | None:
    covered = covered_mixer(call.model.anatomy.mixers)
    return None if covered is None else f"{covered} has a forward of its own on the instance"


def _carries_state_over_holes(call: Call, padding: Padding) -> str | None:
    carries = call.model.traits.recurs and padding.has_holes
    return "padding lies between tokens, and state is carried over it" if carries else None


def _scores_more_pairs(call: Call, padding: Padding) -> str | None:
    if not call.model.traits.dense or padding.tokens**2 <= padding.rows * padding.columns**2:
        return None
    model_type = call.model.anatomy.model_type
    return f"{model_type} scores all pairs of a row, and one row of all documents would have more of them"


def _has_holes_in_windows(call: Call, padding: Padding) -> str | None:
    reaches = (reach for config in call.model.anatomy.configs for reach in _reaches(config))
    if not padding.has_holes or not any(0 < reach < padding.columns for reach in reaches):
        return None
    return "padding lies between tokens, and attention windows count it"


ANYWHERE: tuple[Rule, ...] = (
    _wants_cache,
    _generates,
    _evaluates,
    _wants_weights,
    _reads_encoder,
    _has_empty_row,
    _labels_padding,
    _compares_columns,
    _reads_one_token,
    _runs_alone,
    _reads_padding,
    _has_refused_argument,
    _counts_columns,
    _has_covered_mixer,
    _carries_state_over_holes,
    _scores_more_pairs,
    _has_holes_in_windows,
)
"""Rules that keep a batch padded whatever entry could run it without padding."""


def _has_other_head(call: Call, padding: Padding) -> str | None:
    return "the head takes the padded form" if call.entry.has_other_head else None


def _hands_on_one_token(call: Call, padding: Padding) -> str | None:
    if not pools_single_tokens(call.module) or activation_of(call.module) is not None:
        return None
    return "the pooler is handed one token of every row"


def _is_replaced(call: Call, padding: Padding) -> str | None:
    foreign = replaced_by(call.module)
    return None if foreign is None else f"{foreign} has replaced the forward"


def _has_argument_without_a_place(call: Call, padding: Padding) -> str | None:
    known = {*call.entry.names, *PASSED_ON, *_OF_ROWS}
    for name, value in call.arguments.items():
        if name not in known and value is not None and value is not False:
            return f"{name} is no argument of the model's own forward"
        if not has_a_place(name, value, padding):
            return f"{name} has no place in a packed row"
    return None


def _wants_last_logits(call: Call, padding: Padding) -> str | None:
    wanted = [value for name in _LAST_LOGITS if (value := call.arguments.get(name)) is not None]
    everything = all(isinstance(value, int) and value == 0 for value in wanted)
    return None if everything else "the last logits of every row are asked for"


def _positions_unknown(call: Call, padding: Padding) -> str | None:
    traits = call.model.traits
    if not traits.uses_positions:
        return None
    if not call.entry.takes_positions:
        return "the forward takes no position_ids"
    known = padding.on_the_right or traits.knows_padded_positions or call.arguments.get("position_ids") is not None
    if known:
        return None
    return f"how {call.model.anatomy.model_type} counts positions after padding is not known; pass position_ids"


AT_THIS_ENTRY: tuple[Rule, ...] = (
    _has_other_head,
    _hands_on_one_token,
    _is_replaced,
    _has_argument_without_a_place,
    _wants_last_logits,
    _positions_unknown,
)
"""Rules that keep one entry from running a batch without its padding, although one further in may."""


def labels_after_padding(call: Call) -> str | None:
    """Why a batch may not be left to an entry further in, for labels that only this entry could mask."""
    if not (call.entry.shifts_labels and call.declared.labelled_after_padding):
        return None
    return "a label is compared with what is predicted at padding, which only this entry could mask"


def replaced_by(module: nn.Module) -> str | None:
    """The package that has put a forward of its own on this instance, unless it is known to be transparent."""
    forward: Any = module.__dict__.get("forward")
    while forward is not None:
        inner = getattr(forward, "__func__", None) or getattr(forward, "func", None)
        if inner is None:
            break
        forward = inner
    if forward is None:
        return None
    # Not __module__, which functools.wraps copies from the function that is replaced.
    name = getattr(forward, "__globals__", {}).get("__name__", type(forward).__module__)
    package = str(name).partition(".")[0]
    return None if package in _TRANSPARENT else str(name)


def _is_filled(cache: Any) -> bool:
    return int(cache.get_seq_length()) > 0 if hasattr(cache, "get_seq_length") else bool(cache)


def _reaches(config: Any) -> list[int]:
    """How far attention looks by this config: windows, chunks and their like."""
    values = [value for name, value in vars(config).items() if re.search("window|chunk|local_attention", name)]
    listed = [reach for value in values for reach in (value if isinstance(value, list | tuple) else [value])]
    return [reach for reach in listed if isinstance(reach, int)]
