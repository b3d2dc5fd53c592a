"""What a model's code says of it: whether its loss shifts labels, what attends, whether a mask is added up."""

from __future__ import annotations

import inspect
from functools import cache
from types import CodeType, FunctionType
from typing import Any

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from autopack.inspection import releases

_INTERFACE = "ALL_ATTENTION_FUNCTIONS"
_CROSS_ENTROPY = {"CrossEntropyLoss", "cross_entropy", "nll_loss"}


def class_of(module: nn.Module) -> Any:
    """The class of a module, as Any: type checkers take a class of modules for unhashable."""
    return type(module)


def shifts_labels(model: PreTrainedModel) -> bool:
    """Whether the model's own loss compares the prediction at each token with the label of the next one.

    Decided by what the loss does: several decoders (whisper, trocr, bart) compare within one column.
    """

    def code(module: nn.Module) -> CodeType:
        return inspect.unwrap(class_of(module).forward).__code__

    names, variables = names_in(code(model)), code(model).co_varnames
    for name in sorted(names):
        method = getattr(type(model), name, None)
        if name.startswith("_") and "loss" in name and isinstance(method, FunctionType):
            names, variables = names | names_in(method.__code__), variables + method.__code__.co_varnames
    if "loss_function" in names:
        loss = getattr(model.loss_function, "__name__", "")
        is_causal_lm = type(model).__name__ in releases.causal_lm_class_names()
        return loss == "ForCausalLMLoss" or (is_causal_lm and not loss.startswith("For"))
    if names & _CROSS_ENTROPY:
        return any("shift" in variable for variable in variables)
    if any(names_in(code(part)) & _CROSS_ENTROPY for part in model.children() if not isinstance(part, PreTrainedModel)):
        return False  # a head that is given labels compares them with what it is given beside them
    return "labels" in variables and type(model).__name__ in releases.causal_lm_class_names()


def adds_up_mask(entries: list[PreTrainedModel], configs: list[PretrainedConfig]) -> bool:
    """Whether the models' own code adds up a mask to number tokens, or their rotary positions have sections."""
    summed = any("cumsum" in names_in(inspect.unwrap(type(entry).forward).__code__) for entry in entries)
    settings = [getattr(config, name, None) for config in configs for name in ("rope_scaling", "rope_parameters")]
    return summed or any("mrope" in str(setting) for setting in settings)


def is_causal(module: nn.Module, config: PretrainedConfig) -> bool:
    """Whether an attention module lets tokens see later ones never, as it or the model's config says."""
    # Several decoders say is_causal=False and bring a causal mask.
    told = [getattr(module, name) for name in ("is_causal", "is_decoder") if hasattr(module, name)]
    if told:
        return any(told)
    if hasattr(config, "causal"):
        return bool(config.causal)
    return bool(getattr(config, "is_decoder", False)) or not releases.is_encoder_type(config.model_type)


def eager_functions(modules: list[nn.Module]) -> list[tuple[str, str]]:
    """Module and name of each function that these attention modules call when attention is eager."""
    found = {
        (function.__globals__["__name__"], name)
        for cls in {class_of(module) for module in modules}
        for function in dispatching_functions(cls)
        for name in names_in(function.__code__)
        if "eager" in name and callable(function.__globals__.get(name))
    }
    return sorted(found)


def dispatching_functions(cls: Any) -> tuple[FunctionType, ...]:
    """The functions of a class that read the interface of attention functions."""
    found = []
    for base in cls.__mro__:
        if base in (nn.Module, PreTrainedModel):
            break
        for value in vars(base).values():
            function = inspect.unwrap(value) if callable(value) else value
            if isinstance(function, FunctionType) and _INTERFACE in names_in(function.__code__):
                found.append(function)
    return tuple(found)


@cache
def names_in(code: CodeType) -> frozenset[str]:
    """The global names and attributes that a function reads, those of functions inside it too."""
    inner = (names_in(part) for part in code.co_consts if isinstance(part, CodeType))
    return frozenset(code.co_names).union(*inner)


def modules_with_own_function(modules: list[nn.Module], implementation: str) -> list[str]:
    """Names of the Python modules whose interface object overrides an implementation for itself alone."""
    names = [f.__globals__ for cls in {class_of(module) for module in modules} for f in dispatching_functions(cls)]
    own = (n for n in names if implementation in getattr(n.get(_INTERFACE), "_local_mapping", {}))
    return list(dict.fromkeys(n["__name__"] for n in own))
