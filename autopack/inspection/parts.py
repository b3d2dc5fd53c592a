"""What a model is made of, as far as packing is concerned: found once, when it is enabled."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from autopack.inspection import modules, source


@dataclass(frozen=True, eq=False)
class Anatomy:
    """The parts of one model.

    `entries` are the model and the models inside it that can be called with tokens, the outermost first; `attention`
    the modules that attend through transformers' interface, and `mixers` those that mix tokens in another way, or count
    them; `towers` the attention modules of parts that take no tokens, which pack by themselves, `within_token` those
    that attend within each token or within media; `halves` the encoder and the decoder of a model that has both;
    `checkpointed` the modules that may hold a gradient checkpointing function; `chunked` those that may take some
    tokens at a time, as many as their attribute `chunk_size_feed_forward` says, 0 for all; `configs` those that entries
    and attention modules read. `causal` says whether any attention hides later tokens, `one_way` whether all of it
    does, `counts_along_mask` whether the model's code adds up a mask to number tokens, `has_row_dependent_rotary`
    whether rotary frequencies depend on the longest position of a call.
    """

    model_type: str
    entries: list[Any]
    attention: list[nn.Module]
    mixers: list[nn.Module]
    towers: list[nn.Module]
    within_token: list[nn.Module]
    halves: tuple[nn.Module, nn.Module] | None
    checkpointed: list[nn.Module]
    chunked: list[nn.Module]
    configs: list[PretrainedConfig]
    causal: bool
    one_way: bool
    counts_along_mask: bool
    has_row_dependent_rotary: bool

    @classmethod
    def of(
        cls, model: PreTrainedModel, mixers: Collection[str], attending: Collection[str], within: Collection[str]
    ) -> Anatomy:
        """Take a model apart, by names of classes: `mixers`, those of them that are `attending`, and those `within`
        which all attention is over parts of a token or of media."""
        entries, outer = modules.entries(model), modules.mixers(model, within)
        inside = {id(part) for module in outer for part in module.modules()}
        found = modules.attention_modules(model)
        attention = [module for module in found if id(module) not in inside]
        within_token = list(dict.fromkeys([*outer, *(module for module in found if id(module) in inside)]))
        configs = modules.configs_of([*entries, *attention])
        causal = [source.is_causal(module, model.config) for module in [*attention, *modules.mixers(model, attending)]]
        return cls(
            model_type=model.config.model_type,
            entries=entries,
            attention=attention,
            mixers=modules.mixers(model, mixers),
            towers=modules.towers(model),
            within_token=within_token,
            halves=modules.halves(model),
            checkpointed=modules.checkpointed(model),
            chunked=[module for module in model.modules() if "chunk_size_feed_forward" in vars(module)],
            configs=configs,
            causal=any(causal),
            one_way=all(causal),
            counts_along_mask=source.adds_up_mask(entries, configs),
            has_row_dependent_rotary=bool(modules.row_dependent_rotaries(model)),
        )

    @property
    def mixing(self) -> list[nn.Module]:
        """All modules that mix tokens, or count them."""
        return [*self.attention, *self.mixers]

    @property
    def indifferent(self) -> list[nn.Module]:
        """The modules that attend and mix no tokens of documents."""
        return [*self.towers, *self.within_token]

    def owns_config(self, config: Any) -> bool:
        """Whether a config is one that this model's text modules read, or one of a single layer of theirs."""
        # Configs of single layers are made anew whenever they are asked for, so they have no identity.
        kinds = [type(own) for own in self.configs if getattr(own, "is_heterogeneous", False)]
        return any(config is own for own in self.configs) or type(config) in kinds

    def in_decoder(self, module: nn.Module) -> bool | None:
        """Whether a module is of the decoder (True) or of the encoder (False); None where it is of neither."""
        found = (bool(decodes) for decodes, half in enumerate(self.halves or ()) if module in set(half.modules()))
        return next(found, None)
