"""A twin of a model: as small as its class can be, with the same interaction of documents.

A class's treatment of documents follows from its code and from the words of its configuration, not
from its width or its weights. So a twin (the same class, the same words, some 80,000 random
parameters, on the CPU) can be audited in place of a model of any size, on any device. It counts
only as far as the two are alike: every module of the whole has to be of a kind that the twin has
too. Modules without such a kind are named, to be proven by themselves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial
from types import BuiltinFunctionType, CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from autopack import tiny
from autopack.inspection.code import ModelCode
from autopack.inspection.configs import text_config
from autopack.inspection.foreign import is_from, is_of_library, original, passes_on
from autopack.inspection.source import names_in
from autopack.proving import configuration
from autopack.proving.alike import alike
from autopack.tiny.models import as_new, of_class, randomize

MOST_PARAMETERS = 20_000_000
"""Most parameters of a twin: a class that makes more has its own sizes, and no twin."""
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


class NoTwin(Exception):
    """Error of a model that has no twin; its message is the reason, in a clause."""


@dataclasses.dataclass
class Twin:
    """Twin of a model, and `others`: the model's outermost modules of kinds that the twin lacks."""

    model: PreTrainedModel
    others: dict[str, nn.Module]


def of(model: PreTrainedModel, dtype: torch.dtype = torch.float64, device: Any = "cpu") -> Twin:
    """Return a twin of a model; raise `NoTwin` if its class needs more than its configuration.

    Call it where neither a default device nor a mode of torch is in force (`apart`).
    """
    cls = own_class(model)
    words, whole = configuration.describe(model.config), Kinds(model)
    why: str | None = None
    best: Twin | None = None
    try:
        for config in alike(model.config):
            _keep_vocabulary(config, model, whole.read)
            try:
                twin = _built(cls, config, model, dtype).to(device)
            except tiny.CannotBuild as error:
                why = why or error.reason
                continue
            _copy_padding_idx(twin, model)
            missing = _missing(words, configuration.describe(twin.config))
            if missing is not None:
                why = why or f"its class makes another configuration of a tiny one: {missing}"
                continue
            others = whole.without(Kinds(twin))
            if best is None or len(others) < len(best.others):
                best = Twin(twin, {name: model.get_submodule(name) for name in others})
            if not others:
                break
    except tiny.CannotBuild as error:
        why = why or error.reason
    if best is None:
        raise NoTwin(why or "its class makes no tiny model")
    return best


def _keep_vocabulary(config: Any, model: PreTrainedModel, read: set[Any]) -> None:
    """Set a twin's vocabulary size to the model's if the model's code holds that number."""
    for part, whole in ((config, model.config), (text_config(config), text_config(model.config))):
        size = vars(whole).get("vocab_size")
        if size and size in read:
            part.vocab_size = size


def own_class(model: nn.Module) -> Any:
    """Return a module's class without torch's run-time subclasses (FSDP, parametrizations)."""
    return next(cls for cls in type(model).__mro__ if not cls.__module__.startswith(_RUN_TIME))


def _missing(wanted: configuration.Words, found: configuration.Words) -> str | None:
    """Return in words a field in which a twin lacks the behaviour of the model, or None."""
    for model_type, fields in wanted.items():
        for field, words in fields.items():
            known = found.get(model_type, {}).get(field, set())
            left = sorted(word for word in words if not configuration.is_met(word, known))
            if left:
                return (
                    f"{field} of {model_type!r} is {', '.join(left)}, not "
                    f"{', '.join(sorted(known)) or 'there'}"
                )
    return None


def _built(cls: Any, config: Any, like: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Return a new model of a class with random weights; raise `CannotBuild` if it cannot be
    tiny."""
    own = "forward" in vars(cls) and not cls.__module__.startswith("transformers.models.")
    try:
        with as_new(0):
            if own:
                _check_size(cls, config)
            try:
                model = of_class(cls, config, _implementations(like.config), torch.float32)
            except (
                ValueError,
                TypeError,
                KeyError,
            ):  # older releases take one implementation for all parts
                one = getattr(like.config, "_attn_implementation", None) or "eager"
                model = of_class(cls, config, one, torch.float32)
    except Exception as error:  # a constructor may raise anything
        raise tiny.CannotBuild(str(config.model_type), error) from error
    if type(model) is not cls:
        raise tiny.CannotBuild(
            str(config.model_type), f"its constructor makes a {type(model).__name__}"
        )
    _check_count(model)
    experts = getattr(like.config, "_experts_implementation", None)
    if experts is not None and hasattr(model, "set_experts_implementation"):
        # torch's grouped products know no float64; in float32 rounding of tiny mixtures comes near
        # what leaks are.
        model.set_experts_implementation(
            "eager" if (experts, dtype) == ("grouped_mm", torch.float64) else experts,
        )
    randomize(model, 0)
    model._apply(lambda tensor: _cast(tensor, dtype))
    return model.eval()


def _implementations(config: Any) -> Any:
    """Return a configuration's attention implementation; by part if a part has another."""
    whole = getattr(config, "_attn_implementation", None) or "eager"
    parts = {
        n: p._attn_implementation
        for n, p in vars(config).items()
        if getattr(p, "_attn_implementation", None)
    }
    return {"": whole, **parts} if {*parts.values()} - {whole} else whole


def _copy_padding_idx(twin: nn.Module, model: nn.Module) -> None:
    """Set `padding_idx` in a twin's modules where the model's have one, and None where not.

    Trainers set the configuration's (from the tokenizer) on a model that has been made without.
    """
    parts = dict(model.named_modules())
    for name, module in twin.named_modules():
        own, known = vars(module), vars(parts.get(name, module))
        if "padding_idx" in own and "padding_idx" in known:
            absent = known["padding_idx"] is None
            own["padding_idx"] = None if absent else own["padding_idx"] or 0


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of floats or complex numbers in a dtype of that kind; others unchanged."""
    if tensor.is_complex():
        return tensor.to(dtype.to_complex())
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _check_size(cls: Any, config: Any) -> None:
    """Raise `NoTwin` for a class with sizes of its own, before its constructor allocates them."""
    try:
        with torch.device("meta"):
            model = cls(config)
    except Exception:
        # it asks for values as it is made; the real one will say what is wrong, if anything is
        return
    _check_count(model)


def _check_count(model: nn.Module) -> None:
    """Raise `NoTwin` for a model with too many parameters."""
    count = sum(parameter.numel() for parameter in model.parameters())
    if count > MOST_PARAMETERS:
        raise NoTwin(f"its class makes {count:,} parameters of the smallest configuration")


class Kinds:
    """Kinds of a model's modules at present, by name, run-time wrappers left out."""

    def __init__(self, model: nn.Module, code: ModelCode | None = None):
        self.by_name: dict[str, Kind] = {}
        self.read = (code or ModelCode(model)).words
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
            self.by_name[name] = (above, cls, frozenset(_attributes(module, self.read)))
        for child_name, child in module.named_children():
            self._walk(
                child, f"{name}.{child_name}" if name else child_name, above if wraps else cls
            )

    def without(self, known: Kinds) -> list[str]:
        """Return names of outermost modules whose kind is not `known`, but for token-wise ones."""
        found: list[str] = []
        for name, kind in self.by_name.items():
            if kind in known.all or any(
                name == other or name.startswith(f"{other}.") for other in found
            ):
                continue
            holds_functions = any(
                not isinstance(word, (bool, str, type(None))) for _, word in kind[2]
            )
            if not _is_token_wise(kind[1]) or holds_functions:
                found.append(name)
                if not name:
                    break
        return found


def _is_token_wise(cls: type) -> bool:
    """Return True if modules of a class of torch treat every token alike, or only hold others."""
    if cls.__module__ == "torch.nn.modules.activation":
        return cls not in _OVER_AN_AXIS and is_of_library(cls)
    return cls in _TOKEN_WISE


def _code_or_function(function: Any) -> Any:
    """Return a function's code if it has a closure, and other functions themselves."""
    function = original(getattr(function, "__func__", function))
    return function.__code__ if getattr(function, "__closure__", None) else function


def _attributes(module: nn.Module, read: set[Any]) -> Iterator[tuple[str, Any]]:
    """Yield (name, value or a word for it) of the attributes that a module's code may read.

    They are flags and names as they are, types of numbers and the like, names of parts, and
    presence and class of parameters. Attributes that no code of the model reads, and that replace
    nothing of its class, are left out: users' notes, and marks by which programs find their own
    again (DeepSpeed, ms-swift). Functions count by identity, so that a third-party one is told from
    the class's own.
    """
    kind: Any = type(module)
    for name in vars(module).keys() - _NOT_OF_THE_CODE:
        value = vars(module)[name]
        # Tensors may be views of parameters that FSDP has made one, or weights that a norm of torch
        # makes anew.
        if name.startswith("_") or isinstance(value, torch.Tensor):
            continue
        if name not in read and not hasattr(kind, name):
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


def rebound(value: Any, module: nn.Module, stand_in: nn.Module) -> Any:
    """Return a copy of an object on a module, bound to the module that stands in for it.

    A trainer's forward around a model's commonly holds the earlier forward, which is bound to the
    model: called for a twin it would run the model itself. Raises `NoTwin` if it holds a part or a
    tensor of the module, whose counterpart is unknown, or names the module as a global (in a
    notebook).
    """
    known: dict[int, Any] = {id(module): stand_in}
    one, other = getattr(module, "config", None), getattr(stand_in, "config", None)
    if one is not None and other is not None:
        known |= {id(one): other, id(text_config(one)): text_config(other)}
    parts = set(map(id, (*module.modules(), *module.parameters(), *module.buffers())))

    def of(value: Any) -> Any:
        if id(value) in known:
            return known[id(value)]
        if id(value) in parts:
            held = type(value).__name__
            raise NoTwin(
                f"what is on {type(module).__name__} holds a {held}, which is a part of it"
            )
        if isinstance(value, MethodType):
            return MethodType(of(value.__func__), of(value.__self__))
        if isinstance(value, partial):
            named = {name: of(part) for name, part in value.keywords.items()}
            return partial(of(value.func), *map(of, value.args), **named)
        return copied(value) if isinstance(value, FunctionType) else value

    def copied(function: FunctionType) -> FunctionType:
        for name in names_in(function.__code__) & function.__globals__.keys():
            if id(function.__globals__[name]) in parts:
                raise NoTwin(
                    f"what is on {type(module).__name__} names a part of it as the global {name}"
                )
        given = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        if any(of(part) is not part for part in given):
            raise NoTwin(f"what is on {type(module).__name__} has a part of it as a default")
        if not function.__closure__:
            return function
        closed = function.__closure__
        # one may not be filled yet
        cells = [cell if cell == CellType() else CellType() for cell in closed]
        held = function.__code__, function.__globals__, function.__name__
        found = FunctionType(*held, function.__defaults__, tuple(cells))
        known[id(function)] = found  # it may hold itself
        found.__kwdefaults__ = function.__kwdefaults__
        found.__dict__.update(function.__dict__)
        for cell, new in zip(closed, cells, strict=True):
            if new is not cell:
                new.cell_contents = of(cell.cell_contents)
        return found

    return of(value)
