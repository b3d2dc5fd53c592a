"""Facts read from a model's code: its arguments, its loss's shift of labels, its attention.

Arguments are read from the code that runs, and followed through forwards that only pass on. A thin
subclass, `def forward(self, *args, **kwargs): return super().forward(*args, **kwargs)`, takes its
base's arguments, and so does a class with a wrapped forward. Nothing is cached by class: a forward
may be patched at any time.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from types import CodeType, FunctionType
from typing import Any

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from autopack.inspection import releases

_INTERFACE = "ALL_ATTENTION_FUNCTIONS"
_PRODUCTS = {*"matmul bmm baddbmm einsum".split()}
_KERNELS = {
    *"scaled_dot_product_attention _flash_attention_forward".split(),
    *"flash_attn_func flash_attn_varlen_func".split(),
}
_WRITING = {*"add_ clamp_ clamp_max_ clamp_min_ copy_ div_ lerp_ mul_ renorm_ sub_".split()}
_CROSS_ENTROPY = {"CrossEntropyLoss", "cross_entropy", "nll_loss"}


def class_of(module: nn.Module) -> Any:
    """Return the class of a module, as Any: type checkers take it for unhashable."""
    return type(module)


def _code_of(cls: Any) -> CodeType:
    """Return the code of a class's unwrapped forward, or of an empty function (torch.jit)."""
    forward = inspect.unwrap(inspect.getattr_static(cls, "forward"))
    return getattr(forward, "__code__", _unreadable.__code__)


def _unreadable() -> None: ...


@dataclass(frozen=True)
class Parameters:
    """A forward's parameters: `names` in order, without `self`; `takes_others` for `**kwargs`."""

    names: tuple[str, ...]
    takes_others: bool


def parameters_of(cls: Any) -> Parameters:
    """Return the parameters that a call of a module of this class may bring.

    A forward that hands `*args` or `**kwargs` on to another forward takes the other's parameters
    too.
    """
    codes = forward_codes(cls)
    names = dict.fromkeys(name for code in codes for name in _own_names(code))
    return Parameters(
        tuple(names), bool(codes) and bool(codes[-1].co_flags & inspect.CO_VARKEYWORDS)
    )


def forward_codes(cls: Any) -> list[CodeType]:
    """Return the code of a class's forward, and of forwards that take its arguments, in order."""
    found = []
    for function in _forwards(cls):
        code = function.__code__
        found.append(code)
        # It hands on what it takes by a name, `super().forward(...)`, or to one that it is wrapped
        # around.
        if not _takes_any(code) or (
            _own_names(code) and "forward" not in code.co_names and not _inner(function)
        ):
            break
    return found


def _own_names(code: CodeType) -> tuple[str, ...]:
    """Return the names of a method's parameters, without `self`."""
    return code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]


def _forwards(cls: Any) -> Iterator[FunctionType]:
    """Yield forwards of a class and its bases as they run, each before functions that it wraps."""
    seen: set[FunctionType] = set()
    waiting = [vars(base)["forward"] for base in reversed(cls.__mro__) if "forward" in vars(base)]
    while waiting:
        forward = waiting.pop()
        function = inspect.unwrap(getattr(forward, "__func__", forward))
        if isinstance(function, FunctionType) and function not in seen:
            seen.add(function)
            yield function
            waiting += reversed(_inner(function))


def _inner(function: FunctionType) -> list[FunctionType]:
    """Return the forwards in a forward's closure and globals, which it may wrap without `wraps`."""
    held = inspect.getclosurevars(function)
    values = (*held.nonlocals.values(), *held.globals.values())
    return [value for value in values if value is not function and _may_be_a_forward(value)]


def _may_be_a_forward(value: Any) -> bool:
    """Return True for a function with `self` that is named a forward, or takes any arguments."""
    # Where a kernel stands in the place of a function, the innermost is a module.
    inner = inspect.unwrap(value) if inspect.isfunction(value) else None
    if not isinstance(inner, FunctionType) or inner.__code__.co_varnames[:1] != ("self",):
        return False
    return "forward" in inner.__name__ or _takes_any(inner.__code__) > 0


def _takes_any(code: CodeType) -> int:
    """Return a number that is not 0 if a function takes `*args` or `**kwargs`."""
    return code.co_flags & (inspect.CO_VARKEYWORDS | inspect.CO_VARARGS)


def shifts_labels(model: PreTrainedModel) -> bool:
    """Return True if the model's loss compares each token's prediction with the next label.

    The loss's code decides: several decoders (whisper, trocr, bart) compare within one column.
    """
    codes = [_code_of(type(model))]
    for name in names_in(codes[0]):
        method = getattr(type(model), name, None)
        if name.startswith("_") and "loss" in name and isinstance(method, FunctionType):
            codes.append(method.__code__)
    names = frozenset().union(*map(names_in, codes))
    variables = {variable for code in codes for variable in code.co_varnames}
    if "loss_function" in names:
        loss = getattr(inspect.unwrap(model.loss_function), "__name__", "")
        return loss == "ForCausalLMLoss" or (
            is_named_causal_lm(type(model)) and not loss.startswith("For")
        )
    if names & _CROSS_ENTROPY:
        return any("shift" in variable for variable in variables)
    heads = (class_of(part) for part in model.children() if not isinstance(part, PreTrainedModel))
    if any(names_in(_code_of(head)) & _CROSS_ENTROPY for head in heads):
        return False  # a head that is given labels compares them with what it is given beside them
    return "labels" in variables and is_named_causal_lm(type(model))


def is_named_causal_lm(cls: type) -> bool:
    """Return True if transformers maps a class, or its base there, to causal language modelling."""
    known = releases.class_names("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT")
    return not known.isdisjoint(names_of(cls))


def names_of(cls: type) -> tuple[str, ...]:
    """Return the names of a class and of the first class of transformers that it derives from."""
    known = next(
        (base.__name__ for base in cls.__mro__ if base.__module__.startswith("transformers.")),
        cls.__name__,
    )
    return cls.__name__, known


def writes_to_weights(kind: Any) -> bool:
    """Return True if a class may write to weights in place, past autograd, once initialised."""
    own = (cls for cls in kind.__mro__ if not cls.__module__.startswith("torch."))
    names = (
        names_in(found.__code__)
        for cls in own
        for found in vars(cls).values()
        if isinstance(found, FunctionType) and "init" not in found.__name__
    )
    return any(each & {"data", "no_grad"} and each & _WRITING for each in names)


def adds_up_mask(entries: list[PreTrainedModel], configs: list[PretrainedConfig]) -> bool:
    """Return True if an entry's forward adds up a mask for positions, or a config names mrope."""
    summed = any("cumsum" in names_in(_code_of(type(entry))) for entry in entries)
    return summed or any(
        "mrope" in str(getattr(config, name, None))
        for config in configs
        for name in ("rope_scaling", "rope_parameters")
    )


def is_causal(module: nn.Module, config: PretrainedConfig) -> bool:
    """Return True if an attention module or its config never lets tokens see later ones."""
    # Several decoders say is_causal=False and bring a causal mask.
    told = [getattr(module, name) for name in ("is_causal", "is_decoder") if hasattr(module, name)]
    if told:
        return any(told)
    if hasattr(config, "causal"):
        return bool(config.causal)
    return bool(getattr(config, "is_decoder", False)) or not releases.is_encoder_type(
        config.model_type
    )


def eager_functions(modules: list[nn.Module]) -> list[tuple[str, str]]:
    """Return the Python module and name of each eager attention function of these modules."""
    found = {
        (function.__globals__["__name__"], name)
        for function in _dispatching_of(modules)
        for name in names_in(function.__code__)
        if "eager" in name and name in function.__globals__
    }
    return sorted(found)


def _dispatching_of(modules: list[nn.Module]) -> list[FunctionType]:
    """Return the `dispatching_functions` of some modules' classes."""
    return [each for cls in {*map(class_of, modules)} for each in dispatching_functions(cls)]


def dispatching_functions(cls: Any) -> tuple[FunctionType, ...]:
    """Return the functions of a class that read the interface of attention functions."""
    found = []
    for base in cls.__mro__:
        if base in (nn.Module, PreTrainedModel) or not releases.has_attention_interface():
            break  # up to 4.47 some modules have a dictionary of their own by that name
        for value in vars(base).values():
            function = inspect.unwrap(value) if callable(value) else value
            if isinstance(function, FunctionType) and _INTERFACE in names_in(function.__code__):
                found.append(function)
    return tuple(found)


def attends_by_itself(cls: Any) -> bool:
    """Return True if modules of a class attend in their own code: a mask, and softmax or a kernel.

    Methods and functions of the same Python module are followed. A class that reads transformers'
    interface does not attend by itself.
    """
    taken = parameters_of(cls)
    if any(name.endswith("kv_states") or name == "latents" for name in taken.names):
        return False  # to states of something that is no text
    if issubclass(cls, PreTrainedModel) or not (
        taken.takes_others or any("mask" in name for name in taken.names)
    ):
        return False
    codes = [function.__code__ for function in _functions_followed(cls)]
    names = frozenset().union(*map(names_in, codes))
    attends = not names.isdisjoint(_KERNELS)
    if any(name.lower().endswith("softmax") for name in names):
        steps = (step for code in codes for step in dis.get_instructions(code))
        # `a @ b` has no name; Python 3.10 has an instruction of its own for it.
        attends |= not names.isdisjoint(_PRODUCTS) or any(
            s.argrepr == "@" or s.opname == "BINARY_MATRIX_MULTIPLY" for s in steps
        )
    return attends and not dispatching_functions(cls)


def knows_of(cls: Any, name: str) -> bool:
    """Return True if a class's forward takes or passes argument `name`, or passes `**kwargs` on."""
    codes = forward_codes(cls)
    if any(
        name in code.co_varnames or name in names_in(code) or _has_keyword(code, name)
        for code in codes
    ):
        return True
    if not parameters_of(cls).takes_others:
        return False
    code = codes[-1]
    others = code.co_varnames[
        code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)
    ]
    return any(
        step.argval == others and step.opname.startswith("LOAD")
        for step in dis.get_instructions(code)
    )


def counts_from_zero(kind: Any) -> bool:
    """Return True if an attention class reads positions as indices within its row.

    It cuts its table of rotations to the number of tokens, or hands positions to transformers'
    flash attention, which finds the row's documents by them.
    """
    forward = _code_of(kind)
    flash = (
        "_flash_attention_forward" in names_in(forward) and "position_ids" in forward.co_varnames
    )
    return cuts_rotations(kind) or flash


def cuts_rotations(cls: Any) -> bool:
    """Return True if a class's forward asks for a rotation table of one position per token."""
    codes = [function.__code__ for function in _functions_followed(cls)]
    return any("rotary_emb" in names_in(code) and _has_keyword(code, "seq_len") for code in codes)


def _functions_followed(cls: Any) -> list[FunctionType]:
    """Return the forwards of a class and its next base, and their callees in class and module."""
    waiting = [inspect.unwrap(base.forward) for base in cls.__mro__ if "forward" in vars(base)][:2]
    found: list[FunctionType] = []
    while waiting:
        function = waiting.pop()
        if (
            not isinstance(function, FunctionType)
            or function in found
            or function.__module__ == nn.Module.__module__
        ):
            continue
        found.append(function)
        for name in names_in(function.__code__):
            part = function.__globals__.get(name)
            # of functions by implementation (Gemma 2)
            parts = part.values() if isinstance(part, dict) else [part]
            waiting.append(inspect.getattr_static(cls, name, None))
            waiting += [
                each for each in parts if getattr(each, "__module__", None) == function.__module__
            ]
    return found


def _has_keyword(code: CodeType, name: str) -> bool:
    """Return True if code passes an argument by this name in some call."""
    return any(isinstance(constant, tuple) and name in constant for constant in code.co_consts)


@cache
def hides_pad_in_decoder(cls: Any) -> bool:
    """Return True if an encoder-decoder's forward makes a mask that hides the decoder's padding."""
    code = _code_of(cls)
    stored = {step.argval for step in dis.get_instructions(code) if step.opname == "STORE_FAST"}
    return "decoder_attention_mask" in stored and "pad_token_id" in names_in(code)


@cache
def names_in(code: CodeType) -> frozenset[str]:
    """Return the global names and attributes that a function, and functions inside it, read."""
    inner = (names_in(part) for part in code.co_consts if isinstance(part, CodeType))
    return frozenset(code.co_names).union(*inner)


def modules_with_own_function(modules: list[nn.Module], implementation: str) -> list[str]:
    """Return the Python modules whose interface object has its own entry for an implementation."""
    names = [function.__globals__ for function in _dispatching_of(modules)]
    own = (n for n in names if implementation in getattr(n.get(_INTERFACE), "_local_mapping", {}))
    # One object that several have is one place, and has to have one name.
    return list(
        {
            id(n[_INTERFACE]): releases.common_interface(n[_INTERFACE]) or n["__name__"]
            for n in own
        }.values()
    )
