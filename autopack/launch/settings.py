"""Settings of ``autopack run``, as options and as environment variables, and the variables that
carry them.

Read in every process that the command reaches, so nothing here imports torch or transformers.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from autopack.options import Options, option, options_of

RUN = "AUTOPACK_RUN"
"""Set to 1 in every process that autopack is to start in."""
STARTED = "AUTOPACK_STARTED"
"""The id of the process that `autopack run` turned into the script; that process removes the
variable."""
REPORTS = "AUTOPACK_REPORTS"
"""The id of the process that reports on all models, and the directory where the others write their
outcomes: `ID:DIRECTORY`."""
DIRECTORY = os.path.join(os.path.dirname(os.path.abspath(__file__)), "inject")
"""The entry of PYTHONPATH that starts autopack."""


@dataclass(frozen=True)
class RunSettings(Options):
    """Options of `autopack run`, from the command line or from the environment."""

    strict: bool = option(
        False,
        "fail at models that cannot be enabled and calls that are refused; without it, they run as "
        "they are",
    )
    quiet: bool = option(
        False, "print nothing at exit; a model that cannot be enabled is still named"
    )
    max_tokens: int | str | None = option(
        None,
        "cut a Trainer's optimizer steps into micro-batches of at most N real tokens; auto finds N",
        ("auto",),
        "N",
    )
    subprocesses: bool = option(True, "enable models in processes that the script starts too")

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> RunSettings:
        """Return the settings that environment variables give. Raises `BadSetting`."""
        return cls(**{each.name: each.read(environment) for each in OPTIONS})


OPTIONS = options_of(RunSettings)
FOR_ENABLE = tuple(each.name for each in options_of(Options))
"""The options that are passed on to `enable`."""


def without(path: str) -> str:
    """Return a PYTHONPATH without the directory that starts autopack."""
    return os.pathsep.join(entry for entry in path.split(os.pathsep) if entry != DIRECTORY)


def with_directory(path: str) -> str:
    """Return a PYTHONPATH that begins with the directory that starts autopack."""
    # A separator with nothing after it would put the current directory on the path.
    return os.pathsep.join(filter(None, (DIRECTORY, without(path))))
