"""PEFT: LoRA and the like pass calls on to the base model; prompt and prefix tuning cannot be packed."""

from __future__ import annotations

import sys
from typing import Any

import wrapt
from torch import nn

from autopack.delivery import MARK
from autopack.errors import UnsupportedModel

__all__ = ["base_model", "watch"]

_WAY_OUT = (
    "it prepends virtual tokens or a cached prefix to the row, and drops position_ids, so only the first document of a "
    "packed row would get them. Use LoRA or another adapter that works inside the layers, or train without packing."
)


def base_model(module: nn.Module) -> nn.Module | None:
    """The model inside a PEFT model, or None for anything else. Prompt and prefix tuning: `UnsupportedModel`."""
    peft = sys.modules.get("peft")
    if peft is None or not isinstance(module, peft.PeftModel):
        return None
    for name, config in module.peft_config.items():
        if getattr(config, "is_prompt_learning", False):
            raise UnsupportedModel(f"the PEFT adapter {name!r} is {config.peft_type.value}: {_WAY_OUT}")
    return module.get_base_model()


def watch() -> None:
    """Refuse prompt learning that is put on an enabled model later: from within, its calls look unpacked."""
    wrapt.register_post_import_hook(_guard_prompt_encoder, "peft.peft_model")


def _guard_prompt_encoder(module: Any) -> None:
    original = module.PeftModel._setup_prompt_encoder
    if getattr(original, "autopack_guard", False):
        return

    def _setup_prompt_encoder(self: Any, adapter_name: str) -> Any:
        if any(MARK in part.__dict__ for part in self.base_model.modules()):
            kind = self.peft_config[adapter_name].peft_type.value
            raise UnsupportedModel(f"{kind} was put on a model that autopack enabled: {_WAY_OUT}")
        return original(self, adapter_name)

    _setup_prompt_encoder.autopack_guard = True  # type: ignore[attr-defined]
    wrapt.apply_patch(module.PeftModel, "_setup_prompt_encoder", _setup_prompt_encoder)
