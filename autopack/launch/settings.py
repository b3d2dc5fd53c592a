"""What ``autopack run`` can be told, as options and as environment variables, and the variables that carry it.

Read in every process that the command reaches, so nothing here imports torch or transformers.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from autopack.errors import AutopackError
from autopack.options import CHOICES, INSTEAD, Options

RUN = "AUTOPACK_RUN"
"""Set to 1 in every process that autopack is to start in."""
STARTED = "AUTOPACK_STARTED"
"""The id of the process that `autopack run` turned into the script; that process takes the variable away."""
REPORTS = "AUTOPACK_REPORTS"
"""The process that says what became of all models, and the directory where others leave it to that: `ID:DIRECTORY`."""
DIRECTORY = os.path.join(os.path.dirname(os.path.abspath(__file__)), "inject")
"""The entry of PYTHONPATH that starts autopack."""

_SWITCH = (True, False)
_WORDS: dict[Any, tuple[str, ...]] = {True: ("yes", "1", "true", "on"), False: ("no", "0", "false", "off")}


class BadSetting(AutopackError):
    """An environment variable holds what its option would not take."""

    code = "bad-option"


class Option(NamedTuple):
    """An option of `autopack run` and its variable: one of some words, a whole number, or a switch."""

    name: str
    default: Any
    help: str
    metavar: str | None = None
    """What stands for the number in the help, for an option that takes one."""

    @property
    def values(self) -> tuple[Any, ...]:
        """The values that it takes; none for a number."""
        return () if self.metavar else CHOICES.get(self.name, _SWITCH)

    @property
    def choices(self) -> tuple[str, ...]:
        """The words that the command line takes; none for a number and for a switch."""
        return () if self.values == _SWITCH else tuple(_WORDS.get(value, (value,))[0] for value in self.values)

    @property
    def words(self) -> dict[str, Any]:
        """The values by the words that stand for them in the environment."""
        return {word: value for value in self.values for word in _WORDS.get(value, (value,))}

    @property
    def flag(self) -> str:
        """Name of the option on the command line."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def variable(self) -> str:
        """Name of the environment variable."""
        return f"AUTOPACK_{self.name.upper()}"

    def read(self, environment: Mapping[str, str]) -> Any:
        """The value in the environment; the default where the variable is unset or empty."""
        text = environment.get(self.variable, "").strip()
        if self.metavar is not None:
            if text and not text.isdecimal():
                raise BadSetting(f"{self.variable} must be a whole number of at least 0; found {text!r}")
            return int(text) if text else self.default
        if not text:
            return self.default
        if text.lower() not in self.words:
            instead = INSTEAD.get((self.name, text.lower()))
            hint = "" if instead is None else f" (in Python {instead})"
            raise BadSetting(f"{self.variable} must be one of {', '.join(self.words)}; found {text!r}{hint}")
        return self.words[text.lower()]

    def write(self, value: Any) -> str:
        """The text that stands for a value in the environment."""
        return value if isinstance(value, str) else str(int(value))


def _told(default: Any, about: str, metavar: str | None = None) -> Any:
    return field(default=default, metadata={"help": about, "metavar": metavar})


@dataclass(frozen=True)
class Settings:
    """How models are enabled under `autopack run`: the command line and the reading of the environment follow it."""

    backend: str = _told("auto", "what computes attention on packed rows")
    unpad: bool = _told(True, "run padded batches as packed rows inside, where that gives the same")
    share: bool = _told(True, "compute once what rows of a batch begin with, where that is worth it")
    verify: bool | str = _told(True, "prove a model when it is enabled; strict leaves one as it is that no twin proves")
    check_every: int | None = _told(
        None, "check a document of every Nth training call; 0 checks no call, of third-party code neither", "N"
    )
    strict: bool = _told(
        False, "fail at models that cannot be enabled and calls that are refused; without it, they run as they are"
    )
    quiet: bool = _told(False, "print nothing at exit; a model that cannot be enabled is still named")
    subprocesses: bool = _told(True, "enable models in processes that the script starts too")

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> Settings:
        """The settings of an environment; raises `BadSetting`."""
        return cls(**{option.name: option.read(environment) for option in OPTIONS})


OPTIONS = tuple(Option(each.name, each.default, **each.metadata) for each in fields(Settings))
FOR_ENABLE = tuple(each.name for each in fields(Options) if each.name in Settings.__dataclass_fields__)
"""The options that are passed on to `enable`."""


def without(path: str) -> str:
    """A PYTHONPATH as it was before `with_directory`."""
    return os.pathsep.join(entry for entry in path.split(os.pathsep) if entry != DIRECTORY)


def with_directory(path: str) -> str:
    """A PYTHONPATH that starts autopack in every process that has it."""
    # A separator with nothing after it would put the current directory on the path.
    return os.pathsep.join(filter(None, (DIRECTORY, without(path))))
