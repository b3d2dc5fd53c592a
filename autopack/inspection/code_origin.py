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

from autopack.inspection import releases, ulysses
from autopack.inspection.files import HERE, MODELING, is_own_file, is_standard
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
    while _is_ours(value) and (inner := _held(value, "autopack_original")) is not None:
        value = inner
    return value


def _is_ours(value: Any) -> bool:
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


class Provenance:
    """Whose code a model runs now.

    `foreign` tells in words, by module, what is not transformers' own; empty where everything is. Hooks on parts that
    are no models are not among it: `onlooker` is the first that may read rows and columns of what passes, None where
    there is none, and `hook` the first of these that is not transformers' own. `places` are where its code stands, for
    `autopack.inspection.changes`.
    """

    def __init__(self, model: PreTrainedModel, implementations: tuple[str, ...] = ()):
        self.foreign: list[str] = []
        self.onlooker: str | None = None
        self.hook: str | None = None
        self.places: list[Place] = []
        self._classes: dict[Any, str | None] = {}
        self._pairs: dict[tuple[Any, Any], str | None] = {}
        self._functions: set[int] = set()
        self._tree(model)
        self._registered(implementations)

    def _tree(self, model: PreTrainedModel) -> None:
        parents: dict[int, Any] = {}
        for name, module in model.named_modules():
            said = name or "the model"
            above = parents.get(id(module))
            cls = located_class(module)
            reason = self.around(module)
            if reason is None and above is not None:
                if (cls, above) not in self._pairs:
                    self._pairs[cls, above] = out_of_place(cls, above)
                reason = self._pairs[cls, above]
            if reason is not None:
                self.foreign.append(f"{said}: {reason}")
            # What is on a model itself gets the form that it knows there (`autopack.calls.entry`).
            for hook in () if isinstance(module, PreTrainedModel) else hooks_of(module).values():
                if looks_at_rows(hook):
                    told = f"{said}: a hook on it is {_whose(_function_of(hook))}"
                    self.onlooker = self.onlooker or told
                    self.hook = self.hook or (told if is_foreign_hook(hook) else None)
            below = cls if cls is not None and cls.__module__.startswith("transformers.") else above
            for child in module.children():
                parents.setdefault(id(child), below)

    def _registered(self, implementations: tuple[str, ...]) -> None:
        for implementation in implementations:
            function = ulysses.of_whole_rows(releases.attention_function(implementation))
            if function is not None and not self._check(function):
                self.foreign.append(f"the attention function {implementation!r}: {_whose(function)}")

    def around(self, module: nn.Module) -> str | None:
        """What of a module's own forward and loss, and of a model's hooks, is somebody else's, or None."""
        hooked = _of_hooks(module) if isinstance(module, PreTrainedModel) else None
        return self.of_class(type(module)) or on_instance(module) or self._of_loss(module) or hooked

    def _of_loss(self, module: nn.Module) -> str | None:
        if not isinstance(module, PreTrainedModel) or not (known := releases.losses()):
            return None
        kind = releases.kind_of_loss(module)
        self.places.append((known, kind, original(known[kind])))
        return None if is_own(known[kind]) else f"the loss of the kind {kind!r} is {_whose(known[kind])}"

    def of_class(self, cls: type) -> str | None:
        """What in a class, or in a class that it derives from, is not transformers' own; None where everything is."""
        if cls not in self._classes:
            self._classes[cls] = next((r for base in cls.__mro__ if (r := self._of_base(base, cls))), None)
        return self._classes[cls]

    def _of_base(self, base: type, cls: type) -> str | None:
        if base in (object, nn.Module) or base.__module__ in ("typing", "abc", "builtins"):
            return None
        members, known = vars(base), located(base)
        in_library = known and not base.__module__.startswith("transformers.models.")
        # What a library's general classes hold besides (saving, generation) has no part in a forward.
        names = [n for n in ("forward", "__call__", "loss_function") if n in members] if in_library else list(members)
        for name in names:
            if name in PLAIN:
                continue
            functions = list(_functions_of(members[name]))
            if not functions and not known:
                if members[name] is _inherited(cls, base, name):
                    continue  # transformers notes some attributes anew on each class
                return f"{base.__qualname__}.{name} is not transformers' own"
            self.places.append((members, name, original(members[name])))
            for function in functions:
                if not self._check(function) or (known and not in_library and not _belongs(function, base)):
                    return f"{base.__qualname__}.{name} is {_whose(function)}"
        return None

    def _check(self, function: Any) -> bool:
        """Whether a function, and what it calls by name in its own module, is transformers' own."""
        if not is_own(function):
            return False
        inner = list(layers(function))[-1]
        if not isinstance(inner, FunctionType) or id(inner) in self._functions:
            return True
        self._functions.add(id(inner))
        if not inner.__code__.co_filename.startswith(MODELING):
            return True
        for name in names_in(inner.__code__):
            value = inner.__globals__.get(name)
            if isinstance(value, FunctionType) or hasattr(value, "__wrapped__"):
                self.places.append((inner.__globals__, name, original(value)))
                if not self._check(value):
                    return False
        return True


def _inherited(cls: type, base: type, name: str) -> Any:
    """What a class would have under a name if one of its bases had not defined it."""
    above = cls.__mro__[cls.__mro__.index(base) + 1 :]
    return next((vars(other)[name] for other in above if name in vars(other)), None)


def _functions_of(value: Any) -> Iterator[Any]:
    """The functions that a member of a class consists of."""
    if isinstance(value, property):
        yield from (part for part in (value.fget, value.fset) if part is not None)
    elif isinstance(value, staticmethod | classmethod):
        yield value.__func__
    elif isinstance(value, functools.cached_property):
        yield value.func
    elif isinstance(value, FunctionType) or hasattr(value, "autopack_original"):
        yield value


def _belongs(function: Any, cls: type) -> bool:
    """Whether a function was defined where it stands, and not for another class."""
    inner = list(layers(function))[-1]
    if not isinstance(inner, FunctionType) or not inner.__module__.startswith("transformers.models."):
        return True  # what a decorator of the library has put there
    # A class may hold a function of its module under another name, but hardly as its forward.
    here = {f"{cls.__qualname__}.{inner.__name__}", *([inner.__name__] if inner.__name__ != "forward" else ())}
    return inner.__module__ == cls.__module__ and inner.__qualname__ in here


def _whose(function: Any) -> str:
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
        return f"its forward, set on the instance, is {_whose(forward)}"
    kept = module.__dict__.get("_old_forward")
    if kept is not None and not is_own(kept):
        return f"the forward that a hook keeps is {_whose(kept)}"
    hook = foreign_hook_of_accelerate(module)
    if hook is not None:
        return f"a hook by which accelerate runs it is a {type(hook).__qualname__} of {type(hook).__module__}"
    loss = module.__dict__.get("_loss_function")
    if loss is not None and not is_own(loss):
        return f"its loss_function is {_whose(loss)}"
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
        activation = name == "torch.nn.modules.activation" and cls is not nn.MultiheadAttention
        named = any(cls.__name__ in names_in(f.__code__) for f in _constructors(above))
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
        _is_auto(namespace.get(n)) for f in _constructors(above) for n in names_in(f.__code__)
    ):
        return None
    return f"a {cls.__name__}, which {above.__name__} does not make"


def _constructors(cls: type) -> Iterator[FunctionType]:
    for base in cls.__mro__:
        inner = list(layers(vars(base)["__init__"]))[-1] if "__init__" in vars(base) else None
        if isinstance(inner, FunctionType):
            yield inner


def _is_auto(value: Any) -> bool:
    from transformers.models.auto.auto_factory import _BaseAutoModelClass

    return isinstance(value, type) and issubclass(value, _BaseAutoModelClass)


def hooks_of(module: nn.Module) -> dict[int, Any]:
    """The forward and backward hooks of a module by number, which torch gives once in a process."""
    kinds = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
    return {number: hook for kind in kinds for number, hook in kind.items()}


def is_foreign_hook(hook: Any) -> bool:
    """Whether a hook is somebody else's. Those of DeepSpeed's engine gather parameters and count time, and are none."""
    function = _function_of(hook)
    return not is_own(function) and not all(map(_is_of_engine, layers(function)))


def _is_of_engine(layer: Any) -> bool:
    engine = getattr(sys.modules.get("deepspeed"), "__file__", None)
    if engine is None or not isinstance(layer, FunctionType):
        return False
    name = layer.__code__.co_filename
    return name.startswith(os.path.dirname(engine) + os.sep) or is_own_file(name)


def looks_at_rows(hook: Any) -> bool:
    """Whether a hook may read rows and columns: somebody else's, or NEFTune's, whose noise shrinks with the row.

    One that asks for gradients and nothing else (`output.requires_grad_(True)`, for adapters under checkpointing) does
    not.
    """
    function = _function_of(hook)
    if is_own(function):
        return getattr(function, "__name__", None) == "neftune_post_forward_hook"
    code = getattr(function, "__code__", None)
    return code is None or code.co_names != ("requires_grad_",) or bool(code.co_freevars)


def _function_of(hook: Any) -> Any:
    return hook.__func__ if isinstance(hook, MethodType) else hook


def _of_hooks(module: nn.Module) -> str | None:
    for hook in hooks_of(module).values():
        if is_foreign_hook(hook):
            return f"a hook on it is {_whose(_function_of(hook))}"
    return None
