"""A cell as one word of a record: its status, and the numbers of its reasons.

exact                        every document gets what it gets alone
exact padded=1a2b            exact, and padded batches are left as they came, for the reason of that number
exact labels=3c4d            exact, and packed calls with labels are refused
exact twin=9c0d              exact, and nothing but checks of calls says so: it has no twin (kernels' stand-ins)
exact rounding=7a8b          exact in float64 or with other weights alone; the auditor has measured that by itself since 0.3
refused 5e6f                 refused, for the reason of that number
-                            absent: the release has no such type, or the type no such implementation
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any

REMARKS = "padded labels rounding twin".split()
"""What of an exact cell may be left out, and that it had to be measured in float64, each with a
reason of its own."""
ABSENT = "-"
_WORD = re.compile(
    r"(?P<status>[A-Za-z ]+?)( (?P<reason>[0-9a-f]{4}))?(?P<remarks>( "
    r"\w+=[0-9a-f]{4})*)"
)

Cell = dict[str, Any]


def word_of(cell: Mapping[str, Any], reasons: dict[str, str]) -> str:
    """The word of a cell; its reasons are added to `reasons`, each under a number."""

    def number(reason: str) -> str:
        found = hashlib.sha256(reason.encode()).hexdigest()[:4]
        reasons[found] = reason
        return found

    if cell["status"] == "absent":
        return ABSENT
    word = cell["status"] + (f" {number(cell['reason'])}" if "reason" in cell else "")
    return word + "".join(f" {name}={number(cell[name])}" for name in REMARKS if name in cell)


def cell_of(word: str, reasons: Mapping[str, str]) -> Cell:
    """The cell that a word says, but for its worst error."""
    if word == ABSENT:
        return {"status": "absent"}
    found = _parsed(word)
    cell: Cell = {"status": found["status"]}
    if found["reason"]:
        cell["reason"] = reasons[found["reason"]]
    for remark in found["remarks"].split():
        name, _, number = remark.partition("=")
        cell[name] = reasons[number]
    return cell


def status_of(word: str) -> str:
    """The status that a word says."""
    return "absent" if word == ABSENT else _parsed(word)["status"]


def _parsed(word: str) -> re.Match[str]:
    found = _WORD.fullmatch(word)
    if found is None:
        raise ValueError(f"{word!r} is no word of a record")
    return found
