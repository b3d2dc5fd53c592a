"""Heads and poolers that give one result per row of their batch; heads are found by class names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from autopack.inspection import releases
from autopack.inspection.foreign import is_of_library
from autopack.inspection.source import forward_codes, parameters_of

_CHOICES = (
    "a row of its batch is one of several choices of a question, (questions, choices, tokens), and "
    "nothing in a packed row says which documents are choices of one question"
)


@dataclass(frozen=True)
class RowHead:
    """Facts about a head with one result per row.

    `spans` is True if the result is a start and an end among the row's tokens. `picks` is True if
    the head also gives the result of a token that the call names, beside the results of all tokens.
    `labels` are the arguments with one value per row. `refusal` is the reason why packed rows
    cannot run, or None.
    """

    name: str
    spans: bool = False
    picks: bool = False
    labels: tuple[str, ...] = ("labels", "next_sentence_label")
    refusal: str | None = None

    @property
    def of_choices(self) -> bool:
        """True if the rows of its batch are choices of questions."""
        return self.refusal == _CHOICES


_SPANS = partial(RowHead, spans=True, labels=("start_positions", "end_positions"))
_HEADS: dict[tuple[str, ...], Callable[[str], RowHead]] = {
    ("ForMultipleChoice",): partial(RowHead, refusal=_CHOICES),
    ("DoubleHeadsModel",): partial(RowHead, refusal=_CHOICES, picks=True),
    ("ForQuestionAnswering", "ForQuestionAnsweringSimple"): _SPANS,
    ("ForSequenceClassification", "ForNextSentencePrediction", "RewardModel"): RowHead,
}


def row_head(model: Any) -> RowHead | None:
    """Return the facts about a model's head if it gives one result per row, or None.

    A class derived from one of transformers counts as that one, whatever its name. A name counts
    only for a head that third-party code has written anew.
    """
    bases = type(model).__mro__
    known = [cls for cls in bases if is_of_library(cls)]
    own = any("forward" in vars(cls) and hasattr(cls, "config_class") for cls in known)
    names = [cls.__name__ for cls in (known if own else bases)]
    found = (head for name in names for ends, head in _HEADS.items() if name.endswith(ends))
    return next((head(type(model).__name__) for head in found), None)


def is_head_of_pair(model: Any) -> bool:
    """Return True if an encoder-decoder has a head whose results are not one per decoder token."""
    names = set(parameters_of(type(model)).names)
    known = releases.class_names("SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "IMAGE_TEXT_TO_TEXT")
    of_tokens = any(cls.__name__ in known for cls in type(model).__mro__)
    return (
        "decoder_input_ids" in names
        and bool({"labels", "start_positions"} & names)
        and not of_tokens
    )


def looks_for_padding(model: Any) -> bool:
    """Return True if the head finds a row's last token by the padding token, as decoders' do."""
    return "pad_token_id" in _names_in_forwards(model)


def end_token(model: Any) -> int | None:
    """Return the end token at which a head with one result per row reads that result, or None."""
    token = getattr(model.config, "eos_token_id", None)
    return (
        token
        if row_head(model) is not None
        and "eos_token_id" in _names_in_forwards(model)
        and isinstance(token, int)
        else None
    )


def takes_first_padding(model: Any) -> bool:
    """Return True if the head takes the token before the first padding token. Later releases than
    4.50 take the last real one."""
    return {"pad_token_id", "eq"} <= _names_in_forwards(model)


def _names_in_forwards(model: Any) -> set[str]:
    """Return the names in a head's forward, and in the forwards that take its arguments."""
    return {name for code in forward_codes(type(model)) for name in code.co_names}


def reads_whole_row(model: Any) -> str | None:
    """Return, in words, the reason why a head reads padding although it is masked, or None."""
    names = set(parameters_of(type(model)).names)
    for child in model.children():
        kind = getattr(child, "summary_type", "first")
        if kind != "first":
            return f"summary_type={kind!r} reads where the row ends"
    if "attention_mask" not in names:
        return "its forward takes no attention_mask"
    # Splinter's has them.
    return (
        "its search for spans goes over the row"
        if {"p_mask", "question_positions"} & names
        else None
    )


def pools_single_tokens(module: nn.Module) -> bool:
    """Return True if a backbone's pooler is one linear layer, on the first token of every row."""
    return isinstance(getattr(module, "pooler", None), nn.Linear)


def activation_of(module: nn.Module) -> Any:
    """Return the function that the backbone applies to the pooler's output, or None."""
    found = [getattr(module, name, None) for name in ("pooler_activation", "activation")]
    return next(filter(callable, found), None)


def pool_documents(module: Any, output: Any, starts: torch.Tensor) -> Any:
    """Return a backbone's output with one pooled vector per document, (documents, channels).

    It has None instead where the backbone pools nothing. `starts` are the first tokens of the
    documents in the flattened rows.
    """
    activation, pooled = activation_of(module), None  # what it has made of rows is of no document
    if activation is not None:
        pooled = activation(module.pooler(output[0].flatten(0, 1).index_select(0, starts)))
    if isinstance(output, tuple):
        return (output[0], pooled, *output[2:])
    return type(output)(**{**output, "pooler_output": pooled})
