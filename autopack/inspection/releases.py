"""The installed transformers: its version and its internals are queried here only.

Sections are ordered by the release that brought the thing, oldest first, so that dropping a release
is deleting a section.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import transformers
from packaging.version import Version
from torch import nn
from transformers import modeling_utils

try:
    from transformers.loss import loss_utils
except ImportError:  # up to 4.46
    loss_utils = None  # type: ignore[assignment]
try:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward as SDPA_FUNCTION
except ImportError:  # up to 4.47
    SDPA_FUNCTION = None  # type: ignore[assignment]

VERSION = Version(Version(transformers.__version__).base_version)


def is_flash(implementation: str | None) -> bool:
    """Return True for an implementation of FlashAttention 2, 3 or 4, by package or kernel hub."""
    return bool(implementation) and (
        "flash_attention" in str(implementation) or "flash-attn" in str(implementation)
    )


def is_of_transformers(function: Any) -> bool:
    """Return True if a function's Python module is one of transformers."""
    return str(getattr(function, "__module__", "")).startswith("transformers.")


def class_names(*tasks: str) -> frozenset[str]:
    """Return the names of transformers' model classes for some tasks, such as "CAUSAL_LM"."""
    values = [value for task in tasks for value in _classes(task).values()]
    return frozenset(
        name for value in values for name in ([value] if isinstance(value, str) else value)
    )


def is_encoder_type(model_type: str) -> bool:
    """Return True if a model type has masked-LM, classification or QA classes, and no decoder."""
    others = ("SEQUENCE_CLASSIFICATION", "TOKEN_CLASSIFICATION", "QUESTION_ANSWERING")
    tasks = ("MASKED_LM", *(() if model_type in _classes("CAUSAL_LM") else others))
    return any(model_type in _classes(task) for task in tasks)


def _classes(task: str) -> dict[str, Any]:
    """Return the class name, or names, that transformers maps each model type to for a task."""
    from transformers.models.auto import modeling_auto

    return getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES", {})


# --- up to 4.47: attention is a class for each implementation, and there is no interface


def has_attention_interface() -> bool:
    """Return True if attention functions are registered by implementation name (4.48 and later)."""
    return hasattr(modeling_utils, "ALL_ATTENTION_FUNCTIONS")


# --- 4.48: ALL_ATTENTION_FUNCTIONS is a dict; models build their own masks


def attention_mapping() -> tuple[str, str]:
    """Return the module and path of the mapping from implementation name to attention function."""
    is_dict = isinstance(modeling_utils.ALL_ATTENTION_FUNCTIONS, dict)
    return (
        modeling_utils.__name__,
        "ALL_ATTENTION_FUNCTIONS" if is_dict else "AttentionInterface._global_mapping",
    )


def common_interface(interface: Any) -> str | None:
    """Return the Python module of an interface object if it is the one models share, or None."""
    return modeling_utils.__name__ if interface is modeling_utils.ALL_ATTENTION_FUNCTIONS else None


def attention_function(implementation: str) -> Callable[..., Any] | None:
    """Return the attention function registered under a name, by anyone, or None."""
    return (
        modeling_utils.ALL_ATTENTION_FUNCTIONS.get(implementation)
        if has_attention_interface()
        else None
    )


def flash_wants_positions() -> bool:
    """Return True if flash attention takes lengths only along with positions (4.48 to 4.52)."""
    return Version("4.53") > VERSION


LOSS_UTILS = "transformers.loss.loss_utils"
"""The Python module of the losses."""


def losses() -> dict[str, Any]:
    """Return transformers' losses by kind; empty before 4.47, where forwards compute them."""
    return {} if loss_utils is None else loss_utils.LOSS_MAPPING


def kind_of_loss(model: Any) -> str:
    """Return the key of a model's loss in `losses`: its `loss_type`, or "ForCausalLM"."""
    kind = getattr(model, "loss_type", None)
    return kind if kind in losses() else "ForCausalLM"


def shifting_loss() -> Callable[..., Any] | None:
    """Return the loss of causal language models, which shifts labels; None before 4.47."""
    return None if loss_utils is None else loss_utils.ForCausalLMLoss


# --- 5.23: convolutions and scans are functions that stand for CUDA kernels


def kernel_parameters(operation: Any) -> frozenset[str]:
    """Return the argument names of the kernel that a function calls; empty if torch computes it.

    transformers drops arguments that the kernel does not take, without a word.
    """
    # The package `kernels` makes modules of these functions, and may set another forward.
    function = operation.forward if isinstance(operation, nn.Module) else operation
    chooses = "is_new_implementation"
    inner = inspect.unwrap(
        function, stop=lambda f: chooses in getattr(getattr(f, "__code__", None), "co_freevars", ())
    )
    chosen = inspect.getclosurevars(inner).nonlocals
    own = not chosen and function.__module__.startswith("transformers.models.")
    if own or chosen.get(chooses) is False:
        return frozenset()
    return frozenset(inspect.signature(chosen.get("implementation", function)).parameters)
