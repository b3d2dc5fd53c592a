"""What a model is made of, as far as packing is concerned: found once, when it is enabled."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from autopack.inspection import modules, source

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


@dataclass(frozen=True, eq=False)
class Anatomy:
    """The parts of one model."""

    model_type: str
    entries: list[PreTrainedModel]
    """The model and the models inside it that can be called with tokens, the outermost first."""
    attention: list[nn.Module]
    """Modules that attend through transformers' attention interface."""
    mixers: list[nn.Module]
    """Modules that mix tokens in another way, or count them."""
    halves: tuple[nn.Module, nn.Module] | None
    """The encoder and the decoder of a model that has both."""
    checkpointed: list[nn.Module]
    """Modules that may hold a gradient checkpointing function."""
    configs: list[PretrainedConfig]
    """The configs that its entries and attention modules read."""
    causal: bool
    """Whether any of its attention modules hides later tokens."""
    counts_along_mask: bool
    """Whether its code adds up a mask to number tokens."""

    @classmethod
    def of(cls, model: PreTrainedModel, mixers: Collection[str], attending: Collection[str]) -> Anatomy:
        """Take a model apart; `mixers` are the names of the classes of its mixers, `attending` those that attend."""
        entries, attention = modules.entries(model), modules.attention_modules(model)
        configs = modules.configs_of([*entries, *attention])
        own = modules.mixers(model, attending)
        return cls(
            model_type=model.config.model_type,
            entries=entries,
            attention=attention,
            mixers=modules.mixers(model, mixers),
            halves=modules.halves(model),
            checkpointed=modules.checkpointed_modules(model),
            configs=configs,
            causal=any(source.is_causal(module, model.config) for module in (*attention, *own)),
            counts_along_mask=source.adds_up_mask(entries, configs),
        )

    @property
    def mixing(self) -> list[nn.Module]:
        """All modules that mix tokens, or count them."""
        return [*self.attention, *self.mixers]

    def owns_config(self, config: Any) -> bool:
        """Whether a config is one that this model's text modules read, or one of a single layer of theirs."""
        # Configs of single layers are made anew whenever they are asked for, so they have no identity.
        return any(
            config is own or (getattr(own, "is_heterogeneous", False) and type(config) is type(own))
            for own in self.configs
        )

    def in_decoder(self, module: nn.Module) -> bool | None:
        """Whether a module is of the decoder (True) or of the encoder (False); None where it is of neither."""
        for decodes, half in enumerate(self.halves or ()):
            if any(module is part for part in half.modules()):
                return bool(decodes)
        return None
