"""A twin of a model: as small as its class can be, with the same interaction of documents.

A class's treatment of documents follows from its code and from the words of its configuration, not
from its width or its weights. So a twin (the same class, the same words, some 80,000 random
parameters, on the CPU) can be audited in place of a model of any size, on any device. It counts
only as far as the two are alike: every module of the whole has to be of a kind that the twin has
too. Modules without such a kind are named, to be proven by themselves.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from autopack import tiny
from autopack.inspection.configs import text_config
from autopack.inspection.foreign import is_own, passes_on
from autopack.inspection.modules import device_of, is_pair
from autopack.inspection.source import names_in
from autopack.proving import configuration
from autopack.proving.alike import alike
from autopack.proving.kept import Kinds, own_class
from autopack.tiny.models import as_new, of_class, randomize

MOST_PARAMETERS = 20_000_000
"""Most parameters of a twin: a class that makes more has its own sizes, and no twin."""
_TOKENS = 13
"""Of the call in which modules of a twin are listened to: a prime, which is no size of it."""


class NoTwin(Exception):
    """Error of a model that has no twin; its message is the reason, in a clause."""


@dataclass
class Twin:
    """Twin of a model, and `others`: the model's outermost modules of kinds that the twin lacks."""

    model: PreTrainedModel
    others: dict[str, nn.Module]


def of(model: PreTrainedModel, dtype: torch.dtype = torch.float64, device: Any = "cpu") -> Twin:
    """Return the `Twin` of a model, with losses and methods put on its modules, but no hooks.

    Raises `NoTwin` if its class needs more than its configuration.
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
            missing = _missing(words, configuration.describe(twin.config))
            if missing is not None:
                why = why or f"its class makes another configuration of a tiny one: {missing}"
                continue
            _dress(twin, model)
            known = Kinds(twin)
            if whole.without(known):
                _call(twin)  # the model may have been called before, and keep something of it
                known.all |= Kinds(twin).all
            others = whole.without(known)
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
    """Set a twin's vocabulary size to the model's if the code of that (`read`) holds the number."""
    for part, whole in ((config, model.config), (text_config(config), text_config(model.config))):
        size = vars(whole).get("vocab_size")
        if size and size in read:
            part.vocab_size = size


def _missing(wanted: configuration.Words, found: configuration.Words) -> str | None:
    """Return in words a field whose words a twin lacks; None if it has all that are `wanted`."""
    for model_type, fields in wanted.items():
        for field, words in fields.items():
            known = found.get(model_type, {}).get(field, set())
            left = sorted(word for word in words if not configuration.is_covered(word, known))
            if left:
                return (
                    f"{field} of {model_type!r} is {', '.join(left)}, not "
                    f"{', '.join(sorted(known)) or 'there'}"
                )
    return None


def _built(cls: Any, config: Any, like: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Return a tiny model of a class with random weights; raise `CannotBuild` if it makes none."""
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


def _dress(twin: nn.Module, model: nn.Module) -> None:
    """Put losses, methods and functions from a model's modules on its twin's; set `padding_idx`.

    It is None where the model's is: trainers set the configuration's (from the tokenizer) on a
    model that has been made without.
    """
    stand_ins = dict(twin.named_modules())
    for name, module in model.named_modules():
        if (stand_in := stand_ins.get(name)) is not None:
            own, known = stand_in.__dict__, vars(module)
            suited = {n: v for n, v in known.items() if _suits(n, v, module)}
            own |= {n: rebound(v, module, stand_in) for n, v in suited.items()}
            if "padding_idx" in own and "padding_idx" in known:
                absent = known["padding_idx"] is None
                own["padding_idx"] = None if absent else own["padding_idx"] or 0


def _suits(name: str, value: Any, module: nn.Module) -> bool:
    """Return True for code on a module that works on its twin: a loss, a method, a function."""
    if name.startswith("_"):
        return name == "_loss_function"
    if isinstance(value, MethodType):
        return value.__self__ is module
    # What accelerate puts there reads its hook on the module.
    is_third_party = isinstance(value, FunctionType | partial) and not is_own(value)
    return is_third_party and not passes_on(module, name, value)


def _call(model: PreTrainedModel) -> None:
    """Call a twin with a few tokens, and ignore errors."""
    ids = torch.arange(_TOKENS, device=device_of(model))[None] + 3
    given = {"input_ids": ids, **({"decoder_input_ids": ids} if is_pair(model) else {})}
    with contextlib.suppress(Exception), torch.no_grad():  # its audit will say what is wrong
        model(**given)


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


def rebound(value: Any, module: nn.Module, stand_in: nn.Module) -> Any:
    """Return a copy of a function or method on a module, bound to `stand_in`, its twin's module.

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

    def rebind(value: Any) -> Any:
        if id(value) in known:
            return known[id(value)]
        if id(value) in parts:
            held = type(value).__name__
            raise NoTwin(
                f"what is on {type(module).__name__} holds a {held}, which is a part of it"
            )
        if isinstance(value, MethodType):
            return MethodType(rebind(value.__func__), rebind(value.__self__))
        if isinstance(value, partial):
            named = {name: rebind(part) for name, part in value.keywords.items()}
            return partial(rebind(value.func), *map(rebind, value.args), **named)
        return rebound_function(value) if isinstance(value, FunctionType) else value

    def rebound_function(function: FunctionType) -> FunctionType:
        for name in names_in(function.__code__) & function.__globals__.keys():
            if id(function.__globals__[name]) in parts:
                raise NoTwin(
                    f"what is on {type(module).__name__} names a part of it as the global {name}"
                )
        given = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        if any(rebind(part) is not part for part in given):
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
                new.cell_contents = rebind(cell.cell_contents)
        return found

    return rebind(value)
