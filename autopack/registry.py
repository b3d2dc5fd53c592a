"""The family of a model: by its exact model type, then by structure, or a reasoned refusal."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from importlib import import_module
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from autopack import architectures
from autopack.architectures import attention
from autopack.errors import UnsupportedModel
from autopack.family import Family as Family
from autopack.family import Way, by_class
from autopack.inspection import modules, source
from autopack.inspection.configs import text_config
from autopack.inspection.positions import Numbering
from autopack.inspection.source import parameters_of
from autopack.mixers import RESTARTING, Alone, Rows

__all__ = ["Family", "families", "register"]

_registered: list[Family] = []


@cache
def _own() -> tuple[Family, ...]:
    """Return autopack's own families, sorted by name."""
    names = [module.name for module in pkgutil.iter_modules(architectures.__path__)]
    found = [vars(import_module(f"autopack.architectures.{name}")).values() for name in names]
    own = [each for values in found for each in values if isinstance(each, Family)]
    return tuple(sorted(own, key=lambda family: family.name))


def families() -> list[Family]:
    """Return all families: the user's own first, then autopack's own."""
    return [*_registered, *_own()]


def register(family: Family) -> None:
    """Add a family of the user's; for its model types it goes before all others."""
    if not isinstance(family, Family):
        raise TypeError(
            f"register takes an autopack.registry.Family; found {type(family).__name__}"
        )
    _registered.insert(0, family)


def look_up(model: PreTrainedModel) -> tuple[Family, str | None]:
    """Return a model's family, and the reason why it cannot serve the model, or None if it can."""
    # A composite that none lists is what its text part is, and is audited.
    known = [
        model.config.model_type,
        getattr(text_config(model.config, decoder=True), "model_type", None),
    ]
    family = next(
        (f for name in known for f in families() if name in f.model_types), attention.FAMILY
    )
    mixers = modules.mixers(model, family.mixers)
    attending = modules.attending_by_themselves(model, mixers)
    mixing = [*modules.attention_modules(model), *mixers, *attending]
    reason = next(filter(None, _refusals(model, family, mixing)), None)
    if reason is None:
        family = _with_positions(_with_ways(family, mixers, attending), model, mixing)
    return family, reason


def _refusals(
    model: PreTrainedModel, family: Family, mixing: list[nn.Module]
) -> Iterator[str | None]:
    """Yield a reason, or None, for each condition under which a family cannot serve a model."""
    yield from (each.refused_types.get(model.config.model_type) for each in families())
    yield from map(family.refused_classes.get, source.names_of(type(model)))
    if not modules.entries(model):
        yield (
            "neither it nor a model inside it takes tokens or embeddings of tokens (input_ids, "
            "inputs_embeds), so no call can say where documents lie; enable the model whose text "
            "it serves"
        )
    if family.refusal is not None:
        yield family.refusal(model.config)
    if modules.is_pair(model):
        if (found := modules.halves(model)) is None:
            yield (
                "it is an encoder-decoder whose encoder and decoder are not both models of their "
                "own"
            )
        elif not modules.cross_attention(found[1], mixing):
            yield (
                "none of the attention modules of its decoder is known to attend to the encoder, "
                "so autopack cannot keep the halves of one document together"
            )
    if not mixing:
        yield (
            "none of its modules calls an attention function of transformers' AttentionInterface "
            "or attends in code of its own, so autopack has no place to keep documents apart"
        )


def _with_ways(family: Family, mixers: list[nn.Module], attending: list[nn.Module]) -> Family:
    """Return the family with the ways that these mixers need in the installed transformers.

    Modules that attend by themselves run on each document alone.
    """
    found: dict[str, Way] = {}
    for kind in {*map(source.class_of, mixers)}:
        if (way := by_class(family.mixers, kind)) is None:
            continue
        here = way.here(modules.defining_class(kind).__module__)
        if isinstance(way, Alone) and not way.from_zero and source.counts_from_zero(kind):
            here = replace(way, from_zero=True)  # Falcon, up to 4.44, and by flash attention
        if here is not way:
            found[kind.__name__] = here
    own = {
        kind.__name__: Alone(from_zero=source.counts_from_zero(kind))
        for kind in map(source.class_of, attending)
    }
    names = f"; the model's own attention ({', '.join(sorted(own))}), documents alone"
    mixers_of = {**family.mixers, **found, **own}
    return replace(family, mixers=mixers_of, how=family.how + names if own else family.how)


def _with_positions(family: Family, model: PreTrainedModel, mixing: list[nn.Module]) -> Family:
    """Return the family, set to restart counted positions if a model takes no `position_ids`."""
    if not family.positions or not modules.takes_tokens(model):
        return family
    # A head may hand what it takes by any name on to its loss alone (BioGPT up to 4.52).
    if all(
        source.knows_of(type(part), "position_ids") for part in (model, modules.entries(model)[-1])
    ):
        return family
    tables, whole = modules.counting_columns(model, mixing)
    if not (tables or whole) and parameters_of(type(model)).takes_others:
        return family  # what it takes and drops, the backbone is given where it needs it
    restarted = {type(module).__name__: RESTARTING for module in tables}
    by_rows = {type(module).__name__: Rows(recurs=False, counts=True) for module in whole}
    return replace(family, mixers={**family.mixers, **restarted, **by_rows}, positions=False)


def family_for(model: PreTrainedModel) -> Family:
    """Return the family that serves a model.

    Raises `UnsupportedModel` if none can, `SiteDrift` if a forward of its classes is no function.
    """
    modules.check_forwards(model)
    family, reason = look_up(model)
    if reason is not None:
        raise UnsupportedModel(
            f"{type(model).__name__} (model type {model.config.model_type!r}) cannot be packed "
            f"exactly: {reason}. Nothing was changed; train it on padded batches, one document per "
            "row.",
            code="cannot-be-packed",
        )
    return family


def media_of(model_type: str) -> frozenset[str]:
    """Return the kinds of media that documents of a model type may have, by all families."""
    return frozenset(
        kind for f in families() for kind, types in f.media.items() if model_type in types
    )


def fact_of(model_type: str | None, fact: str) -> Any:
    """Return the value for a model type in the first family that has one in `fact`, or None."""
    known = (getattr(family, fact) for family in families())
    return next((of[model_type] for of in known if model_type in of), None)


def numbering_of(config: Any) -> Numbering:
    """Return the `Numbering` of a config's type, else of its text part's, else the default."""
    types = (getattr(part, "model_type", None) for part in (config, text_config(config)))
    return next(filter(None, (fact_of(name, "numbering") for name in types)), Numbering())


def first_position(config: Any) -> int:
    """Return the position id of a document's first token in models of this config.

    See `Numbering.first_position`.
    """
    return numbering_of(config).first_position(config)
