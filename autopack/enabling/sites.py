"""The functions of transformers that autopack replaces for one model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from autopack.attention.document_mask import adapt_mask, adapt_preprocessing
from autopack.attention.site import PARAMETERS, adapt_attention
from autopack.calls.hooks import adapt_forward
from autopack.calls.met_inside import adapt_loss
from autopack.errors import UnsupportedModel
from autopack.inspection import masks, modules, releases, source
from autopack.inspection.foreign import is_of_library, is_own
from autopack.inspection.modules import Anatomy
from autopack.mixers.site import adapt_mixer
from autopack.patching import Site
from autopack.runtime.marks import mark_of


def needed_sites(anatomy: Anatomy, implementations: tuple[str, ...]) -> list[Site]:
    """Return the sites of a model with marked mixers, for these attention implementations."""
    sites = [*_mixer_sites(anatomy.mixers)]
    # a model may be a mixer itself, run on each document alone
    taken = {(site.module, site.path) for site in sites}
    sites += [
        site
        for site in forward_sites(map(type, anatomy.entries))
        if (site.module, site.path) not in taken
    ]
    # The eager functions stand in for sdpa where attention weights are asked for, so they are
    # always needed.
    sites += [
        Site(module, name, adapt_attention, parameters=PARAMETERS)
        for module, name in source.eager_functions(anatomy.attention)
    ]
    if releases.losses():
        sites.append(
            Site(
                releases.LOSS_UTILS,
                "fixed_cross_entropy",
                adapt_loss,
                parameters=("source", "target"),
            ),
        )
    for implementation in implementations:
        if implementation != "eager" and anatomy.attention:
            sites += _attention_sites(anatomy.attention, implementation)
    # Models that attend in code of their own make masks as the others do, which ranks that share
    # rows ask for.
    configs = modules.configs_of([*anatomy.entries])
    by_configs = [getattr(config, "_attn_implementation", None) or "eager" for config in configs]
    for implementation in dict.fromkeys(
        [*implementations, *(by_configs if not anatomy.attention else ())]
    ):
        if masks.has_mask_interface() and masks.mask_function(implementation) is not None:
            sites.append(Site(*masks.MAPPING, adapt_mask, key=implementation))
    if masks.has_mask_interface():
        parameters = ("config", "position_ids")
        sites.append(
            Site(
                masks.MASKING_UTILS,
                "_preprocess_mask_arguments",
                adapt_preprocessing,
                parameters=parameters,
            )
        )
    return sites


def _mixer_sites(mixers: list[nn.Module]) -> Iterable[Site]:
    """Yield the sites of mixers: their forwards, and operations in their Python modules."""
    for kind in dict.fromkeys(modules.defining_class(type(mixer)) for mixer in mixers):
        # A forward of the user's may be taken back at any time; a module that then runs past its
        # site raises.
        yield _forward_site(kind, adapt_mixer, soft=not is_own(vars(kind)["forward"]))
    ways = (
        (mark.way, mixer)
        for mixer in mixers
        if (mark := mark_of(mixer)) is not None and mark.way is not None
    )
    sites = (
        site
        for way, mixer in ways
        for site in way.sites(modules.defining_class(type(mixer)).__module__)
    )
    yield from dict.fromkeys(sites)


def forward_sites(kinds: Iterable[type[nn.Module]]) -> Iterable[Site]:
    """Return sites at transformers' own forwards, so that `model.forward(...)` is `model(...)`."""
    own = (
        kind
        for kind in map(modules.defining_class, kinds)
        if is_of_library(kind) and kind is not nn.Module
    )
    return (_forward_site(kind, adapt_forward, soft=True) for kind in dict.fromkeys(own))


def _forward_site(kind: type[nn.Module], adapter: Callable[..., Any], soft: bool) -> Site:
    """Return the site at a class's forward, for `adapter`; other code may replace a `soft` one."""
    return Site(kind.__module__, f"{kind.__qualname__}.forward", adapter, soft=soft)


def _attention_sites(attention: list[nn.Module], implementation: str) -> list[Site]:
    """Return the sites at the attention functions of one implementation."""
    if releases.attention_function(implementation) is None:
        raise UnsupportedModel(
            f"attn_implementation={implementation!r} is not registered with transformers' "
            "AttentionInterface, so autopack cannot reach it. Load the model with 'sdpa', 'eager', "
            "'flex_attention' or a flash attention.",
            code="backend-unavailable",
        )
    local = source.modules_with_own_function(attention, implementation)
    if local:
        return [
            Site(
                module,
                "ALL_ATTENTION_FUNCTIONS._local_mapping",
                adapt_attention,
                key=implementation,
            )
            for module in local
        ]
    return [Site(*releases.attention_mapping(), adapt_attention, key=implementation)]
