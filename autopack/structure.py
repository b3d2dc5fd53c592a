"""Find, in any model, where attention goes through transformers' interface: by what its code says, not by names."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator
from functools import cache
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import PreTrainedModel

from autopack import upstream

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = [
    "adds_up_mask",
    "attention_modules",
    "checkpointed_modules",
    "configs_of",
    "cross_attention",
    "defining_class",
    "eager_functions",
    "entries",
    "forwards_of",
    "halves",
    "is_causal",
    "is_pair",
    "mixers",
    "modules_with_own_function",
    "shifts_labels",
]

_INTERFACE = "ALL_ATTENTION_FUNCTIONS"
_ACROSS = {"encoder_attn", "encoder_decoder_attention"}
_CROSS_ENTROPY = {"CrossEntropyLoss", "cross_entropy", "nll_loss"}


def _class(module: nn.Module) -> Any:
    # Typed as Any because type checkers take a class of modules for unhashable.
    return type(module)


def attention_modules(root: nn.Module) -> list[nn.Module]:
    """The modules under `root` that call an attention function of transformers' interface.

    Sub-models that take neither tokens nor embeddings (vision and audio towers) are left out: they pack by themselves.
    """
    return [module for module in _text_modules(root) if _dispatches(_class(module))]


def mixers(root: nn.Module, names: Collection[str]) -> list[nn.Module]:
    """The modules under `root` of classes of these names."""
    # By the names of the bases too: FSDP puts modules into a class of its own that derives from theirs.
    return [module for module in _text_modules(root) if any(cls.__name__ in names for cls in type(module).__mro__)]


def forwards_of(modules: list[nn.Module]) -> list[tuple[str, str]]:
    """Module and path of each forward that these modules run."""
    classes = {defining_class(module) for module in modules}
    return sorted((cls.__module__, f"{cls.__qualname__}.forward") for cls in classes)


def defining_class(module: nn.Module) -> Any:
    """The class whose forward a module runs."""
    return next(cls for cls in type(module).__mro__ if "forward" in vars(cls))


def entries(model: PreTrainedModel) -> list[PreTrainedModel]:
    """The model and the models inside it that can be called with tokens on their own, the outermost first."""
    return [module for module in _text_modules(model) if isinstance(module, PreTrainedModel) and _takes_tokens(module)]


def is_pair(model: nn.Module) -> bool:
    """Whether a model calls an encoder and a decoder: it takes tokens for both."""
    return "decoder_input_ids" in _parameters_of(_class(model))


def halves(model: PreTrainedModel) -> tuple[nn.Module, nn.Module] | None:
    """The encoder and the decoder of a model that has both, or None."""
    if not is_pair(model):
        return None
    encoder, decoder = model.get_encoder(), model.get_decoder()
    return (encoder, decoder) if isinstance(encoder, nn.Module) and isinstance(decoder, nn.Module) else None


def cross_attention(decoder: nn.Module, mixing: list[nn.Module]) -> list[nn.Module]:
    """Those of the modules `mixing` under a decoder that attend to what the encoder has made: by their names."""
    # The class says nothing: most decoders use one class for both.
    named = {id(module): name for name, module in decoder.named_modules()}
    return [module for module in mixing if _is_across(named.get(id(module), ""))]


def _is_across(path: str) -> bool:
    parts = path.lower().split(".")
    return any(part in _ACROSS or "cross" in part or "encdec" in part for part in parts)


def _text_modules(root: nn.Module) -> Iterator[nn.Module]:
    yield root
    for child in root.children():
        if isinstance(child, PreTrainedModel) and not (_takes_tokens(child) or _passes_all_on(child)):
            continue
        yield from _text_modules(child)


@cache
def _parameters_of(cls: Any) -> frozenset[str]:
    return frozenset(inspect.signature(cls.forward).parameters)


def _takes_tokens(model: PreTrainedModel) -> bool:
    return bool(_parameters_of(_class(model)) & {"input_ids", "inputs_embeds", "decoder_input_ids"})


def _passes_all_on(model: PreTrainedModel) -> bool:
    """Decoder wrappers of encoder-decoder types: `forward(*args, **kwargs)`."""
    return _parameters_of(_class(model)) <= {"self", "args", "kwargs"}


def shifts_labels(model: PreTrainedModel) -> bool:
    """Whether the model's own loss compares the prediction at each token with the label of the next one.

    Decided by what the loss does: several decoders (whisper, trocr, bart) compare within one column.
    """

    def code(module: nn.Module) -> CodeType:
        return inspect.unwrap(_class(module).forward).__code__

    names, variables = _names(code(model)), code(model).co_varnames
    for name in sorted(names):
        method = getattr(type(model), name, None)
        if name.startswith("_") and "loss" in name and isinstance(method, FunctionType):
            names, variables = names | _names(method.__code__), variables + method.__code__.co_varnames
    if "loss_function" in names:
        loss = getattr(model.loss_function, "__name__", "")
        is_causal_lm = type(model).__name__ in upstream.causal_lm_class_names()
        return loss == "ForCausalLMLoss" or (is_causal_lm and not loss.startswith("For"))
    if names & _CROSS_ENTROPY:
        return any("shift" in variable for variable in variables)
    if any(_names(code(part)) & _CROSS_ENTROPY for part in model.children() if not isinstance(part, PreTrainedModel)):
        return False  # a head that is given labels compares them with what it is given beside them
    return "labels" in variables and type(model).__name__ in upstream.causal_lm_class_names()


def adds_up_mask(entries: list[PreTrainedModel], configs: list[PretrainedConfig]) -> bool:
    """Whether the models' own code adds up a mask to number tokens, or their rotary positions have sections."""
    summed = any("cumsum" in _names(inspect.unwrap(type(entry).forward).__code__) for entry in entries)
    return summed or any(
        "mrope" in str(getattr(config, name, None))
        for config in configs
        for name in ("rope_scaling", "rope_parameters")
    )


def is_causal(module: nn.Module, config: PretrainedConfig) -> bool:
    """Whether an attention module lets tokens see later ones never, as it or the model's config says."""
    # Several decoders say is_causal=False and bring a causal mask.
    told = [getattr(module, name) for name in ("is_causal", "is_decoder") if hasattr(module, name)]
    if told:
        return any(told)
    if hasattr(config, "causal"):
        return bool(config.causal)
    return bool(getattr(config, "is_decoder", False)) or not upstream.is_encoder_type(config.model_type)


def checkpointed_modules(model: nn.Module) -> list[nn.Module]:
    """The modules that may hold a gradient checkpointing function."""
    return [module for module in model.modules() if hasattr(module, "gradient_checkpointing")]


def configs_of(modules: list[nn.Module]) -> list[PretrainedConfig]:
    """The distinct configs that these modules read, by identity."""
    found: dict[int, PretrainedConfig] = {}
    for module in modules:
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "_attn_implementation"):
            found[id(config)] = config
    return list(found.values())


def eager_functions(modules: list[nn.Module]) -> list[tuple[str, str]]:
    """Module and name of each function that these attention modules call when attention is eager."""
    found: dict[tuple[str, str], None] = {}
    for cls in {_class(module) for module in modules}:
        for function in _dispatching_functions(cls):
            for name in _names(function.__code__):
                value = function.__globals__.get(name)
                if "eager" in name and callable(value):
                    found[(function.__globals__["__name__"], name)] = None
    return sorted(found)


@cache
def _dispatches(cls: Any) -> bool:
    return bool(_dispatching_functions(cls))


@cache
def _dispatching_functions(cls: Any) -> tuple[FunctionType, ...]:
    found = []
    for base in cls.__mro__:
        if base in (nn.Module, PreTrainedModel):
            break
        for value in vars(base).values():
            function = inspect.unwrap(value) if callable(value) else value
            if isinstance(function, FunctionType) and _INTERFACE in _names(function.__code__):
                found.append(function)
    return tuple(found)


def _names(code: CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names(constant)
    return names


def modules_with_own_function(modules: list[nn.Module], implementation: str) -> list[str]:
    """Names of the Python modules whose interface object overrides an implementation for itself alone."""
    found: dict[str, None] = {}
    for cls in {_class(module) for module in modules}:
        for function in _dispatching_functions(cls):
            interface = function.__globals__.get(_INTERFACE)
            if implementation in getattr(interface, "_local_mapping", {}):
                found[function.__globals__["__name__"]] = None
    return list(found)
