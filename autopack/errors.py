"""Errors of autopack. Every message names what was wanted, what was found and the way out."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

__all__ = [
    "AutopackError",
    "InvalidPacking",
    "LeakDetected",
    "OutsideForward",
    "SiteDrift",
    "UnsupportedModel",
    "UnsupportedVersion",
]

_GUIDE = "https://github.com/autopack/autopack/blob/main/docs/errors.md"
_CODE = re.compile(r" \[([a-z]+(?:-[a-z]+)*)\]$", re.MULTILINE)


def did_you_mean(name: str, known: Collection[str]) -> str:
    """Return "; did you mean ...?" with the known names close to a name, "" without any."""
    close = difflib.get_close_matches(name.lower(), known, cutoff=0.7)
    return f"; did you mean {' or '.join(close)}?" if close else ""


class AutopackError(Exception):
    """Base of every error that autopack raises on purpose.

    `code` names what is wrong and stays the same from release to release; `message` says it of this
    case. `str(error)` is the message with its code. `guide` is the address of what the
    documentation says about the code; a traceback shows it below the message (Python 3.11 and
    later).
    """

    code: str = ""
    """Of a class whose errors all mean the same; each of the others is given its own."""

    message: str

    def __init__(self, message: Any, *, code: str = "") -> None:
        super().__init__(message)
        # Workers of a DataLoader hand on the text alone, which has the code in it.
        self.code = code or self.code or next(iter(_CODE.findall(str(message))[-1:]), "")
        if not self.code:
            raise TypeError(f"{type(self).__name__}: wanted a code, found none. Pass code=...")
        self.message = str(message)
        if hasattr(self, "add_note"):
            self.add_note(f"What this means, and what to do: {self.guide}")

    @property
    def guide(self) -> str:
        """Address of the documentation of errors with this code."""
        return f"{_GUIDE}#{self.code}"

    def __str__(self) -> str:
        return f"{self.message} [{self.code}]"

    def __reduce__(self) -> tuple[Any, ...]:
        # The constructor is passed by: it wants a code, others have arguments of their own.
        return type(self).__new__, (type(self), *self.args), vars(self)


class UnsupportedModel(AutopackError):
    """Error for a model, call or option that cannot be served exactly; nothing was changed."""


class UnsupportedVersion(AutopackError, ImportError):
    """Error for an installed package that is too old for autopack or for transformers."""

    code = "version-too-old"


class InvalidPacking(AutopackError, ValueError):
    """Error for a call or batch whose declarations of documents are wrong or disagree."""


class SiteDrift(AutopackError):
    """Error for a site whose function is missing, does not fit, or was replaced by other code."""


class OutsideForward(AutopackError, RuntimeError):
    """Error for a module that runs outside a call of its enabled model, so without documents."""


@dataclass(frozen=True)
class Leak:
    """Report of a check: a document of a call got other results than it gets alone.

    `document` is its number in the call, `row` and `columns` (first, end) say where it lies in the
    batch (the decoder's batch of an encoder-decoder). `field` is the part of the output that
    differs the most, `error` its difference relative to the field's standard deviation (of a loss:
    as it is, relative where it is above 1; of a gradient: relative to the largest), `tolerance`
    what counts as rounding, and `step` the number of the call among those that were counted. `than`
    says in words what it was compared with, `module` in which module of the model that begins, if
    that is known.
    """

    model: str
    document: int
    row: int
    columns: tuple[int, int]
    field: str
    error: float
    tolerance: float
    step: int
    than: str = "than it gets alone"
    module: str = ""

    def __str__(self) -> str:
        first, end = self.columns
        begins = f" It begins in {self.module}." if self.module else ""
        return (
            f"document {self.document} (row {self.row}, columns {first} to {end - 1}) of call "
            f"{self.step} of {self.model} got other {self.field} {self.than}: relative error "
            f"{self.error:.1e}, wanted at most {self.tolerance:.1e}.{begins}"
        )


class LeakDetected(AutopackError):
    """Error for a call with a document that got other results than alone; see `report`."""

    code = "leak-detected"

    def __init__(self, report: Leak):
        super().__init__(
            f"{report} What was trained on since the last check that found nothing may have "
            "leaked. Train on padded batches after autopack.disable(model); autopack.audit(model) "
            "shows which forms of calls leak, unless that takes the size or values of this call."
        )
        self.report = report


def in_a_line(error: BaseException) -> str:
    """Return an error's text on one line, with its class name in front unless it is autopack's."""
    kind = "" if isinstance(error, AutopackError) else f"{type(error).__name__}: "
    return " ".join(f"{kind}{error}".split())
