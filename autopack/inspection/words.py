"""The words in a model's code, among them the name of each attribute that it reads."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from types import CodeType, FunctionType
from typing import Any

from torch import nn
from transformers import GenerationMixin, PreTrainedModel

from autopack.inspection import releases
from autopack.inspection.code_origin import is_own_file, layers
from autopack.inspection.followed import Followed
from autopack.inspection.put_on import functions_on, hooks_of
from autopack.inspection.source import class_of, names_in

_GENERAL = frozenset((*PreTrainedModel.__mro__, GenerationMixin)) - {nn.Module, object}
"""Classes of transformers whose other methods (saving, generation) have no part in a forward."""
_OF_FORWARDS = ("__init__", "post_init", "forward", "__call__", "loss_function")
_BY_ANY_NAME = {"getattr", "hasattr", "setattr", "vars", "__dict__", "eval", "exec"}


def words_of(modules: list[nn.Module]) -> frozenset[str] | None:
    """Return the words of all code of modules; None if third-party code may read any attribute."""
    classes = {class_of(module): None for module in modules}
    put_on = [value for module in modules for *_, value in functions_on(module)]
    put_on += [hook for module in modules for hook in hooks_of(module).values()]
    configs = {id(config): config for m in modules if (config := vars(m).get("config")) is not None}
    kinds = {getattr(config, "_attn_implementation", None) or "eager" for config in configs.values()}
    put_on += filter(None, map(releases.attention_function, kinds))
    foreign = Followed([*classes, *put_on], [], modules).names
    if foreign & _BY_ANY_NAME:
        return None
    return _words(put_on).union(foreign, *map(_of_class, classes))


@cache
def _of_class(cls: Any) -> frozenset[str]:
    """Return the words of the libraries' own code in a class."""
    bases = [base for base in cls.__mro__ if base not in (nn.Module, object)]
    members = [
        value for base in bases for name, value in vars(base).items() if base not in _GENERAL or name in _OF_FORWARDS
    ]
    parts = [getattr(value, name) for value in members for name in ("fget", "fset") if hasattr(value, name)]
    return _words([*members, *parts])


def _words(values: list[Any]) -> frozenset[str]:
    """Return the words of the libraries' own functions among values, and of their callees."""
    found: set[str] = set()
    seen: set[CodeType] = set()
    waiting = list(_functions(values))
    while waiting:
        function = waiting.pop()
        code = function.__code__
        if code not in seen and is_own_file(code.co_filename):
            seen.add(code)
            words = names_in(code)
            found |= words | _strings_in(code)
            waiting += _functions(function.__globals__[word] for word in words if word in function.__globals__)
    return frozenset(found)


def _functions(values: Any) -> Iterator[FunctionType]:
    return (layer for value in values for layer in layers(value) if isinstance(layer, FunctionType))


@cache
def _strings_in(code: CodeType) -> frozenset[str]:
    """Return the strings in a function's code, functions inside it included."""
    inner = (_strings_in(part) for part in code.co_consts if isinstance(part, CodeType))
    return frozenset(each for each in code.co_consts if isinstance(each, str)).union(*inner)
