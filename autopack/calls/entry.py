"""One entry of an enabled model: the model itself, its backbone, or a half of an
encoder-decoder."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from autopack.inspection import heads, media, modules
from autopack.inspection.heads import activation_of, pools_single_tokens
from autopack.inspection.positions import Numbering
from autopack.inspection.source import is_named_causal_lm, names_of, parameters_of, shifts_labels
from autopack.runtime.model import EnabledModel

_TOKEN_HEADS = ("ForMaskedLM", "ForTokenClassification", "LMHeadModel")


class Entry:
    """Facts of one entry of a model that hold for all its calls; they never change."""

    def __init__(
        self,
        model: EnabledModel,
        level: int,
        numbering: Numbering,
        foreign: list[str | None],
        shifts: bool | None,
    ):
        """Find the facts of a model's entry at `level`, whose positions follow `numbering`.

        `foreign` names the third-party code in each entry, or None; `shifts` is True if the loss
        shifts labels, None if the model was not asked.
        """
        entries, traits = model.anatomy.entries, model.traits
        module, inner = entries[level], entries[level + 1 :]
        kind: Any = type(module)
        parameters = parameters_of(kind)

        self.link = model.link
        """The reference to the enabled model that it is an entry of."""
        self.config: Any = modules.config_of(module, entries[0])
        """Its configuration, or the whole model's if it has none of its own."""
        self.level = level
        """Its number among the entries of the model, from 0 for the whole to the innermost."""
        self.is_pair = modules.is_pair(module)
        """True for an encoder-decoder, which takes tokens for both halves."""
        self.decodes = model.anatomy.in_decoder(module)
        """True for a model inside a decoder, False inside an encoder, None for any other."""
        self.is_half = self.decodes is not None and not self.is_pair
        """True for a model inside an encoder or decoder, which is no encoder-decoder itself."""
        self.names = parameters.names
        """Names of its forward's parameters, in order."""
        self.takes_others = parameters.takes_others
        """True if its forward takes other arguments by `**kwargs`."""
        self.plain_names = frozenset(name for name in self.names if not media.holds_media(name))
        """Names of the parameters that hold no media."""
        self.shifts_labels = shifts_labels(module) if shifts is None else shifts
        """True if its loss compares the prediction at each token with the next token's label."""
        self.head = heads.row_head(module)
        """Its head, if that gives one result per row."""
        self.runs_alone: str | None = None
        """The reason why such a head always has to run the documents of packed rows alone, or None.
        """
        if self.head is not None and not self.head.of_choices:
            self.runs_alone = why_alone(model, level) or next(
                filter(None, foreign[level + 1 :]), None
            )
        self.holds_models = bool(inner)
        """True if models inside it take tokens."""
        self.holds_pair = any(map(modules.is_pair, inner))
        """True if one of the models inside it is an encoder-decoder."""
        self.inner_head = next(filter(None, map(heads.row_head, inner)), None)
        """The first head of an inner entry that gives one result per row, or None."""
        # A head that searches its row may look at all of its columns (BigBird, Splinter).
        searches_row = self.head is not None and self.head.spans
        # Some image-text backbones take labels.
        is_backbone = (
            kind.__name__.endswith("Model") and "Head" not in kind.__name__ and self.head is None
        )
        other_head = "labels" in self.names and not (self.shifts_labels or is_backbone)
        of_tokens = is_named_causal_lm(kind) or any(
            name.endswith(_TOKEN_HEADS) for name in names_of(kind)
        )
        # ModernBERT's may leave tokens without labels out, so that its logits have no place in a
        # batch.
        of_all = of_tokens and not vars(module).get("sparse_prediction")
        looks_further = (other_head and not of_all) or searches_row
        self.has_other_head = heads.is_head_of_pair(module) if self.is_pair else looks_further
        """True if it has a head with labels that does not look at each token by itself."""
        self.has_pooler = getattr(entries[-1], "pooler", None) is not None
        """True if the innermost backbone has a pooler."""
        self.reads_one_token_per_row = not self.is_pair and (
            self.has_pooler or (other_head and not of_tokens)
        )
        """True if a pooler or head reads one token of every row."""
        self.numbering = numbering
        """Its rule for positions that a call does not bring."""
        self.first_position = (
            traits.first_position if self.decodes is None else numbering.first_position(self.config)
        )
        """Position of the first token of a document."""
        self.earliest_position = numbering.earliest_position(module, self.config)
        """The least position at which a document may begin."""
        self.foreign = next(filter(None, foreign[level:]), None)
        """Third-party forwards and losses here and further in, which need the padded form, or None.
        """
        loses_positions = model.anatomy.has_row_dependent_rotary and not all(
            map(_has_position_ids, entries[:level])
        )
        self.guarded = level > 0 and bool(
            any(foreign[: level + 1]) or not modules.takes_tokens(entries[0]) or loses_positions
        )
        """True if code between the top of the model and it may give it other documents.

        Such code is third-party, a whole whose tokens have other names, or a forward that takes
        positions by `**kwargs` and may lose them, where frequencies depend on them.
        """
        self.takes_positions = "position_ids" in self.names or self.takes_others
        """True if its forward takes `position_ids`."""
        # A document that is run alone needs none where the model takes none.
        alone = traits.whole_model_reason is not None
        self.uses_positions = traits.uses_positions and (not alone or "position_ids" in self.names)
        """True if positions have to restart at every document of a call here."""
        self.pools_single_tokens = pools_single_tokens(module)
        """True if its pooler is handed one token of every row by its own forward."""


def why_alone(model: EnabledModel, level: int) -> str | None:
    """Return why the per-row head at entry `level` must run packed documents alone; None if not.

    Such a head reads padding although a mask tells its place, or its backbone cannot run without
    padding.
    """
    module, inner = model.anatomy.entries[level], model.anatomy.entries[level + 1 :]
    if model.traits.whole_model_reason is not None:
        return model.traits.whole_model_reason
    if not inner:
        return "it holds no backbone that takes tokens"
    if any(pools_single_tokens(entry) and activation_of(entry) is None for entry in inner):
        return "its pooler is handed one token of every row"
    return heads.reads_whole_row(module)


def _has_position_ids(model: PreTrainedModel) -> bool:
    """Return True if a model's forward has a parameter `position_ids`; `**kwargs` do not count."""
    return "position_ids" in parameters_of(type(model)).names
