"""One entry of an enabled model: the model itself, its backbone, or a half of an encoder-decoder."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from transformers import PreTrainedModel

from autopack.inspection import heads, modules
from autopack.inspection.heads import RowHead
from autopack.inspection.modules import activation_of, pools_single_tokens
from autopack.inspection.positions import Numbering
from autopack.inspection.source import is_named_causal_lm, names_of, parameters_of, shifts_labels
from autopack.runtime.model import EnabledModel, Link

_TOKEN_HEADS = ("ForMaskedLM", "ForTokenClassification", "LMHeadModel")


class Kind(Enum):
    """What is called at an entry."""

    MODEL = "a model that takes one kind of tokens"
    PAIR = "an encoder-decoder, which takes tokens for both halves"
    HALF = "a model inside an encoder or decoder"


@dataclass(frozen=True, eq=False)
class Entry:
    """What is known beforehand of the calls at one entry."""

    link: Link
    """The way to the enabled model that it is an entry of."""
    config: Any
    """Its configuration, or that of the whole, where it has none of its own."""
    level: int
    """Place among the entries of the model: 0 for the whole, 1 for what it holds."""
    kind: Kind
    decodes: bool | None
    """Whether a half is the decoder."""
    names: tuple[str, ...]
    """Names of the parameters of its forward, in order."""
    takes_others: bool
    """Whether its forward takes other arguments by `**kwargs`."""
    shifts_labels: bool
    """Whether its loss compares the prediction at each token with the label of the next one."""
    head: RowHead | None
    """Its head, where that gives one result per row."""
    runs_alone: str | None
    """Why such a head has to run the documents of packed rows alone, whatever the call."""
    inner_head: RowHead | None
    """Such a head of an entry further in."""
    has_other_head: bool
    """Whether it has a head that takes labels but does not predict the next token."""
    reads_one_token_per_row: bool
    """Whether a pooler or head reads one token of every row."""
    numbering: Numbering
    """How it numbers tokens where a call brings no positions."""
    first_position: int
    """Position of the first token of a document."""
    foreign: str | None
    """What of the forwards and losses here and further in is somebody else's, which has to see the form it knows."""
    guarded: bool
    """Whether code comes before it in a call that may give it other documents than the call has: somebody else's, that
    of a whole whose tokens have other names, or a forward that takes positions by `**kwargs` and may lose them, where
    frequencies depend on them."""
    earliest_position: int
    """The least position at which a document may begin."""

    @classmethod
    def of(
        cls, model: EnabledModel, level: int, numbering: Numbering, foreign: list[str | None], shifts: bool | None
    ) -> Entry:
        """Look at one of the entries of a model, which numbers tokens in this way.

        `foreign` says of every entry what in it is somebody else's code; `shifts` whether the loss shifts labels, where
        the model was asked.
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
            kind=Kind.PAIR if is_pair else Kind.MODEL if decodes is None else Kind.HALF,
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
        )

    @property
    def model(self) -> EnabledModel:
        """The enabled model that it is an entry of; there is one for every call that passes the hook."""
        assert self.link.model is not None
        return self.link.model

    @property
    def inner(self) -> list[PreTrainedModel]:
        """The entries further in."""
        return self.model.anatomy.entries[self.level + 1 :]

    @property
    def takes_positions(self) -> bool:
        """Whether its forward takes `position_ids`."""
        return "position_ids" in self.names or self.takes_others

    @property
    def uses_positions(self) -> bool:
        """Whether positions have to restart at every document of a call here."""
        # A document that is run alone needs none where the model takes none.
        traits = self.model.traits
        return traits.uses_positions and (traits.whole_model_reason is None or "position_ids" in self.names)


def why_alone(model: EnabledModel, level: int) -> str | None:
    """Why a head with one result per row has to run the documents of packed rows alone; None where it need not.

    Such a head reads padding although a mask says where it lies, or its backbone cannot run without the padding.
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
    """Whether a model has no head although it takes labels, as the backbones of some image-text models do."""
    name = type(model).__name__
    return name.endswith("Model") and "Head" not in name and heads.row_head(model) is None
