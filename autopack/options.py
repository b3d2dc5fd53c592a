"""The options of `enable` and their values, for Python, the command line and the environment alike.

Imports neither torch nor transformers, so that a command can offer the options at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from autopack.errors import AutopackError

_SWITCH = (True, False)
_WORDS: dict[Any, tuple[str, ...]] = {
    True: ("yes", "1", "true", "on"),
    False: ("no", "0", "false", "off"),
}

TASKS = {
    "causal-lm": "MODEL_FOR_CAUSAL_LM_MAPPING",
    "masked-lm": "MODEL_FOR_MASKED_LM_MAPPING",
    "sequence-classification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "token-classification": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING",
    "question-answering": "MODEL_FOR_QUESTION_ANSWERING_MAPPING",
    "next-sentence-prediction": "MODEL_FOR_NEXT_SENTENCE_PREDICTION_MAPPING",
    "multiple-choice": "MODEL_FOR_MULTIPLE_CHOICE_MAPPING",
    "image-text-to-text": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
    "multimodal-lm": "MODEL_FOR_MULTIMODAL_LM_MAPPING",
}
"""Tasks of models, with transformers' mapping of the types that have a class for each."""


class BadSetting(AutopackError):
    """Error for an environment variable with a value that its option does not take."""

    code = "bad-option"


def option(
    default: Any, about: str, values: tuple[Any, ...] = _SWITCH, metavar: str | None = None
) -> Any:
    """Return a dataclass field with an option's help, allowed values, and metavar of a number."""
    return field(default=default, metadata={"help": about, "values": values, "metavar": metavar})


@dataclass(frozen=True)
class Options:
    """Options of `autopack.enable`."""

    backend: str = option(
        "auto",
        "what computes attention on packed rows",
        ("auto", "eager", "flash", "flex", "sdpa", "varlen"),
    )
    unpad: bool = option(
        True, "run padded batches as packed rows inside, where that gives the same"
    )
    share: bool = option(
        True, "compute once what rows of a batch begin with, where that is worth it"
    )
    verify: bool | Literal["strict"] = option(
        True,
        "prove a model when it is enabled; strict leaves one as it is that no twin proves",
        (*_SWITCH, "strict"),
    )
    check_every: int | None = option(
        None,
        "check a document of every Nth training call; 0 checks no call, of third-party code "
        "neither",
        (),
        "N",
    )
    sequence_parallel: Any = None

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            value = getattr(self, name)
            # 1 equals True, and a list has no hash.
            if not any(type(value) is type(choice) and value == choice for choice in choices):
                wanted = ", ".join(map(repr, choices[:-1])) + f" or {choices[-1]!r}"
                raise ValueError(f"{name} must be {wanted}; found {value!r}")
        every = self.check_every
        if every is not None and (type(every) is not int or every < 0):
            raise ValueError(
                "check_every must be None or a number of training calls, 0 for no checks; found "
                f"{every!r}"
            )


@dataclass(frozen=True)
class Option:
    """Option of the command line and environment; its value is a word, a switch or an int."""

    name: str
    default: Any
    help: str
    values: tuple[Any, ...]
    metavar: str | None

    @property
    def choices(self) -> tuple[str, ...]:
        """Words that the flag takes; () for an option that is a number or a switch."""
        if self.values == _SWITCH or self.metavar is not None:
            return ()
        return tuple(_WORDS.get(value, (value,))[0] for value in self.values)

    @property
    def words(self) -> dict[str, Any]:
        """Values of the option by the words that its environment variable takes."""
        return {word: value for value in self.values for word in _WORDS.get(value, (value,))}

    @property
    def flag(self) -> str:
        """Flag of the option on the command line."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def variable(self) -> str:
        """Name of the option's environment variable."""
        return f"AUTOPACK_{self.name.upper()}"

    def number(self, text: str) -> Any:
        """Return the value for a text: a word's, or an int; raise `ValueError` otherwise."""
        if text in self.words:
            return self.words[text]
        if self.metavar is None or not text.isdecimal():
            raise ValueError(text)
        return int(text)

    def read(self, environment: Mapping[str, str]) -> Any:
        """Return the value in the environment, or the default if unset. Raises `BadSetting`."""
        text = environment.get(self.variable, "").strip()
        try:
            return self.number(text.lower()) if text else self.default
        except ValueError as error:
            wanted = [*self.words, *(["a whole number"] if self.metavar else [])]
            raise BadSetting(
                f"{self.variable} must be {' or '.join(wanted)}; found {text!r}"
            ) from error

    def write(self, value: Any) -> str:
        """Return a value as text for the option's environment variable."""
        return value if isinstance(value, str) else str(int(value))


def options_of(settings: type) -> tuple[Option, ...]:
    """Return the options of a dataclass, one for each field made by `option`."""
    return tuple(
        Option(each.name, each.default, **each.metadata)
        for each in fields(settings)
        if each.metadata
    )


CHOICES: dict[str, tuple[Any, ...]] = {
    each.name: each.values for each in options_of(Options) if each.values
}
"""The values that each option of `enable` takes, its default first."""
