"""One entry of an enabled model: the model itself, its backbone, or a half of an encoder-decoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from autopack.inspection import heads, modules
from autopack.inspection.heads import RowHead
from autopack.inspection.modules import activation_of, pools_single_tokens
from autopack.inspection.positions import Numbering
from autopack.inspection.source import is_named_causal_lm, names_of, parameters_of, shifts_labels
from autopack.runtime.model import EnabledModel, Link

_TOKEN_HEADS = ("ForMaskedLM", "ForTokenClassification", "LMHeadModel")


@dataclass(frozen=True, eq=False)
class Entry:
    """Facts about the calls at one entry, known beforehand."""

    link: Link
    """The reference to the enabled model that it is an entry of."""
    config: Any
    """Its configuration, or the whole model's if it has none of its own."""
    level: int
    """Its place among the entries of the model: 0 for the whole, 1 for its parts."""
    is_pair: bool
    """True for an encoder-decoder, which takes tokens for both halves."""
    is_half: bool
    """True for a model inside an encoder or decoder, which is no encoder-decoder itself."""
    decodes: bool | None
    """True for a model inside a decoder, False inside an encoder, None for any other."""
    names: tuple[str, ...]
    """Names of its forward's parameters, in order."""
    takes_others: bool
    """True if its forward takes other arguments by `**kwargs`."""
    shifts_labels: bool
    """True if its loss compares the prediction at each token with the next token's label."""
    head: RowHead | None
    """Its head, if that gives one result per row."""
    runs_alone: str | None
    """The reason why such a head always has to run the documents of packed rows alone, or None."""
    inner_head: RowHead | None
    """Such a head of an inner entry."""
    has_other_head: bool
    """True if it has a head that takes labels but does not predict the next token."""
    reads_one_token_per_row: bool
    """True if a pooler or head reads one token of every row."""
    numbering: Numbering
    """Its rule for positions that a call does not bring."""
    first_position: int
    """Position of the first token of a document."""
    foreign: str | None
    """Third-party forwards and losses here and further in, which need the padded form, or None."""
    guarded: bool
    """True if code that runs before it in a call may give it other documents than the call has.

    Such code is third-party, a whole whose tokens have other names, or a forward that takes
    positions by `**kwargs` and may lose them, where frequencies depend on them.
    """
    earliest_position: int
    """The least position at which a document may begin."""
    takes_positions: bool
    """True if its forward takes `position_ids`."""
    uses_positions: bool
    """True if positions have to restart at every document of a call here."""
    pools_single_tokens: bool
    """True if its pooler is handed one token of every row by its own forward."""

    @classmethod
    def of(
        cls, model: EnabledModel, level: int, numbering: Numbering, foreign: list[str | None], shifts: bool | None
    ) -> Entry:
        """Make the entry of a model at `level`, with its rule for positions.

        `foreign` names the third-party code in each entry, or None; `shifts` is True if the loss
        shifts labels, None if the model was not asked.
        """
        entries = model.anatomy.entries
        module, inner = entries[level], entries[level + 1 :]
        config = modules.config_of(module, entries[0])
        kind_of_module: Any = type(module)
        is_pair, decodes = modules.is_pair(module), model.anatomy.in_decoder(module)
        parameters = parameters_of(kind_of_module)
        names, takes_others = parameters.names, parameters.takes_others
        head, shifts = heads.row_head(module), shifts_labels(module) if shifts is None else shifts
        searches_row = head is not None and head.spans  # and may look at its columns (BigBird, Splinter)
        other_head = "labels" in names and not shifts and not _is_backbone(module)
        of_single_tokens = is_named_causal_lm(kind_of_module) or any(
            name.endswith(_TOKEN_HEADS) for name in names_of(kind_of_module)
        )
        has_pooler = getattr(entries[-1], "pooler", None) is not None
        return cls(
            link=model.link,
            config=config,
            level=level,
            is_pair=is_pair,
            is_half=decodes is not None and not is_pair,
            decodes=decodes,
            names=names,
            takes_others=takes_others,
            shifts_labels=shifts,
            head=head,
            runs_alone=None
            if head is None or head.of_choices
            else why_alone(model, level) or next(filter(None, foreign[level + 1 :]), None),
            inner_head=next((found for found in map(heads.row_head, inner) if found), None),
            has_other_head=heads.is_head_of_pair(module) if is_pair else other_head or searches_row,
            reads_one_token_per_row=not is_pair and (has_pooler or (other_head and not of_single_tokens)),
            numbering=numbering,
            earliest_position=numbering.earliest_position(module, config),
            first_position=(model.traits.first_position if decodes is None else numbering.first_position(config)),
            foreign=next((reason for reason in foreign[level:] if reason), None),
            guarded=level > 0
            and (
                any(foreign[: level + 1])
                or not modules.takes_tokens(entries[0])
                or (model.anatomy.has_row_dependent_rotary and not all(map(_names_positions, entries[:level])))
            ),
            takes_positions="position_ids" in names or takes_others,
            # A document that is run alone needs none where the model takes none.
            uses_positions=model.traits.uses_positions
            and (model.traits.whole_model_reason is None or "position_ids" in names),
            pools_single_tokens=pools_single_tokens(module),
        )

    @property
    def model(self) -> EnabledModel:
        """The enabled model that it is an entry of; every call that passes the hook has one."""
        assert self.link.model is not None
        return self.link.model

    @property
    def inner(self) -> list[PreTrainedModel]:
        """The inner entries."""
        return self.model.anatomy.entries[self.level + 1 :]


def why_alone(model: EnabledModel, level: int) -> str | None:
    """Return the reason why a per-row head has to run packed documents alone, or None.

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


def _names_positions(model: PreTrainedModel) -> bool:
    return "position_ids" in parameters_of(type(model)).names


def _is_backbone(model: PreTrainedModel) -> bool:
    """Return True if a model that takes labels has no head, as in some image-text backbones."""
    name = type(model).__name__
    return name.endswith("Model") and "Head" not in name and heads.row_head(model) is None
