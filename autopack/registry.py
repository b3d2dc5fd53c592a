"""Which family serves a model: by its exact model type, then by structure, or a refusal that says why."""

from __future__ import annotations

import pkgutil
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from autopack.architectures import Family
from autopack.errors import UnsupportedModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["families", "family_for", "is_covered", "media_of", "register"]

_registered: list[Family] = []


@cache
def _own() -> tuple[Family, ...]:
    package = import_module("autopack.architectures")
    names = sorted(module.name for module in pkgutil.iter_modules(package.__path__))
    return tuple(import_module(f"autopack.architectures.{name}").FAMILY for name in names)


@cache
def _from_entry_points() -> tuple[Family, ...]:
    return tuple(point.load() for point in entry_points(group="autopack.families"))


def families() -> list[Family]:
    """All families, those registered by the user first, then those of installed packages, then autopack's own."""
    return [*_registered, *_from_entry_points(), *_own()]


def register(family: Family) -> None:
    """Add a family of one's own; it goes before all others for its model types. The same can be done by an entry
    point in the group `autopack.families`."""
    if not isinstance(family, Family):
        raise TypeError(f"register takes an autopack.architectures.Family; found {type(family).__name__}")
    _registered.insert(0, family)


def family_for(model: PreTrainedModel) -> Family:
    """The family that serves a model. Raises `UnsupportedModel` where none can."""
    from autopack.architectures import attention
    from autopack.structure import attention_modules, mixers

    config = model.config
    family = next((f for f in families() if config.model_type in f.model_types), None)
    reason = next(
        (f.refused_types[config.model_type] for f in families() if config.model_type in f.refused_types), None
    )
    if reason is None and family is not None:
        reason = family.refusal(config)
    if reason is None and getattr(config, "is_encoder_decoder", False):
        reason = "it is an encoder-decoder, and packed encoder and decoder rows are not supported yet"
    if reason is None and not attention_modules(model) and not (family and mixers(model, family.mixers)):
        reason = (
            "none of its modules calls an attention function of transformers' AttentionInterface, so autopack has no "
            "place to keep documents apart"
        )
    if reason is not None:
        raise UnsupportedModel(
            f"{type(model).__name__} (model type {config.model_type!r}) cannot be packed exactly: {reason}. Nothing "
            f"was changed; train it on padded batches, one document per row."
        )
    return family if family is not None else attention.FAMILY


def media_of(model_type: str) -> frozenset[str]:
    """The kinds of media that a run of the leak test has covered in the documents of this type."""
    return frozenset(kind for f in families() for kind, types in f.media_types.items() if model_type in types)


def is_covered(family: Family, model: PreTrainedModel) -> bool:
    """Whether a run of the leak test has covered this model: its type, in the code that transformers has for it.

    Remote code may go by the type of another implementation. Mixers have been run on recent releases alone.
    """
    from autopack import structure, upstream

    mixers = structure.mixers(model, family.mixers)
    mixing = [*structure.entries(model), *structure.attention_modules(model), *mixers]
    if any(not module.startswith("transformers.") for module, _ in structure.forwards_of(mixing)):
        return False
    if family.mixers and not (mixers and upstream.VERSION >= upstream.MIXERS_COVERED_FROM):
        return False
    return model.config.model_type in family.model_types
