"""Transparent unpadding: which padded batches run as one packed row, at which of the model's entries, and with what.

A causal language model is unpadded at the top, so that head and loss see real tokens only; any other head gets the
padded form that it always got, from a backbone that ran on the packed row. What cannot be told to give the same is left
as it came: a padded batch is an ordinary call, and exact without autopack.
"""

from __future__ import annotations

import re
import sys
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from autopack.inspection import media
from autopack.inspection.poolers import activation_of, pools_single_tokens
from autopack.layout.declarations import IGNORED_LABEL, LAYOUT_KWARGS, Declared
from autopack.layout.padding import Padding

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from autopack.calls.hooks import EntryHook
    from autopack.runtime.model import Enabled


CACHES = ("past_key_values", "past_key_value", "cache_params", "state")
DROPPED = ("attention_mask", "cache_position", *CACHES)
"""Arguments that a packed row has no use for: the entry passes None."""
_PASSED_ON = {"labels", "num_items_in_batch", "position_ids", "return_dict", "shift_labels", "use_cache"}
_PASSED_ON |= {"output_attentions", "output_hidden_states", "output_router_logits", *DROPPED, *LAYOUT_KWARGS}
"""Arguments that forwards take by `**kwargs` and that mean what they mean everywhere."""
_TRANSPARENT = {"accelerate", "deepspeed", "liger_kernel", "peft", "torch", "transformers"}
"""Packages whose replacement of a model's forward takes and gives what the forward did."""
_LAST_LOGITS = ("logits_to_keep", "num_logits_to_keep")


def obstacle(
    enabled: Enabled,
    padding: Padding,
    declared: Declared,
    module: PreTrainedModel,
    arguments: dict[str, Any],
    entry: EntryHook,
    weights: bool,
) -> str | None:
    """Why a padded batch has to stay as it came, whatever entry could unpad it; None where nothing speaks against it.

    `weights` says whether attention weights are asked for.
    """
    always, training = enabled.unpad == "always", module.training
    if arguments.get("use_cache") or any(_filled(arguments.get(name)) for name in CACHES):
        return "a cache is wanted"
    if _generating():
        return "generation"
    if not (always or training or arguments.get("labels") is not None) and _returns_cache(enabled, arguments):
        return "evaluation without labels may want the cache (use_cache=False or unpad='always' would unpad it)"
    if weights:
        return "attention weights are wanted"
    if arguments.get("encoder_hidden_states") is not None:
        return "it attends to encoder states"
    if not padding.real.any(axis=1).all():
        return "a row holds nothing but padding"
    if not always and declared.labelled_padding:
        return f"padding is labelled and counts in the loss (labels are not {IGNORED_LABEL} there)"
    if not always and any(arguments.get(name) is not None for name in ("start_positions", "end_positions")):
        return "the loss compares all columns of a row, padding included"
    if entry.reads_one_token_per_row and _reads_padding(enabled, padding, module.config, arguments.get("input_ids")):
        return "the token that the head reads is padding in some row"
    if enabled.one_by_one is not None:
        return "documents are run alone, and gain nothing from a packed row"
    if enabled.reads_padding:
        return f"{enabled.model_type} reads padding, so without it tokens would get something else"
    given = next((name for name in enabled.refused_arguments if arguments.get(name) is not None), None)
    if given is not None:
        return f"{given} was given, and {enabled.refused_arguments[given]}"
    if enabled.counts_columns and not padding.on_the_right:
        return f"{enabled.model_type} counts columns by itself, and the padding is not on the right"
    covered = enabled.covered_mixer()
    if covered is not None:
        return f"{covered} has a forward of its own on the instance"
    if enabled.recurs and padding.has_holes:
        return "padding lies between tokens, and state is carried over it"
    if enabled.is_dense and padding.tokens**2 > padding.rows * padding.columns**2:
        return f"{enabled.model_type} scores all pairs of a row, and one row of all documents would have more of them"
    if padding.has_holes and any(_looks_less_far_than(config, padding.columns) for config in enabled.configs):
        return "padding lies between tokens, and attention windows count it"
    return None


def obstacle_here(
    enabled: Enabled, padding: Padding, module: PreTrainedModel, arguments: dict[str, Any], entry: EntryHook
) -> str | None:
    """Why one entry cannot unpad, although one further in may; None where nothing speaks against it."""
    if entry.has_other_head:
        return "the head takes the padded form"
    if pools_single_tokens(module) and activation_of(module) is None:
        return "the pooler is handed one token of every row"
    foreign = replaced_by(module)
    if foreign is not None:
        return f"{foreign} has replaced the forward"
    for name, value in arguments.items():
        if name not in entry.names and name not in _PASSED_ON and value is not None and value is not False:
            return f"{name} is no argument of the model's own forward"
        if not _has_a_place(name, value, padding):
            return f"{name} has no place in a packed row"
    if any(not _is_zero(arguments.get(name)) for name in _LAST_LOGITS):
        return "the last logits of every row are asked for"
    if not enabled.uses_positions:
        return None
    if not entry.takes_positions:
        return "the forward takes no position_ids"
    if arguments.get("position_ids") is None and not (padding.on_the_right or enabled.knows_padded_positions):
        return f"how {enabled.model_type} counts positions after padding is not known; pass position_ids"
    return None


def replaced_by(module: PreTrainedModel) -> str | None:
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


def gather(
    enabled: Enabled, padding: Padding, arguments: dict[str, Any], config: Any, shifts_labels: bool
) -> dict[str, Any]:
    """The arguments of the packed row: what belongs to tokens is gathered, and positions are those of the batch.

    With `shifts_labels`, a token that no real token comes right before gets the label -100: its prediction would have
    been made at padding.
    """
    call = {
        name: _gather(name, value, padding) if _is_per_token(name, value, padding) else value
        for name, value in arguments.items()
    }
    if enabled.uses_positions and call.get("position_ids") is None:
        mask = torch.from_numpy(padding.real).to(padding.device)
        if enabled.recurs:  # a recurrence starts with its document, wherever the batch has it
            found = mask.long().cumsum(1) - 1
        else:
            found = enabled.numbering[config.model_type].in_padded_batch(config, mask, arguments.get("input_ids"))
        call["position_ids"] = padding.gather(found)
    if shifts_labels and call.get("labels") is not None:
        at = torch.from_numpy(padding.unpredicted).to(call["labels"].device)
        call["labels"] = call["labels"].index_fill(1, at, IGNORED_LABEL)
    return call


def _gather(name: str, value: torch.Tensor, padding: Padding) -> torch.Tensor:
    if name != "position_ids":
        return padding.gather(value)
    value = value.expand(*value.shape[:-2], padding.rows, padding.columns)
    return padding.gather(value) if value.dim() == 2 else torch.stack([padding.gather(part) for part in value])


def _generating() -> bool:
    if torch.is_grad_enabled():
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != "transformers.generation.utils":
        frame = frame.f_back
    return frame is not None


def _reads_padding(enabled: Enabled, padding: Padding, config: Any, input_ids: torch.Tensor | None) -> bool:
    """Whether a head or pooler would read padding: the first column of an encoder, the last token of a decoder."""
    if not enabled.causal:
        return not padding.real[:, 0].all()
    pad_token_id = config.get_text_config().pad_token_id
    if input_ids is None or pad_token_id is None:
        return not padding.real[:, -1].all()
    columns = torch.arange(padding.columns, device=input_ids.device)
    last = (columns * (input_ids != pad_token_id)).argmax(1)
    return not padding.real[range(padding.rows), last.cpu().numpy()].all()


def _filled(cache: Any) -> bool:
    return int(cache.get_seq_length()) > 0 if hasattr(cache, "get_seq_length") else bool(cache)


def _returns_cache(enabled: Enabled, arguments: dict[str, Any]) -> bool:
    wanted = arguments.get("use_cache")
    if wanted is None:
        wanted = any(getattr(config, "use_cache", False) for config in enabled.configs)
    return bool(wanted) and enabled.causal


def _looks_less_far_than(config: Any, columns: int) -> bool:
    windows = (value for name, value in vars(config).items() if re.search("window|chunk|local_attention", name))
    reaches = (reach for value in windows for reach in (value if isinstance(value, list | tuple) else [value]))
    return any(isinstance(reach, int) and 0 < reach < columns for reach in reaches)


def _is_zero(value: Any) -> bool:
    return value is None or (isinstance(value, int) and value == 0)


def _has_a_place(name: str, value: Any, padding: Padding) -> bool:
    if name in (*DROPPED, *LAYOUT_KWARGS) or _is_per_token(name, value, padding):
        return True
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not media.holds_media(name)
    return not has_tensors(value)


def has_tensors(value: Any) -> bool:
    """Whether an argument is a collection that may hold tensors."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else ()
    return any(isinstance(part, torch.Tensor | tuple | list | dict) for part in parts)


def _is_per_token(name: str, value: Any, padding: Padding) -> bool:
    if not isinstance(value, torch.Tensor) or name in (*DROPPED, *LAYOUT_KWARGS) or media.holds_media(name):
        return False
    if name == "position_ids":
        return value.dim() in (2, 3) and tuple(value.shape[-2:]) in (padding.shape, (1, padding.columns))
    return tuple(value.shape[:2]) == padding.shape
