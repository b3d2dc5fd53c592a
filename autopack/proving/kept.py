"""Kinds of modules, by which twins are as good as their models; and results of twins of models that
run library code only, kept for other models of this process."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from autopack import registry
from autopack.inspection.code import ModelCode
from autopack.inspection.foreign import is_from, is_of_library, is_own, original, passes_on

T = TypeVar("T")
_RUN_TIME = ("torch.distributed.", "torch.nn.utils.", "torch._dynamo.", "torch.nn.parallel.")
"""Origins of classes that wrap or replace modules' classes after they have been made."""
_NOT_OF_THE_CODE = frozenset(
    "training gradient_checkpointing name_or_path is_gradient_checkpointing peft_config "
    "hf_device_map hf_quantizer is_quantized quantization_method is_loaded_in_4bit "
    "is_loaded_in_8bit is_4bit_serializable is_8bit_serializable model_tags vocab_size rope_deltas "
    "pre_bwd_fn post_bwd_fn".split()
).union(vars(nn.Module()))
"""Attributes that do not concern a module's code, with those that every module of torch has.

They tell a module's present use, its number among many, the loader of its weights, its model card
(`add_model_tags`, which TRL and others call), its number of embeddings (`resize_token_embeddings`
puts that on models whose class has none), the last call's state for generation, or what DeepSpeed's
hooks keep there.
"""

_TOKEN_WISE: tuple[type, ...] = (
    *(nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm, nn.Dropout, nn.Identity),
    *(nn.ModuleList, nn.ModuleDict, nn.Sequential, nn.ParameterList, nn.ParameterDict),
)
"""Modules of torch that treat every token alike, or only hold other modules."""
_OVER_AN_AXIS = (nn.MultiheadAttention, nn.Softmax, nn.Softmin, nn.LogSoftmax, nn.Softmax2d, nn.GLU)
_HOLDERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
Kind = tuple[Any, Any, frozenset[tuple[str, Any]]]
"""A module's kind: the class around it, its class, and the attributes that its code may read."""
_NAMES = frozenset(
    ("_name_or_path", "name_or_path", "_commit_hash", "transformers_version", "architectures")
)
"""Fields of a configuration that tell its origin."""

_answers: dict[Hashable, Any] = {}


def own_class(model: nn.Module) -> Any:
    """Return a module's class without torch's run-time subclasses (FSDP, parametrizations)."""
    return next(cls for cls in type(model).__mro__ if not cls.__module__.startswith(_RUN_TIME))


class Kinds:
    """Kinds of a model's modules at present, by name, run-time wrappers left out."""

    def __init__(self, model: nn.Module, code: ModelCode | None = None):
        self.by_name: dict[str, Kind] = {}
        self.read = (code or ModelCode(model)).words
        self._names: dict[Any, list[str]] = {}
        self._walk(model, "", None)
        self.all = set(self.by_name.values())

    def _walk(self, module: nn.Module, name: str, above: Any) -> None:
        """Add the kinds of a module and of all modules below it to `by_name`."""
        cls = own_class(module)
        # `fully_shard` and parametrizations derive a class from that of the module, which is no
        # wrapper then.
        wraps = (type(module).__module__.startswith(_RUN_TIME) and cls is nn.Module) or is_from(
            cls, "peft"
        )
        if not wraps:
            shape = type(module), *vars(module)
            if shape not in self._names:
                self._names[shape] = _names_read(module, self.read)
            attributes = frozenset(_attributes(module, self._names[shape]))
            self.by_name[name] = (above, cls, attributes)
        for child_name, child in module.named_children():
            self._walk(
                child, f"{name}.{child_name}" if name else child_name, above if wraps else cls
            )

    def without(self, known: Kinds) -> list[str]:
        """Return names of outermost modules whose kind is not `known`, but for token-wise ones."""
        found: list[str] = []
        for name, kind in self.by_name.items():
            if kind in known.all or f"{name}.".startswith(tuple(f"{other}." for other in found)):
                continue
            _, cls, attributes = kind
            if cls.__module__ == "torch.nn.modules.activation":
                is_token_wise = cls not in _OVER_AN_AXIS and is_of_library(cls)
            else:
                is_token_wise = cls in _TOKEN_WISE
            if not is_token_wise or not all(
                isinstance(word, (bool, str, type(None))) for _, word in attributes
            ):
                found.append(name)
                if not name:
                    break
        return found


def _code_or_function(function: Any) -> Any:
    """Return a function's code if it has a closure, and other functions themselves."""
    function = original(getattr(function, "__func__", function))
    return function.__code__ if getattr(function, "__closure__", None) else function


def _names_read(module: nn.Module, read: set[Any]) -> list[str]:
    """Return the names of a module's attributes that its code may read.

    Attributes that no code of the model reads, and that replace nothing of its class, are left out:
    users' notes, and marks by which programs find their own again (DeepSpeed, ms-swift).
    """
    return [
        name
        for name in vars(module).keys() - _NOT_OF_THE_CODE
        if not name.startswith("_") and (name in read or hasattr(type(module), name))
    ]


def _attributes(module: nn.Module, names: list[str]) -> Iterator[tuple[str, Any]]:
    """Yield (name, value or a word for it) of attributes of a module.

    They are flags and names as they are, types of numbers and the like, names of parts, and
    presence and class of parameters. Functions count by identity, so that a third-party one is told
    from the class's own.
    """
    kind: Any = type(module)
    for name in names:
        value = vars(module)[name]
        # Tensors may be views of parameters that FSDP has made one, or weights that a norm of torch
        # makes anew.
        if isinstance(value, torch.Tensor):
            continue
        if value is not None and value is getattr(kind, name, None):
            continue
        if callable(value) and passes_on(module, name, value):  # accelerate's
            continue
        if isinstance(value, (bool, str, type(None))):
            yield name, value
        elif isinstance(value, (int, float)):
            yield name, "a number"
        elif isinstance(value, (FunctionType, BuiltinFunctionType, MethodType)):
            yield name, _code_or_function(value)
        elif isinstance(value, partial):
            given = (*value.args, *value.keywords, *value.keywords.values())
            parts = (type(part) if isinstance(part, nn.Module) else repr(part) for part in given)
            yield name, (_code_or_function(value.func), *parts)
        else:  # what came from JSON is a list where the class's own default is a tuple
            yield name, "a list" if isinstance(value, (list, tuple)) else type(value)
    if not isinstance(module, _HOLDERS):
        yield from ((f"{name} in it", True) for name, _ in module._modules.items())
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        kind = type(tensor)
        plain = kind in (nn.Parameter, torch.Tensor) or kind.__module__.startswith(_RUN_TIME)
        if tensor is None or not plain:
            yield f"{name} of it", None if tensor is None else kind


def key_of(model: PreTrainedModel, code: ModelCode) -> Hashable:
    """Return a key, equal for models with equal twins; None for a model with code of the user's.

    Equal keys mean equal configurations, field by field, modules, objects on them, functions of
    their classes, and families. A class of the user's has none: it may say by an attribute what the
    library's functions do.
    """
    if code.foreign:
        return None
    kinds = Kinds(model, code).by_name
    models = (part for part in model.modules() if isinstance(part, PreTrainedModel))
    losses = [vars(part).get("_loss_function") for part in models]
    values = [value for _, _, attributes in kinds.values() for _, value in attributes]
    parts = [part for value in values for part in (value if isinstance(value, tuple) else (value,))]
    # of closures, which may hold different things
    if any(isinstance(part, CodeType) for part in parts) or not all(
        is_own(cls) for _, cls, _ in set(kinds.values())
    ):
        return None
    # a family that is registered later serves otherwise
    served = tuple(map(id, registry.families()))
    functions = tuple(value for _, _, value in code.places)
    return repr(_fields(model.config)), frozenset(kinds.items()), tuple(losses), functions, served


def answered(key: Hashable, ask: Callable[[], T]) -> T:
    """Return the answer kept under a key, or else `ask()`, which is kept unless the key is None."""
    if key in _answers:
        return _answers[key]
    found = ask()
    if key is not None:
        _answers[key] = found
    return found


def forget() -> None:
    """Delete all kept answers."""
    _answers.clear()


def _fields(config: Any) -> Any:
    """Return a configuration as [type, sorted (name, value) pairs], inner configurations too."""
    if hasattr(config, "to_diff_dict") or isinstance(config, Mapping):
        fields = config.items() if isinstance(config, Mapping) else vars(config).items()
        told = sorted(
            ((str(name), _fields(value)) for name, value in fields if name not in _NAMES), key=str
        )
        return [type(config), told]
    return [_fields(part) for part in config] if isinstance(config, (list, tuple)) else config
