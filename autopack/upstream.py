"""What the installed transformers offers: every question about its version or its internals is answered here.

Sections are ordered by the release that brought the thing, oldest first, so that dropping a release is deleting a
section.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import transformers
from packaging.version import Version

try:
    from transformers import masking_utils as masking
except ImportError:  # up to 4.52
    masking = None  # type: ignore[assignment]

__all__ = [
    "MASKING_UTILS",
    "MINIMUM_TRANSFORMERS",
    "Pattern",
    "attention_function",
    "attention_mapping",
    "captured_tensors",
    "causal_lm_class_names",
    "describe_mask",
    "has_mask_interface",
    "is_encoder_type",
    "is_flash",
    "kernel_parameters",
    "known_parts",
    "mask_function",
    "mask_mapping",
    "masking_function_parameters",
    "plain_rule",
    "query_arguments",
    "seq2seq_class_names",
    "supported_implementations",
    "with_length",
]

MINIMUM_TRANSFORMERS = "4.48.0"
VERSION = Version(Version(transformers.__version__).base_version)
MIXERS_COVERED_FROM = Version("5.23")
"""Before this release, models with recurrent layers are audited when they are enabled."""
MASKING_UTILS = "transformers.masking_utils"


def is_flash(implementation: str | None) -> bool:
    """Whether an attention implementation is FlashAttention 2, 3 or 4, from the package or from a kernel hub."""
    return bool(implementation) and ("flash_attention" in str(implementation) or "flash-attn" in str(implementation))


def causal_lm_class_names() -> frozenset[str]:
    """Names of all classes that transformers maps to causal language modelling, image-text-to-text included."""
    from transformers.models.auto import modeling_auto

    names: set[str] = set()
    for mapping in ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES"):
        for value in getattr(modeling_auto, mapping, {}).values():
            names.update([value] if isinstance(value, str) else value)
    return frozenset(names)


def is_encoder_type(model_type: str) -> bool:
    """Whether transformers has masked-LM, classification or question-answering classes of a type, and of no decoder."""
    from transformers.models.auto import modeling_auto

    def listed(task: str) -> bool:
        return model_type in getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES")

    others = ("SEQUENCE_CLASSIFICATION", "TOKEN_CLASSIFICATION", "QUESTION_ANSWERING")
    return listed("MASKED_LM") or (not listed("CAUSAL_LM") and any(listed(task) for task in others))


def seq2seq_class_names() -> frozenset[str]:
    """Names of all classes that transformers maps to a loss over the decoder's tokens, speech included."""
    from transformers.models.auto import modeling_auto

    mappings = ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES")
    return frozenset(name for mapping in mappings for name in getattr(modeling_auto, mapping, {}).values())


def supported_implementations(model: Any) -> set[str]:
    """Attention implementations that the model's class declares: eager, sdpa, flex_attention, flash_attention."""
    declared = {"eager"}
    if getattr(model, "_supports_sdpa", False):
        declared.add("sdpa")
    if getattr(model, "_supports_flex_attn", False):
        declared.add("flex_attention")
    # 4.x spelled the flag with a 2.
    if getattr(model, "_supports_flash_attn", False) or getattr(model, "_supports_flash_attn_2", False):
        declared.add("flash_attention")
    return declared


# --- 4.48: ALL_ATTENTION_FUNCTIONS is a dict; models build their own masks


def attention_mapping() -> tuple[str, str]:
    """Module and path of the mapping from implementation name to attention function."""
    modeling_utils = import_module("transformers.modeling_utils")
    if isinstance(modeling_utils.ALL_ATTENTION_FUNCTIONS, dict):
        return "transformers.modeling_utils", "ALL_ATTENTION_FUNCTIONS"
    return "transformers.modeling_utils", "AttentionInterface._global_mapping"


def attention_function(implementation: str) -> Callable[..., Any] | None:
    """The attention function registered under a name, whoever registered it; None where there is none."""
    return import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS.get(implementation)


# --- 4.53: masking_utils and AttentionMaskInterface


@cache
def has_mask_interface() -> bool:
    """Whether masks are made by registered functions (4.53 and later)."""
    return hasattr(masking, "AttentionMaskInterface")


def mask_mapping() -> tuple[str, str]:
    """Module and path of the mapping from implementation name to mask function."""
    return MASKING_UTILS, "AttentionMaskInterface._global_mapping"


def mask_function(implementation: str) -> Callable[..., Any] | None:
    """The mask function registered under a name; None where there is none."""
    return masking.ALL_MASK_ATTENTION_FUNCTIONS.get(implementation)


def masking_function_parameters() -> list[str]:
    """Parameter names of `_preprocess_mask_arguments`, the function that looks for packed rows by itself."""
    return list(inspect.signature(masking._preprocess_mask_arguments).parameters)


@dataclass(frozen=True)
class Pattern:
    """Which earlier and later tokens of its document a token sees: reach in tokens, None for unlimited."""

    causal: bool
    before: int | None = None
    after: int | None = None
    chunk: int | None = None

    @property
    def plain(self) -> bool:
        """Whether every token sees its whole document (bidirectional) or all of it up to itself (causal)."""
        return self.before is None and self.after is None and self.chunk is None


def describe_mask(function: Callable[..., Any]) -> Pattern | None:
    """Recognise a mask function of transformers, or return None where it is anything else.

    Used only to choose a faster backend; a function that is not recognised is evaluated as it stands.
    """
    if function is masking.causal_mask_function:
        return Pattern(causal=True)
    if function is getattr(masking, "bidirectional_mask_function", None):
        return Pattern(causal=False)
    cells = _closure(function)
    name = getattr(function, "__qualname__", "")
    if name == "and_masks.<locals>.and_mask":
        parts = [describe_mask(part) for part in cells.get("mask_functions", ())]
        found = [part for part in parts if part is not None]
        return _intersect(found) if found and len(found) == len(parts) else None
    # The overlays say nothing of causality: they stand beside causal_mask_function or bidirectional_mask_function.
    if name == "sliding_window_overlay.<locals>.inner_mask":
        return Pattern(causal=False, before=int(cells["sliding_window"]) - 1)
    if name == "sliding_window_bidirectional_overlay.<locals>.inner_mask":
        window = int(cells["sliding_window"])
        return Pattern(causal=False, before=window, after=window)
    if name == "chunked_overlay.<locals>.inner_mask":
        return Pattern(causal=False, chunk=int(cells["chunk_size"]))
    return None


def _intersect(parts: list[Pattern]) -> Pattern:
    def least(values: list[int | None]) -> int | None:
        return min((v for v in values if v is not None), default=None)

    chunks = [part.chunk for part in parts]
    return Pattern(
        causal=any(part.causal for part in parts),
        before=least([part.before for part in parts]),
        after=least([part.after for part in parts]),
        chunk=least(chunks),
    )


def _closure(function: Callable[..., Any]) -> dict[str, Any]:
    code = getattr(function, "__code__", None)
    cells = getattr(function, "__closure__", None) or ()
    return dict(zip(code.co_freevars, (cell.cell_contents for cell in cells), strict=True)) if code else {}


def known_parts(function: Callable[..., Any]) -> list[Pattern]:
    """The recognised functions among those that a mask function combines, by intersection or union."""
    inner = [part for value in _closure(function).values() if isinstance(value, tuple | list) for part in value]
    if inner:
        return [pattern for part in inner if callable(part) for pattern in known_parts(part)]
    pattern = describe_mask(function)
    return [] if pattern is None else [pattern]


def captured_tensors(function: Callable[..., Any]) -> list[Any]:
    """All tensors that a mask function and the functions it combines have captured."""
    import torch

    found: list[Any] = []
    for value in _closure(function).values():
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, tuple | list):
            found.extend(t for part in value if callable(part) for t in captured_tensors(part))
        elif inspect.isfunction(value):
            found.extend(captured_tensors(value))
    return found


def plain_rule(causal: bool) -> Callable[..., Any]:
    """The mask function of an unrestricted causal or bidirectional attention."""
    if causal:
        return masking.causal_mask_function
    if hasattr(masking, "bidirectional_mask_function"):
        return masking.bidirectional_mask_function
    return lambda batch, head, query, key: query >= 0


def query_arguments(length: int, device: Any) -> dict[str, Any]:
    """How the installed mask functions are told the number of queries, for a call without a cache."""
    import torch

    if "cache_position" in inspect.signature(masking.sdpa_mask).parameters:
        return {"cache_position": torch.arange(length, device=device)}
    return {"q_length": length, "q_offset": 0}


def with_length(arguments: Mapping[str, Any], length: int) -> dict[str, Any]:
    """The arguments of a mask function for one document alone: one row of `length` tokens, no cache, no padding."""
    alone = dict(arguments, batch_size=1, kv_length=length, kv_offset=0, attention_mask=None)
    if "cache_position" in alone:  # up to 5.0; later releases say q_length and q_offset
        alone["cache_position"] = alone["cache_position"][:length]
    if "q_length" in alone:
        alone["q_length"] = length
    if "q_offset" in alone:
        alone["q_offset"] = 0
    return alone


# --- 5.23: convolutions and scans are functions that stand for CUDA kernels


def kernel_parameters(operation: Any) -> frozenset[str]:
    """Names of the arguments that the kernel behind such a function takes; none where it is computed by torch.

    transformers drops arguments that the kernel does not take, without a word.
    """
    import torch

    # The package `kernels` makes modules of these functions, and may set another forward.
    function = operation.forward if isinstance(operation, torch.nn.Module) else operation
    chosen = inspect.getclosurevars(inspect.unwrap(function, stop=_chooses_kernel)).nonlocals
    own = not chosen and function.__module__.startswith("transformers.models.")
    if own or chosen.get("is_new_implementation") is False:
        return frozenset()
    return frozenset(inspect.signature(chosen.get("implementation", function)).parameters)


def _chooses_kernel(function: Any) -> bool:
    return "is_new_implementation" in getattr(getattr(function, "__code__", None), "co_freevars", ())
