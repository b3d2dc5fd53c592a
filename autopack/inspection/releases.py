"""What the installed transformers offers: every question about its version or its internals is answered here.

Sections are ordered by the release that brought the thing, oldest first, so that dropping a release is deleting a
section.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any

import transformers
from packaging.version import Version

VERSION = Version(Version(transformers.__version__).base_version)
MIXERS_COVERED_FROM = Version("5.23")
"""Before this release, models with recurrent layers are audited when they are enabled."""


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


def seq2seq_class_names() -> frozenset[str]:
    """Names of all classes that transformers maps to a loss over the decoder's tokens, speech included."""
    from transformers.models.auto import modeling_auto

    mappings = ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES")
    return frozenset(name for mapping in mappings for name in getattr(modeling_auto, mapping, {}).values())


def is_encoder_type(model_type: str) -> bool:
    """Whether transformers has masked-LM, classification or question-answering classes of a type, and of no decoder."""
    from transformers.models.auto import modeling_auto

    def listed(task: str) -> bool:
        return model_type in getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES")

    others = ("SEQUENCE_CLASSIFICATION", "TOKEN_CLASSIFICATION", "QUESTION_ANSWERING")
    return listed("MASKED_LM") or (not listed("CAUSAL_LM") and any(listed(task) for task in others))


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
