"""The state of one enabled model: what was marked and hooked, and the sites that it keeps installed."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from autopack import patching, registry
from autopack.attention.mask_site import adapt_mask, adapt_preprocessing
from autopack.attention.site import adapt_attention
from autopack.errors import UnsupportedModel
from autopack.inspection import masks, modules, releases, source
from autopack.integrations import accelerate
from autopack.mixers import Alone, OneByOne, adapt_mixer
from autopack.patching import Site
from autopack.runtime.checkpointing import bind_checkpointing, unbind_checkpointing
from autopack.runtime.marks import ACROSS, MARK
from autopack.runtime.tally import Tally

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

    from autopack.family import Family
    from autopack.mixers import Way

__all__ = ["Enabled"]

_refreshing = threading.Lock()  # of the process and not of the model, for locks cannot be copied or pickled


class Enabled:
    """One enabled model. It travels with the model through deepcopy and pickle; installed sites do not.

    A copy, or a model loaded in another process, installs its sites at its first call.
    """

    def __init__(self, model: PreTrainedModel, family: Family, backend: str, unpad: str):
        self.family = family.name
        self.model_type: str = model.config.model_type
        self.is_dense = self.model_type in family.dense_types
        self.backend = backend
        self.unpad = unpad
        self.tally = Tally()
        numbering = registry.numbering_of(model.config)
        self.first_position = numbering.first_position(model.config)
        self.adjustments: dict[str, Callable[..., Any]] = dict(family.adjustments)
        self.family_sites = family.sites
        self.refused_arguments = dict(family.refused_arguments)
        self.media = registry.media_of(self.model_type)
        self.entries = modules.entries(model)
        self.attention = modules.attention_modules(model)
        self.ways = dict(family.mixers)
        self.mixers = modules.mixers(model, family.mixers)
        self.halves = modules.halves(model)
        used = {self.way_of(mixer) for mixer in self.mixers}
        self.one_by_one = next((way.reason for way in used if isinstance(way, OneByOne)), None)
        self.reads_padding = any(isinstance(way, Alone) and way.reads_padding for way in used)
        self.recurs = any(way.recurs for way in used)
        self.counts_columns = bool(self.adjustments) or any(way.counts for way in used)
        self.uses_positions = family.positions and (bool(self.attention) or any(way.attends for way in used))
        own = [mixer for mixer in self.mixers if self.way_of(mixer).attends]
        self.causal = any(source.is_causal(module, model.config) for module in (*self.attention, *own))
        self.checkpointed = modules.checkpointed_modules(model)
        self.configs: list[PretrainedConfig] = modules.configs_of([*self.entries, *self.attention])
        self.knows_padded_positions = self.model_type in family.model_types and numbering.is_known(
            source.adds_up_mask(self.entries, self.configs)
        )
        configs = [module.config for module in (*self.entries, *(self.halves or ()))]
        self.numbering = {config.model_type: registry.numbering_of(config) for config in configs}
        self.hooks: list[Any] = []
        self.active = False
        self._implementations: tuple[str, ...] | None = None
        self._sites: tuple[Site, ...] = ()
        self._release: weakref.finalize | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_implementations": None, "_sites": (), "_release": None}

    def owns_config(self, config: Any) -> bool:
        """Whether a config is one that this model's text modules read, or one of a single layer of theirs."""
        # Configs of single layers are made anew whenever they are asked for, so they have no identity.
        return any(
            config is own or (getattr(own, "is_heterogeneous", False) and type(config) is type(own))
            for own in self.configs
        )

    def implementations(self) -> tuple[str, ...]:
        """The attention implementations that this model's attention modules ask for now."""
        found = {getattr(c, "_attn_implementation", None) or "eager" for c in modules.configs_of(self.attention)}
        return tuple(sorted(found))

    def half_of(self, entry: torch.nn.Module) -> bool | None:
        """Whether an entry is of the decoder (True) or of the encoder (False); None where it is of neither."""
        for decodes, half in enumerate(self.halves or ()):
            if any(entry is module for module in half.modules()):
                return bool(decodes)
        return None

    def mark(self) -> None:
        """Let every attention module and mixer know whose it is, and cross-attention what it reads."""
        for module in (*self.attention, *self.mixers):
            module.__dict__[MARK] = self
        if self.halves is not None:
            for module in modules.cross_attention(self.halves[1], [*self.attention, *self.mixers]):
                module.__dict__[ACROSS] = True

    def unmark(self) -> None:
        """Take the marks back."""
        for module in (*self.attention, *self.mixers):
            module.__dict__.pop(MARK, None)
            module.__dict__.pop(ACROSS, None)

    def refresh(self) -> None:
        """Follow what may have changed since the last call: the implementation, checkpointing, the process."""
        if self._implementations != self.implementations():
            with _refreshing:
                if self._implementations != self.implementations():  # another thread may have been first
                    self.acquire()
        bind_checkpointing(self.checkpointed)
        accelerate.reroute(self.mixers)

    def acquire(self) -> None:
        """Install the sites for the present implementations, in place of those held before."""
        implementations = self.implementations()
        sites = patching.install(self._needed_sites(implementations))
        self.release()
        self._sites, self._implementations = sites, implementations
        self._release = weakref.finalize(self, patching.abandon, sites)
        self._release.atexit = False

    def release(self) -> None:
        """Leave all sites that this model holds."""
        if self._release is not None:
            self._release.detach()
            sites, self._sites = self._sites, ()
            self._release, self._implementations = None, None
            patching.uninstall(sites)

    def check_sites(self) -> None:
        """Raise `SiteDrift` where somebody has covered one of this model's sites, `UnsupportedModel` where a mixer."""
        patching.intact(self._sites)
        covered = self.covered_mixer()
        if covered is not None:
            raise UnsupportedModel(
                f"{covered} has a forward of its own on the instance, which goes past autopack's. Take it away, or "
                f"train the model on padded batches, one document per row."
            )

    def covered_mixer(self) -> str | None:
        """The class of a mixer whose instance has a forward of its own, past the one that keeps documents apart."""
        return next((type(mixer).__name__ for mixer in self.mixers if accelerate.goes_past_its_class(mixer)), None)

    def way_of(self, mixer: torch.nn.Module) -> Way:
        """How a mixer of this model is kept within documents."""
        return next(self.ways[cls.__name__] for cls in type(mixer).__mro__ if cls.__name__ in self.ways)

    def unbind(self) -> None:
        """Put the checkpoint functions and what hooks have kept back."""
        unbind_checkpointing(self.checkpointed)
        accelerate.put_back(self.mixers)

    def _needed_sites(self, implementations: Iterable[str]) -> list[Site]:
        # The eager functions stand in for sdpa where attention weights are asked for, so they are always needed.
        sites = list(self.family_sites)
        sites += [Site(module, path, adapt_mixer) for module, path in modules.forwards_of(self.mixers)]
        homes = {(self.way_of(mixer), modules.defining_class(mixer).__module__) for mixer in self.mixers}
        sites += {site: None for way, module in homes for site in way.sites(module)}
        sites += [
            Site(module, name, adapt_attention, parameters=("module", "query", "key", "value", "attention_mask"))
            for module, name in source.eager_functions(self.attention)
        ]
        for implementation in implementations:
            if implementation != "eager":
                sites.extend(self._attention_sites(implementation))
            if masks.has_mask_interface() and masks.mask_function(implementation) is not None:
                sites.append(Site(*masks.mask_mapping(), adapt_mask, key=implementation))
        if masks.has_mask_interface():
            sites.append(
                Site(
                    masks.MASKING_UTILS,
                    "_preprocess_mask_arguments",
                    adapt_preprocessing,
                    parameters=("config", "position_ids"),
                )
            )
        return sites

    def _attention_sites(self, implementation: str) -> list[Site]:
        if releases.attention_function(implementation) is None:
            raise UnsupportedModel(
                f"attn_implementation={implementation!r} is not registered with transformers' AttentionInterface, so "
                f"autopack cannot reach it. Load the model with 'sdpa', 'eager', 'flex_attention' or a flash attention."
            )
        local = source.modules_with_own_function(self.attention, implementation)
        if local:
            return [
                Site(module, "ALL_ATTENTION_FUNCTIONS._local_mapping", adapt_attention, key=implementation)
                for module in local
            ]
        return [Site(*releases.attention_mapping(), adapt_attention, key=implementation)]
