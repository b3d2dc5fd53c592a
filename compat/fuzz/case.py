"""One case of the fuzz, as data: a model and the calls that it gets, the last of which is
judged."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

FORMS = ("positions", "cu_seqlens", "seq_idx", "segments", "collator", "mask")
"""What declares documents, the plainest first; `mask` is a padded batch, one document per row, with
nothing else."""
CHECKPOINTING = ("", "non-reentrant", "reentrant")


@dataclass(frozen=True)
class Spec:
    """A model: its type and task, what differs from its tiny configuration, and the documents that
    it is given."""

    model_type: str
    task: str = "causal-lm"
    implementation: str = "eager"
    dtype: str = "float64"
    backend: str = "auto"
    unpad: bool = True
    checked: bool = False
    """Whether every call is checked: an alarm is a crash, as all documents are compared here."""
    experts: str = ""
    """How experts are computed; by the default of the dtype where empty."""
    changes: tuple[tuple[str, dict[str, Any]], ...] = ()
    """Changes of the configuration, each a name and overrides of `tiny.build`."""
    lengths: tuple[int, ...] = (5, 3)
    """Tokens of the documents, which are drawn by `seed`."""
    seed: int = 0
    alike: int = 0
    """With how many tokens all documents begin, and the first two once more: rows that begin alike
    are computed once."""
    outputs: bool = False
    """Whether hidden states, and router logits where there are some, are asked for and compared."""
    ignored: bool = False
    """Whether some labels inside documents are ignored."""

    def overrides(self) -> dict[str, Any]:
        """All changes as arguments of `tiny.build`."""
        found: dict[str, Any] = {}
        for _, overrides in self.changes:
            _merge(found, overrides)
        return found


@dataclass(frozen=True)
class Arranged:
    """One call: where the documents of a `Spec` stand, and in what form they are handed to the
    model.

    A row is a list of numbers of documents, with -n for n columns of padding.
    """

    rows: tuple[tuple[int, ...], ...] = ((0, 1),)
    form: str = "positions"
    mask: bool = False
    """Whether an `attention_mask` of 0 and 1 stands beside what declares the documents."""
    positional: int = 0
    """How many arguments are given by their place."""
    labels: bool = False
    use_cache: bool | None = None
    training: bool = False
    checkpointing: str = ""
    gradients: bool = False
    offset: int = 0
    """At which position after the first one the first document begins, where no padding stands
    before it."""
    collator: tuple[str, ...] = ()
    """Options of the collator that are switched on."""

    @property
    def picks(self) -> list[int]:
        """The documents, in the order of the rows."""
        return [number for row in self.rows for number in row if number >= 0]

    @property
    def each(self) -> list[tuple[int, int]]:
        """The documents, and at which position after the first one each begins."""
        begun = self.offset if self.rows[0][0] >= 0 else 0
        return [(number, 0 if place else begun) for place, number in enumerate(self.picks)]

    @property
    def packs(self) -> bool:
        """Whether a row holds several documents, as far as is declared; otherwise the call is an
        ordinary one."""
        padding = self.form not in ("segments", "mask", "collator") and not self.mask
        return any(sum(number >= 0 or padding for number in row) > 1 for row in self.rows)


@dataclass(frozen=True)
class Case:
    """A model, the calls that it has had before, and the one that is judged."""

    spec: Spec
    call: Arranged
    before: tuple[Arranged, ...] = ()

    def to_json(self) -> str:
        """The case in one line, from which `of_json` makes it again."""
        return json.dumps({key: _sparse(value) for key, value in vars(self).items() if value})


def width(row: Iterable[int], lengths: Sequence[int]) -> int:
    """Columns of a row."""
    return sum(lengths[number] if number >= 0 else -number for number in row)


def of_json(text: str) -> Case:
    """The case that a line of `Case.to_json` describes; raises `ValueError` where it describes
    none."""
    try:
        found = json.loads(text)
        calls = [Arranged(**_tuples(call)) for call in (*found.get("before", ()), found["call"])]
        return Case(Spec(**_tuples(found["spec"])), calls[-1], tuple(calls[:-1]))
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"wanted the JSON of a case, as a failure prints it; found {text[:80]!r} ({error})"
        ) from error


def _sparse(value: Any) -> Any:
    """A dataclass without the fields that have their default."""
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        return {f.name: given for f in fields if (given := getattr(value, f.name)) != f.default}
    return [_sparse(each) for each in value] if isinstance(value, tuple) else value


def _tuples(fields: dict[str, Any]) -> dict[str, Any]:
    """Lists of one level or two as tuples; what stands inside changes of the configuration stays as
    it is."""
    return {
        name: tuple(tuple(part) if isinstance(part, list) else part for part in value)
        if isinstance(value, list)
        else value
        for name, value in fields.items()
    }


def _merge(found: dict[str, Any], overrides: dict[str, Any]) -> None:
    for name, value in overrides.items():
        if isinstance(value, dict) and isinstance(found.get(name), dict):
            found[name] = {**found[name]}
            _merge(found[name], value)
        else:
            found[name] = value
