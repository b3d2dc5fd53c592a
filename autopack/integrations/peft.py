"""PEFT: methods that act on every token alone are exact on packed rows; those that look beyond the token are refused.

A method is judged by its config, when a wrapped model is enabled and when an enabled model is wrapped later. An audit
could not do it: a fresh adapter adds nothing yet, so it leaks only once it has been trained.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

import wrapt
from torch import nn

from autopack.errors import UnsupportedModel
from autopack.runtime.marks import holds_marks

# fmt: off
PER_TOKEN = frozenset({
    "ADALORA", "BEFT", "BOFT", "BONE", "C3A", "DEFT", "DELORA", "FOURIERFT", "FROD", "GLORA", "GRALORA", "HIRA",
    "HRA", "IA3", "LN_TUNING", "LOHA", "LOKR", "LORA", "MISS", "OFT", "OSF", "PEANUT", "POLY", "PSOFT", "PVERA",
    "RANDLORA", "ROAD", "SHIRA", "SUPERTUNING", "TINYLORA", "TRAINABLE_TOKENS", "UNILORA", "VBLORA", "VERA", "WAVEFT",
})
# fmt: on
"""PEFT types measured to be exact on packed rows: logits, loss and gradients."""

_PROMPT = (
    "it prepends virtual tokens or a cached prefix to the row, and drops position_ids, so only the first document of a "
    "packed row would get them"
)
_REASONS = {
    "ADAPTION_PROMPT": "it calls the forward of the model inside past its hooks",
    "LILY": "it mixes its experts by probabilities averaged over all tokens of the batch",
    "SHADOW": "it runs a second model beside the enabled one, and that model sees the packed row as one document",
    "XLORA": "it calls the forward of the model inside past its hooks",
}
_OPTIONS = {
    "alora_invocation_tokens": "activated LoRA looks for its invocation once per row, not once per document",
    "velora_config": "VeLoRA's backward replaces activations by their average over the batch",
}
_WAY_OUT = "Use LoRA or another method that acts on every token alone, or train without packing."


def base_model(module: nn.Module) -> nn.Module | None:
    """The next module inside a PEFT model or tuner, or None for anything else.

    Raises `UnsupportedModel` for methods that cannot be packed.
    """
    peft = sys.modules.get("peft")
    if peft is None:
        return None
    if isinstance(module, peft.tuners.tuners_utils.BaseTuner):
        _check_all(module.peft_config)
        return module.model
    if not isinstance(module, (peft.PeftModel, peft.PeftMixedModel)):
        return None
    _check_all(module.peft_config)
    return module.base_model


def check(model: nn.Module) -> None:
    """Raise `UnsupportedModel` for a model that carries an adapter that cannot be packed, put on by whatever way."""
    configs = getattr(model, "peft_config", None)
    if isinstance(configs, Mapping):
        _check_all(configs)


def watch() -> None:
    """Judge what PEFT puts on an enabled model later; inert for other models. PEFT need not be imported yet."""
    for module, stand in {
        "peft.peft_model": _stand_at_model,
        "peft.tuners.tuners_utils": _stand_at_tuners,
        "peft.tuners.adalora.model": _stand_at_adalora,
        "peft.tuners.adaption_prompt.model": _stand_at_adaption_prompt,
    }.items():
        wrapt.register_post_import_hook(stand, module)


def _check_all(configs: Mapping[str, Any]) -> None:
    for name, config in configs.items():
        reason = _refusal(config)
        if reason is not None:
            raise UnsupportedModel(f"the PEFT adapter {name!r} is {_kind(config)}: {reason}. {_WAY_OUT}")


def _kind(config: Any) -> str:
    return str(getattr(config.peft_type, "value", config.peft_type))


def _refusal(config: Any) -> str | None:
    """Why packed rows cannot be exact with an adapter of this config, or None."""
    kind = _kind(config)
    if getattr(config, "is_prompt_learning", False):
        return _PROMPT
    if kind in _REASONS:
        return _REASONS[kind]
    option = next((name for name in _OPTIONS if getattr(config, name, None)), None)
    if option is not None:
        return _OPTIONS[option]
    return None if kind in PER_TOKEN else "no released test has covered this method on packed rows"


def _stand_at_model(module: Any) -> None:
    _guard(module.PeftModel, "_setup_prompt_encoder", lambda self, name: (self.base_model, self.peft_config[name]))
    # Reached by every call: the base model may have been enabled after, and unseen from, its prompt.
    _guard(module.PeftModel, "get_prompt", lambda self, *_, **__: (self.base_model, self.active_peft_config))
    _pass_positions_on(module.PeftModelForQuestionAnswering)


def _stand_at_tuners(module: Any) -> None:
    _guard(
        module.BaseTuner,
        "inject_adapter",
        lambda self, model, adapter_name, *_, **__: (model, self.peft_config[adapter_name]),
    )
    _call_the_model(module.BaseTuner)


def _stand_at_adalora(module: Any) -> None:
    _call_the_model(module.AdaLoraModel)


def _stand_at_adaption_prompt(module: Any) -> None:
    _guard(module.AdaptionPromptModel, "add_adapter", lambda self, adapter_name, config: (self.model, config))


def _guard(cls: Any, name: str, subject: Callable[..., tuple[nn.Module, Any]]) -> None:
    """Let a method raise where it would put an adapter that cannot be packed on an enabled model, or use one."""
    original = getattr(cls, name)
    if hasattr(original, "autopack_original"):
        return

    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        model, config = subject(self, *args, **kwargs)
        reason = _refusal(config)
        if reason is not None and holds_marks(model):
            raise UnsupportedModel(
                f"{_kind(config)} was put on a model that autopack enabled: {reason}. {_WAY_OUT} "
                f"autopack.disable(model) lets it through."
            )
        return original(self, *args, **kwargs)

    guarded.autopack_original = original  # type: ignore[attr-defined]
    wrapt.apply_patch(cls, name, guarded)


def _call_the_model(tuner: Any) -> None:
    """Let a tuner call an enabled model where it calls the model's `forward`, past the hooks.

    All tuners do so up to PEFT 0.19, and AdaLoRA still does.
    """
    original = tuner.forward
    if hasattr(original, "autopack_original") or "forward" not in original.__code__.co_names:
        return

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not holds_marks(self.model):
            return original(self, *args, **kwargs)
        return original(_Seen(self, model=_Seen(self.model, forward=self.model)), *args, **kwargs)

    forward.autopack_original = original  # type: ignore[attr-defined]
    wrapt.apply_patch(tuner, "forward", forward)


def _pass_positions_on(wrapper: Any) -> None:
    """Let a wrapper hand position_ids to an enabled model: that of question answering takes them and drops them."""
    original = wrapper.forward
    if hasattr(original, "autopack_original"):
        return

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(original).bind(self, *args, **kwargs).arguments.get("position_ids")
        if given is None or not holds_marks(self.base_model):
            return original(self, *args, **kwargs)
        model = functools.partial(self.base_model, position_ids=given)
        return original(_Seen(self, base_model=model), *args, **kwargs)

    forward.autopack_original = original  # type: ignore[attr-defined]
    wrapt.apply_patch(wrapper, "forward", forward)


class _Seen:
    """An object as it is, but for some attributes."""

    def __init__(self, target: Any, **replaced: Any):
        self.__dict__.update(replaced, _target=target)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)
