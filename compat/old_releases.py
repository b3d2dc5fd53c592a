"""What stand-ins need in older releases: one section for each change of transformers, so that it
can be deleted."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any
from unittest import mock

# --- before 4.54: transformers binds the functions of FlashAttention 2 when it is imported, if they
# can be used then


def bound_at_import(flash: ModuleType, modules: dict[str, ModuleType]) -> dict[str, Any]:
    """What an import with FlashAttention 2 would have bound in transformers' module; nothing where
    that is lazy."""
    if hasattr(flash, "lazy_import_flash_attention") or hasattr(flash, "_lazy_imports"):
        return {}
    package, padding = modules["flash_attn"], modules["flash_attn.bert_padding"]
    functions = {
        "flash_attn_func": package.flash_attn_func,
        "flash_attn_varlen_func": package.flash_attn_varlen_func,
    }
    of_padding = {"pad_input": padding.pad_input, "unpad_input": padding.unpad_input}
    bound = {**functions, **of_padding, "index_first_axis": lambda hidden, indices: hidden[indices]}
    bound |= {
        name.replace("flash_attn", "flash_attn_2"): function for name, function in functions.items()
    }
    bound |= {f"{name}_fa2": function for name, function in of_padding.items()}
    return {
        **bound,
        "FA_VERSION": "2",
        "_flash_supports_window_size": True,
        "_is_flash_attn_2_available": True,
    }


def bind_flash(model: Any) -> None:
    """Give the code of a model transformers' flash function, as its import with FlashAttention
    would have done."""
    from transformers.modeling_flash_attention_utils import _flash_attention_forward

    for name in {type(module).__module__ for module in model.modules()}:
        if name.startswith("transformers.models.") and not hasattr(
            sys.modules[name], "_flash_attention_forward"
        ):
            vars(sys.modules[name])["_flash_attention_forward"] = _flash_attention_forward


# --- before 4.54: models have a class of attention for each implementation, and check the hardware
# when they are built


@contextlib.contextmanager
def without_hardware_checks() -> Iterator[None]:
    """Let models be built with implementations whose hardware is not there: classes that choose
    theirs when built."""
    from transformers import PreTrainedModel

    def accept(kind: str) -> Any:
        def enable(cls: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
            config._attn_implementation = kind
            return config

        return classmethod(enable)

    with contextlib.ExitStack() as stack:
        for name, kind in (("flash_attn_2", "flash_attention_2"), ("flex_attn", "flex_attention")):
            if hasattr(PreTrainedModel, f"_check_and_enable_{name}"):
                stack.enter_context(
                    mock.patch.object(PreTrainedModel, f"_check_and_enable_{name}", accept(kind))
                )
        # 4.54 and later
        for name in (
            "_flash_attn_2_can_dispatch",
            "_flash_attn_can_dispatch",
            "_flex_attn_can_dispatch",
        ):
            if hasattr(PreTrainedModel, name):
                stack.enter_context(mock.patch.object(PreTrainedModel, name, return_value=True))
        yield


def chosen_when_built(model: Any) -> bool:
    """Whether there are classes of attention by implementation, so that a built model cannot change
    its own.

    The release has them for all models, or a model of a later one still does (ESM, up to 4.55).
    """
    own = vars(sys.modules[type(model).__module__])
    return hasattr(type(model), "_check_and_enable_flash_attn_2") or any(
        n.endswith("_ATTENTION_CLASSES") for n in own
    )
