"""Heads that give one result per row of their batch, found by the names that transformers gives to their classes."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

_DOCUMENT = ("ForSequenceClassification", "ForNextSentencePrediction", "RewardModel")
_SPAN = ("ForQuestionAnswering", "ForQuestionAnsweringSimple")
_CHOICE = ("ForMultipleChoice", "DoubleHeadsModel")
_CHOICES = (
    "a row of its batch is one of several choices of a question, (questions, choices, tokens), and nothing in a packed "
    "row says which documents are choices of one question"
)


@dataclass(frozen=True)
class RowHead:
    """What is known of a head with one result per row.

    `spans` says that the result is a start and an end among the row's tokens. `labels` are the arguments with one
    value per row. `refusal` says why it cannot be run on packed rows, or is None.
    """

    name: str
    spans: bool = False
    labels: tuple[str, ...] = ("labels", "next_sentence_label")
    refusal: str | None = None


def row_head(model: Any) -> RowHead | None:
    """The head of a model if it gives one result per row, or None; classes derived from one of transformers count."""
    for cls in type(model).__mro__:
        if cls.__name__.endswith(_CHOICE):
            return RowHead(type(model).__name__, refusal=_CHOICES)
        if cls.__name__.endswith(_SPAN):
            return RowHead(type(model).__name__, spans=True, labels=("start_positions", "end_positions"))
        if cls.__name__.endswith(_DOCUMENT):
            return RowHead(type(model).__name__)
    return None


def is_head_of_pair(model: Any) -> bool:
    """Whether an encoder-decoder has a head with a result of another kind than its decoder's tokens."""
    from autopack.inspection import releases

    names = set(inspect.signature(type(model).forward).parameters)
    of_tokens = any(cls.__name__ in releases.seq2seq_class_names() for cls in type(model).__mro__)
    return "decoder_input_ids" in names and bool({"labels", "start_positions"} & names) and not of_tokens


def looks_for_padding(model: Any) -> bool:
    """Whether the head finds the last token of a row by the padding token, as those of decoders do."""
    return "pad_token_id" in inspect.unwrap(type(model).forward).__code__.co_names


def takes_first_padding(model: Any) -> bool:
    """Whether it takes the token before the first padding token (up to 4.50), and not the last that is none."""
    code = inspect.unwrap(type(model).forward).__code__
    return looks_for_padding(model) and "eq" in code.co_names


def reads_whole_row(model: Any) -> str | None:
    """What in the head reads padding although it is masked, or None."""
    for child in model.children():
        kind = getattr(child, "summary_type", "first")
        if kind != "first":
            return f"summary_type={kind!r}"
    if "attention_mask" not in inspect.signature(type(model).forward).parameters:
        return "its forward, which takes no attention_mask,"
    if {"p_mask", "question_positions"} & set(inspect.signature(type(model).forward).parameters):  # Splinter's has them
        return "its search for spans"
    return None
