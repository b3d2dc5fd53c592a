"""Whose code a model runs: transformers' own, in the places where transformers puts it, or somebody else's.

Nothing is believed for its name. A class is transformers' own if it is the object that its module of transformers
holds, a function if its code was compiled from a file of transformers (or of torch), stands where it was defined, and
all that it calls in its module is so too. What is put on instances (forwards, hooks, losses) is judged alike.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Iterator, Mapping
from types import FunctionType, MethodType
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from autopack.inspection.files import HERE, is_kernel_file, is_own_file, is_standard
from autopack.inspection.source import names_in

_TOKEN_WISE: tuple[type, ...] = (
    nn.Linear,
    nn.Embedding,
    nn.LayerNorm,
    nn.RMSNorm,
    nn.Dropout,
    nn.Identity,
    nn.ModuleList,
    nn.ModuleDict,
)
_TOKEN_WISE = (*_TOKEN_WISE, nn.Sequential, nn.ParameterList, nn.ParameterDict)
"""Modules of torch that do the same to every token, or only hold others."""
_OVER_AN_AXIS = (nn.MultiheadAttention, nn.Softmax, nn.Softmin, nn.LogSoftmax, nn.Softmax2d, nn.GLU)
_WRAPPERS = ("torch.distributed.", "torch._dynamo.", "torch.nn.parallel.")
PLAIN = {"__module__", "__doc__", "__dict__", "__weakref__", "__qualname__", "__annotations__", "__orig_bases__"}
PLAIN |= {"__parameters__", "__abstractmethods__", "_abc_impl", "__static_attributes__", "__firstlineno__"}
PLAIN |= {"__type_params__", "__annotate_func__", "__annotations_cache__"}  # annotations, as Python 3.14 keeps them

Place = tuple[Mapping[str, Any], str, Any]
"""A mapping, a key, and the code that stands there."""


def original(value: Any) -> Any:
    """What stood where autopack has put a function of its own; anything else is itself."""
    while is_of_autopack(value) and (inner := _held(value, "autopack_original")) is not None:
        value = inner
    return value


def is_of_autopack(value: Any) -> bool:
    """Whether a function is one of autopack, and not another that `functools.wraps` gave the attributes of one."""
    value = value.__func__ if isinstance(value, MethodType) else value
    if isinstance(value, FunctionType):
        return value.__code__.co_filename.startswith(HERE)
    return type(value).__module__.partition(".")[0] == "autopack"


def _held(value: Any, name: str) -> Any:
    """An attribute that is really there: a mock has any that is asked for, and each of them has it again."""
    if isinstance(value, FunctionType):
        return vars(value).get(name)
    if isinstance(value, MethodType) and name != "__func__":
        return _held(value.__func__, name)
    return None if inspect.getattr_static(value, name, None) is None else getattr(value, name, None)


def layers(value: Any) -> Iterator[Any]:
    """A function and all that it wraps, without those of autopack, the outermost first."""
    waiting, seen = [value], set()
    while waiting:
        value = original(waiting.pop(0))
        if value is None or id(value) in seen:
            continue
        seen.add(id(value))
        yield value
        # A bound method passes on what its function wraps, so the function itself comes first.
        inner = ("__func__",) if isinstance(value, MethodType) else ("func", "__func__", "__wrapped__")
        waiting += [_held(value, name) for name in inner]


def is_own(value: Any) -> bool:
    """Whether all layers of a function come from files of transformers, torch or what is integrated with them."""
    for layer in layers(value):
        if isinstance(layer, FunctionType):
            if not is_own_file(layer.__code__.co_filename):
                return False
        elif isinstance(layer, type) or not callable(layer):
            return False
        elif type(layer).__module__ not in ("builtins", "functools"):  # an object that is called
            called = next((vars(cls)["__call__"] for cls in type(layer).__mro__ if "__call__" in vars(cls)), None)
            # What an object of the standard library calls, such as a mock, is what somebody has given it.
            if not is_own(called) or is_standard(getattr(getattr(called, "__code__", None), "co_filename", "")):
                return False
    return True


def is_kernel(value: Any) -> bool:
    """Whether a function is a package's of attention kernels, as that package has it."""
    found = [layer.__code__.co_filename if isinstance(layer, FunctionType) else "" for layer in layers(value)]
    return any(map(is_kernel_file, found)) and all(is_kernel_file(name) or is_own_file(name) for name in found)


def passes_on(module: nn.Module, name: str, value: Any) -> bool:
    """Whether a function on a module is a library's own around what the class has under that name (accelerate's)."""
    of_class = {id(layer) for layer in layers(getattr(type(module), name, None))}
    if not of_class & {id(layer) for layer in layers(value)}:
        return False
    around = [layer for layer in layers(value) if id(layer) not in of_class]
    functions = [layer for layer in around if isinstance(layer, FunctionType)]
    others = all(isinstance(layer, FunctionType | MethodType | functools.partial) for layer in around)
    return others and all(is_own_file(function.__code__.co_filename) for function in functions)


def located(cls: type) -> bool:
    """Whether a class is the one that its module holds under its name, from a file that is not somebody else's."""
    path = getattr(sys.modules.get(cls.__module__), "__file__", None)
    return path is not None and is_own_file(path) and found_by_name(cls)


def found_by_name(cls: type) -> bool:
    """Whether a class is the one that its module holds under its name, whosever it is."""
    found: Any = sys.modules.get(cls.__module__)
    for part in cls.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is cls


def located_class(module: nn.Module) -> Any:
    """The class of a module without those that a library has derived from it at run time (FSDP, parametrizations)."""
    return next((cls for cls in type(module).__mro__ if located(cls)), None)


def is_of(cls: type, package: str) -> bool:
    """Whether a class is one of an installed package, and the one that it holds under that name."""
    path = getattr(sys.modules.get(package), "__file__", None)
    own = getattr(sys.modules.get(cls.__module__), "__file__", None)
    return bool(path and own and own.startswith(os.path.dirname(path) + os.sep)) and found_by_name(cls)


def is_token_wise(cls: type) -> bool:
    """Whether modules of a class of torch do the same to every token, or only hold others, wherever they stand."""
    activation = cls.__module__ == "torch.nn.modules.activation" and cls not in _OVER_AN_AXIS
    return cls in _TOKEN_WISE or (activation and located(cls))


def whose(function: Any) -> str:
    """A function by its name and the place where it was written."""
    for layer in layers(function):
        code = getattr(layer, "__code__", None)
        if code is not None and not is_own_file(code.co_filename):
            return f"{getattr(layer, '__qualname__', layer)} of {code.co_filename}:{code.co_firstlineno}"
    inner = list(layers(function))[-1]
    return f"{getattr(inner, '__module__', '')}.{getattr(inner, '__qualname__', type(inner).__qualname__)}"


def on_instance(module: nn.Module) -> str | None:
    """What on a single module is somebody else's code: its forward or its loss."""
    forward = module.__dict__.get("forward")
    if forward is not None and not is_own(forward):
        return f"its forward, set on the instance, is {whose(forward)}"
    kept = module.__dict__.get("_old_forward")
    if kept is not None and not is_own(kept):
        return f"the forward that a hook keeps is {whose(kept)}"
    hook = foreign_hook_of_accelerate(module)
    if hook is not None:
        return f"a hook by which accelerate runs it is a {type(hook).__qualname__} of {type(hook).__module__}"
    loss = module.__dict__.get("_loss_function")
    if loss is not None and not is_own(loss):
        return f"its loss_function is {whose(loss)}"
    return None


def foreign_hook_of_accelerate(module: nn.Module) -> Any:
    """The hook by which accelerate runs a module, or one of several, where its class is not accelerate's; else None."""
    waiting = [module.__dict__.get("_hf_hook")]
    for hook in waiting:
        if hook is not None and not is_of(type(hook), "accelerate"):
            return hook
        waiting += getattr(hook, "hooks", ())
    return None


def out_of_place(cls: Any, above: Any) -> str | None:
    """Why a module of class `cls` is not what the class of transformers that holds it puts there; None where it is."""
    if cls is None:
        return "its class is not transformers' own"
    name = cls.__module__
    if name.startswith("torch.") and not name.startswith(_WRAPPERS):
        activation = name == "torch.nn.modules.activation" and cls not in _OVER_AN_AXIS
        named = any(cls.__name__ in names_in(f.__code__) for f in constructors(above))
        return (
            None
            if issubclass(cls, _TOKEN_WISE) or activation or named
            else f"a {cls.__name__} that {above.__name__} does not make"
        )
    if not name.startswith("transformers.models."):
        return None
    namespace = vars(sys.modules[above.__module__])
    if namespace.get(cls.__name__) is cls:
        return None
    if issubclass(cls, PreTrainedModel) and any(
        _is_auto(namespace.get(n)) for f in constructors(above) for n in names_in(f.__code__)
    ):
        return None
    return f"a {cls.__name__}, which {above.__name__} does not make"


def constructors(cls: type) -> Iterator[FunctionType]:
    """The constructors of a class and of those that it derives from, without what wraps them."""
    for base in cls.__mro__:
        inner = list(layers(vars(base)["__init__"]))[-1] if "__init__" in vars(base) else None
        if isinstance(inner, FunctionType):
            yield inner


def _is_auto(value: Any) -> bool:
    from transformers.models.auto.auto_factory import _BaseAutoModelClass

    return isinstance(value, type) and issubclass(value, _BaseAutoModelClass)


def function_of(hook: Any) -> Any:
    """The function behind a hook, or a bound method."""
    return hook.__func__ if isinstance(hook, MethodType) else hook


def is_from(function: Any, place: tuple[str, ...]) -> bool:
    """Whether a function, with all that it wraps, is code below a place in a package that has been imported."""
    package, *parts = place
    top = getattr(sys.modules.get(package), "__file__", None)
    if top is None:
        return False
    below = os.path.join(os.path.dirname(top), *parts)
    found = [each for each in layers(function_of(function)) if isinstance(each, FunctionType)]
    names = [each.__code__.co_filename for each in found]
    return any(_is_below(name, below) for name in names) and all(
        _is_below(name, below) or is_own_file(name) for name in names
    )


def _is_below(name: str, place: str) -> bool:
    return name == place or name.startswith(place + os.sep)
