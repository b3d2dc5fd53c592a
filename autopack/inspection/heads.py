"""Heads that give one result per row of their batch, found by the names that transformers gives to their classes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from autopack.inspection import releases
from autopack.inspection.code_origin import located
from autopack.inspection.source import forward_codes, parameters_of

_CHOICES = (
    "a row of its batch is one of several choices of a question, (questions, choices, tokens), and nothing in a packed "
    "row says which documents are choices of one question"
)


@dataclass(frozen=True)
class RowHead:
    """What is known of a head with one result per row.

    `spans` says that the result is a start and an end among the row's tokens, `picks` that it is that of a token which
    the call names, beside those of all tokens. `labels` are the arguments with one value per row. `refusal` says why it
    cannot be run on packed rows, or is None.
    """

    name: str
    spans: bool = False
    picks: bool = False
    labels: tuple[str, ...] = ("labels", "next_sentence_label")
    refusal: str | None = None

    @property
    def of_choices(self) -> bool:
        """Whether the rows of its batch are choices of questions."""
        return self.refusal == _CHOICES


_SPANS = partial(RowHead, spans=True, labels=("start_positions", "end_positions"))
_HEADS: dict[tuple[str, ...], Callable[[str], RowHead]] = {
    ("ForMultipleChoice",): partial(RowHead, refusal=_CHOICES),
    ("DoubleHeadsModel",): partial(RowHead, refusal=_CHOICES, picks=True),
    ("ForQuestionAnswering", "ForQuestionAnsweringSimple"): _SPANS,
    ("ForSequenceClassification", "ForNextSentencePrediction", "RewardModel"): RowHead,
}


def row_head(model: Any) -> RowHead | None:
    """The head of a model if it gives one result per row, or None; classes derived from one of transformers count.

    What a class of transformers is, a class derived from it is too, whatever it is called. A name counts only where
    somebody has written such a head anew.
    """
    classes = [cls for cls in type(model).__mro__ if "forward" in vars(cls) and hasattr(cls, "config_class")]
    known = [cls for cls in type(model).__mro__ if located(cls)]
    own = any(located(cls) for cls in classes)
    names = [cls.__name__ for cls in (known if own else type(model).__mro__)]
    found = (head for name in names for ends, head in _HEADS.items() if name.endswith(ends))
    return next((head(type(model).__name__) for head in found), None)


def is_head_of_pair(model: Any) -> bool:
    """Whether an encoder-decoder has a head with a result of another kind than its decoder's tokens."""
    names = set(parameters_of(type(model)).names)
    of_tokens = any(cls.__name__ in releases.seq2seq_class_names() for cls in type(model).__mro__)
    return "decoder_input_ids" in names and bool({"labels", "start_positions"} & names) and not of_tokens


def looks_for_padding(model: Any) -> bool:
    """Whether the head finds the last token of a row by the padding token, as those of decoders do."""
    return "pad_token_id" in _names(model)


def end_token(model: Any) -> int | None:
    """The token that has to be in every row because the head's result is read off it, or None."""
    token = getattr(model.config, "eos_token_id", None)
    return token if row_head(model) is not None and "eos_token_id" in _names(model) and isinstance(token, int) else None


def takes_first_padding(model: Any) -> bool:
    """Whether it takes the token before the first padding token (up to 4.50), and not the last that is none."""
    return {"pad_token_id", "eq"} <= _names(model)


def _names(model: Any) -> set[str]:
    """The names that a head's forward reads, and those that it hands its arguments on to."""
    return {name for code in forward_codes(type(model)) for name in code.co_names}


def reads_whole_row(model: Any) -> str | None:
    """What in the head reads padding although it is masked, or None."""
    names = set(parameters_of(type(model)).names)
    for child in model.children():
        kind = getattr(child, "summary_type", "first")
        if kind != "first":
            return f"summary_type={kind!r} reads where the row ends"
    if "attention_mask" not in names:
        return "its forward takes no attention_mask"
    # Splinter's has them.
    return "its search for spans goes over the row" if {"p_mask", "question_positions"} & names else None
