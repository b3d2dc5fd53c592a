"""Notice, at little cost, that a model is no longer what it was: its modules, its code, its loss, its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import PretrainedConfig

from autopack.inspection.provenance import Place, is_foreign_hook, original

_FOLLOWED = frozenset(
    (
        "_attn_implementation_internal",
        "_attn_implementation",
        "_experts_implementation_internal",
        "_name_or_path",
        "_commit_hash",
        "problem_type",
        "id2label",
        "label2id",
        "architectures",
        "transformers_version",
        "use_cache",
        "return_dict",
        "_output_attentions",
        "output_hidden_states",
        "output_attentions",
        "output_router_logits",
    )
)
"""Fields of a configuration that calls read themselves, or that no forward reads."""


class Watch:
    """What a model was when it was looked at: `changed` says whether it is something else now."""

    def __init__(self, model: nn.Module, places: list[Place], configs: list[PretrainedConfig]):
        self._modules = [
            (module, type(module), tuple(module._modules.values()), *_own_functions(module), _Hooks(module))
            for module in model.modules()
        ]
        # One entry for each place: the same function stands in many trees of calls.
        unique = {(id(mapping), name): (mapping, name, value) for mapping, name, value in places}
        self._places = list(unique.values())
        self._configs = [(config, vars(config), _fields(vars(config))) for config in configs]

    def changed(self) -> str | None:
        """What has changed, in words, or None."""
        for module, cls, children, forward, loss, hooks in self._modules:
            own = module.__dict__
            if hooks.changed(module):
                return f"the hooks of a {cls.__name__}"
            if type(module) is not cls or tuple(module._modules.values()) != children:
                return f"a module inside {cls.__name__}"
            if own.get("forward") is not forward:
                return f"the forward of a {cls.__name__}"
            if own.get("_loss_function") is not loss:
                return f"the loss_function of {cls.__name__}"
        for mapping, name, value in self._places:
            found = mapping.get(name)
            if found is not value and original(found) is not value:
                return f"the function {name}"
        for config, now, fields in self._configs:
            # Key by key and not as a whole: comparing identical values costs next to nothing.
            if any(now.get(name) is not value and _kept(now.get(name)) != value for name, value in fields.items()):
                return f"the {type(config).__name__}"
            if len(now) != len(fields) and len(_fields(now)) != len(fields):
                return f"the {type(config).__name__}"
        return None


class _Hooks:
    """The forward hooks of a module. transformers puts on its own when somebody first asks for hidden states."""

    def __init__(self, module: nn.Module):
        self._known = _numbers(module)

    def changed(self, module: nn.Module) -> bool:
        """Whether hooks have been taken off, or somebody else's have been put on."""
        if not (self._known or module._forward_pre_hooks or module._forward_hooks):
            return False
        numbers = _numbers(module)
        if numbers == self._known:
            return False
        hooks = {**module._forward_pre_hooks, **module._forward_hooks}  # torch gives each number once
        known = {number for kind in self._known for number in kind}
        if known - hooks.keys() or any(is_foreign_hook(hooks[number]) for number in hooks.keys() - known):
            return True
        self._known = numbers
        return False


def _numbers(module: nn.Module) -> tuple[tuple[int, ...], ...]:
    before, after = tuple(module._forward_pre_hooks), tuple(module._forward_hooks)
    return (before, after) if before or after else ()


def _own_functions(module: nn.Module) -> tuple[Any, Any]:
    return module.__dict__.get("forward"), module.__dict__.get("_loss_function")


def _fields(config: dict[str, Any]) -> dict[str, Any]:
    """The fields of a configuration that decide what a model computes, as they are now."""
    return {name: _kept(value) for name, value in config.items() if name not in _FOLLOWED}


def _kept(value: Any) -> Any:
    """A value that stays as it is when the collections in it are changed."""
    if isinstance(value, Mapping):
        return {key: _kept(part) for key, part in value.items()}
    return tuple(map(_kept, value)) if isinstance(value, list | tuple) else value
