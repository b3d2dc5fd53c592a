"""Results of twins of models that run library code only, kept for other models of this process."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from types import CodeType
from typing import Any, TypeVar

from transformers import PreTrainedModel

from autopack import registry
from autopack.inspection.code import ModelCode
from autopack.inspection.foreign import is_own
from autopack.inspection.modules import modules_of
from autopack.proving.twin import Kinds

T = TypeVar("T")
_NAMES = frozenset(
    ("_name_or_path", "name_or_path", "_commit_hash", "transformers_version", "architectures")
)
"""Fields of a configuration that tell its origin."""

_answers: dict[Hashable, Any] = {}


def key_of(model: PreTrainedModel, code: ModelCode) -> Hashable:
    """Return a key that models with equal twins share; None for a model with code of the user's.

    Equal keys mean equal configurations, field by field, modules, objects on them, functions of
    their classes, and families. A class of the user's has none: it may say by an attribute what the
    library's functions do.
    """
    if code.foreign:
        return None
    kinds = Kinds(model, code).by_name
    models = (part for part in modules_of(model) if isinstance(part, PreTrainedModel))
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
    """Return a configuration as its type and sorted (name, value) pairs, inner ones included."""
    if hasattr(config, "to_diff_dict") or isinstance(config, Mapping):
        fields = config.items() if isinstance(config, Mapping) else vars(config).items()
        told = sorted(
            ((str(name), _fields(value)) for name, value in fields if name not in _NAMES), key=str
        )
        return [type(config), told]
    return [_fields(part) for part in config] if isinstance(config, (list, tuple)) else config
