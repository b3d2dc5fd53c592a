"""PEFT methods: exact on packed rows if they act on each token alone, and refused otherwise.

A method is judged by its config, when a wrapped model is enabled and when an enabled model is
wrapped later. An audit could not judge it: a fresh adapter adds nothing yet, so it leaks only once
it has been trained.
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
from autopack.inspection.foreign import is_from
from autopack.runtime.marks import holds_marks

Function = Callable[..., Any]
PER_TOKEN = frozenset(
    (
        "ADALORA BEFT BOFT BONE C3A DEFT DELORA FOURIERFT FROD GLORA GRALORA HIRA HRA IA3 "
        "LN_TUNING LOHA LOKR LORA MISS OFT OSF PEANUT POLY PSOFT PVERA RANDLORA ROAD SHIRA "
        "SUPERTUNING TINYLORA TRAINABLE_TOKENS UNILORA VBLORA VERA WAVEFT"
    ).split()
)
"""PEFT types measured to be exact on packed rows: logits, loss and gradients."""

_PROMPT = (
    "it prepends virtual tokens or a cached prefix to the row, and drops position_ids, so only the "
    "first document of a packed row would get them"
)
_REASONS = {
    "ADAPTION_PROMPT": "it calls the forward of the model inside past its hooks",
    "LILY": "it mixes its experts by probabilities averaged over all tokens of the batch",
    "SHADOW": (
        "it runs a second model beside the enabled one, and that model sees the packed row as one "
        "document"
    ),
    "XLORA": "it calls the forward of the model inside past its hooks",
}
_OPTIONS = {
    "alora_invocation_tokens": (
        "activated LoRA looks for its invocation once per row, not once per document"
    ),
    "velora_config": "VeLoRA's backward replaces activations by their average over the batch",
}
before_tuner: Callable[[Any], None] | None = None
"""Called with the model before a tuner calls its `forward` past its hooks, as all do up to PEFT
0.19."""
_WAY_OUT = "Use LoRA or another method that acts on every token alone, or train without packing."


def check(model: Any) -> None:
    """Raise `UnsupportedModel` if a model carries a PEFT adapter that cannot be packed."""
    configs = getattr(model, "peft_config", None)
    for name, config in configs.items() if isinstance(configs, Mapping) else ():
        reason = _refusal(config)
        if reason is not None:
            raise UnsupportedModel(
                f"the PEFT adapter {name!r} is {_kind(config)}: {reason}. {_WAY_OUT}",
                code="peft-method",
            )


def hands_rows_to_layers(model: nn.Module) -> bool:
    """Return True if PEFT gives layers a value per row in this call: adapter names, task numbers.

    It does so by hooks that it puts on the layers during the call.
    """
    hooks = (hook for module in model.modules() for hook in module._forward_pre_hooks.values())
    return "peft" in sys.modules and any(is_from(hook, "peft") for hook in hooks)


@functools.cache
def watch() -> None:
    """Have PEFT refuse adapters that cannot be packed on enabled models; done once per process.

    PEFT need not be imported yet.
    """
    for module, owner, name, instead in _REPLACEMENTS:
        replace = functools.partial(_replace_method, owner, name, instead)
        wrapt.register_post_import_hook(replace, module)


def _kind(config: Any) -> str:
    """Return the PEFT type of an adapter's config, such as "LORA"."""
    return str(getattr(config.peft_type, "value", config.peft_type))


def _refusal(config: Any) -> str | None:
    """Return the reason why packed rows cannot be exact with an adapter's config, or None."""
    kind = _kind(config)
    if getattr(config, "is_prompt_learning", False):
        return _PROMPT
    if kind in _REASONS:
        return _REASONS[kind]
    unknown = None if kind in PER_TOKEN else "nobody has measured this method on packed rows"
    return next(
        (reason for name, reason in _OPTIONS.items() if getattr(config, name, None)), unknown
    )


def _guard(subject: Callable[..., tuple[nn.Module, Any]]) -> Function:
    """Return a replacement method that refuses adapters that cannot be packed on enabled models.

    It raises before such an adapter is attached or used. `subject` returns (model, adapter's
    config) for the method's arguments.
    """

    def guarded(original: Function, self: Any, *args: Any, **kwargs: Any) -> Any:
        model, config = subject(self, *args, **kwargs)
        reason = _refusal(config)
        if reason is not None and holds_marks(model):
            raise UnsupportedModel(
                f"{_kind(config)} was put on a model that autopack enabled: {reason}. {_WAY_OUT} "
                f"autopack.disable(model) lets it through.",
                code="peft-method",
            )
        return original(self, *args, **kwargs)

    return guarded


def _call_the_model(original: Function, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a tuner's forward, after `before_tuner`, so that an enabled model's hooks run."""
    if before_tuner is not None:
        before_tuner(self.model)
    seen = (
        _View(self, model=_View(self.model, forward=self.model))
        if holds_marks(self.model)
        else self
    )
    return original(seen, *args, **kwargs)


def _pass_positions_on(original: Function, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Run PEFT's forward for question answering; hand on the position_ids that it drops."""
    given = inspect.signature(original).bind(self, *args, **kwargs).arguments.get("position_ids")
    if given is None or not holds_marks(self.base_model):
        return original(self, *args, **kwargs)
    model = functools.partial(self.base_model, position_ids=given)
    return original(_View(self, base_model=model), *args, **kwargs)


class _View:
    """A view of an object in which some attributes differ."""

    def __init__(self, target: Any, **replaced: Any):
        self.__dict__.update(replaced, _target=target)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)


_REPLACEMENTS: list[tuple[str, str, str, Function]] = [
    (
        "peft.peft_model",
        "PeftModel",
        "_setup_prompt_encoder",
        _guard(lambda self, name: (self.base_model, self.peft_config[name])),
    ),
    # Reached by every call: the base model may have been enabled after its prompt, and unseen.
    (
        "peft.peft_model",
        "PeftModel",
        "get_prompt",
        _guard(lambda self, *_, **__: (self.base_model, self.active_peft_config)),
    ),
    ("peft.peft_model", "PeftModelForQuestionAnswering", "forward", _pass_positions_on),
    (
        "peft.tuners.tuners_utils",
        "BaseTuner",
        "inject_adapter",
        _guard(lambda self, model, adapter_name, *_, **__: (model, self.peft_config[adapter_name])),
    ),
    ("peft.tuners.tuners_utils", "BaseTuner", "forward", _call_the_model),
    ("peft.tuners.adalora.model", "AdaLoraModel", "forward", _call_the_model),
    (
        "peft.tuners.adaption_prompt.model",
        "AdaptionPromptModel",
        "add_adapter",
        _guard(lambda self, adapter_name, config: (self.model, config)),
    ),
]
"""Replacements of PEFT's methods: module that defines the class, class, method, replacement."""


def _replace_method(owner: str, name: str, instead: Function, module: Any) -> None:
    """Replace a method of PEFT in a module just imported, unless its forward runs the hooks."""
    original = getattr(getattr(module, owner), name)
    # All tuners call the model's forward up to PEFT 0.19, and AdaLoRA still does.
    if instead is not _call_the_model or "forward" in original.__code__.co_names:
        wrapt.apply_patch(getattr(module, owner), name, _passing_original(original, instead))


def _passing_original(original: Function, instead: Function) -> Function:
    """Return a method that calls `instead` with the original method as its first argument."""

    def replacement(self: Any, *args: Any, **kwargs: Any) -> Any:
        return instead(original, self, *args, **kwargs)

    replacement.autopack_original = original  # type: ignore[attr-defined]
    return replacement
