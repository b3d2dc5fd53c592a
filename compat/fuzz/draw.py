"""What hypothesis draws: a model, and calls of it. The plainest of each choice stands first: it
shrinks to that."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from hypothesis import assume
from hypothesis import strategies as st

from autopack import tiny
from autopack.attention import choose
from autopack.inspection.modules import is_pair
from autopack.layout import LEAST_SHARED
from compat.exactness import BACKENDS
from compat.fuzz.case import CHECKPOINTING, FORMS, Arranged, Spec, width
from compat.fuzz.packing import COLLATOR
from compat.standins import supported_implementations
from compat.variants import Variant, variants

_WEIGHTS = {
    "causal-lm": 8,
    "masked-lm": 3,
    "seq2seq": 3,
    "sequence-classification": 2,
    "image-text-to-text": 2,
}
"""How often a task is drawn; the others once."""
_DOCUMENTS = 6
_LONGEST = 14
"""Fewer tokens than the least number of positions that a variant sets, whatever position is the
first."""
_ALIKE = LEAST_SHARED + 2
"""Tokens of a beginning that is computed once."""
OF_ROWS = ("sequence-classification", "question-answering", "next-sentence-prediction", "seq2seq")
"""Tasks in which padding that is not masked would be documents with results, or with a half, of
their own."""
_REACHES = ("window", "chunk", "sliding", "floor")


def _often(**weights: int) -> st.SearchStrategy[str]:
    """A word, by how often it is drawn."""
    return st.sampled_from([name for name, weight in weights.items() for _ in range(weight)])


def _rarely(one_in: int) -> st.SearchStrategy[bool]:
    return st.sampled_from([False] * (one_in - 1) + [True])


@st.composite
def specs(draw: Any, types: frozenset[str] = frozenset()) -> Spec:
    """A model, of one of these types where any are given.

    Raises `tiny.CannotBuild` where stock has no such model with its tiny configuration.
    """
    known = {
        task: [name for name in tiny.types_for(task) if not types or name in types]
        for task in tiny.TASKS
    }
    # Rows of multiple choice are choices, and packed rows refused.
    tasks = {
        task: _WEIGHTS.get(task, 1)
        for task, names in known.items()
        if names and task != "multiple-choice"
    }
    task = draw(_often(**dict(sorted(tasks.items(), key=lambda each: -each[1]))))
    model_type = draw(st.sampled_from(known[task]))
    about = _about(model_type, task)
    implementation = draw(st.sampled_from([*about.backends]))
    dtype = draw(_often(float64=8, float32=2, **({} if about.discrete else {"bfloat16": 1})))
    kernels, alike = ("", "eager", "batched_mm", "grouped_mm"), _ALIKE * draw(_rarely(6))
    lengths = draw(st.lists(_lengths, min_size=_DOCUMENTS, max_size=_DOCUMENTS))
    return Spec(
        model_type,
        task,
        implementation,
        dtype,
        draw(st.sampled_from(["auto"] * 3 + about.backends[implementation])),
        unpad=not draw(_rarely(12)),
        checked=draw(_rarely(6)),
        experts=draw(st.sampled_from(kernels)) if about.experts and dtype == "float32" else "",
        changes=_changes(draw, about.variants),
        lengths=tuple(2 * alike + length for length in lengths),
        seed=draw(st.integers(0, 999)),
        alike=alike,
        outputs=draw(_rarely(3)),
        ignored=draw(_rarely(3)),
    )


_lengths = st.one_of(st.integers(1, 3), st.integers(1, _LONGEST))


@st.composite
def calls(draw: Any, spec: Spec) -> Arranged:
    """One call of a model."""
    pair = _about(spec.model_type, spec.task).pair
    form = draw(_often(positions=5, cu_seqlens=2, seq_idx=1, segments=2, collator=2, mask=4))
    assert form in FORMS
    if pair and form in ("cu_seqlens", "seq_idx", "collator"):
        form = "positions"
    rows = _padded_rows(draw, spec) if form == "mask" else _rows(draw, spec, one=form == "collator")
    training = draw(st.booleans())
    masked = draw(_rarely(3)) or pair or spec.task in OF_ROWS
    return Arranged(
        rows,
        form,
        mask=form in ("positions", "cu_seqlens", "seq_idx") and masked,
        positional=draw(st.integers(1, 4)) if not pair and draw(_rarely(7)) else 0,
        labels=draw(st.booleans()),
        use_cache=draw(st.sampled_from([None] * 6 + [False] * 3 + [True])),
        training=training,
        checkpointing=draw(st.sampled_from(CHECKPOINTING)) if training else "",
        gradients=draw(st.booleans()),
        offset=draw(st.integers(1, 4))
        if form == "positions" and not pair and draw(_rarely(20))
        else 0,
        collator=tuple(name for name in COLLATOR if form == "collator" and draw(st.booleans())),
    )


@dataclass(frozen=True)
class _About:
    """What a type has for a task."""

    variants: list[Variant]
    backends: dict[str, list[str]]
    """Those of autopack, by the implementations that its class declares, in the names of
    `compat.exactness`."""
    pair: bool
    experts: bool
    """Whether it has experts whose kernels can be chosen."""
    discrete: bool
    """Whether rounding may send tokens elsewhere, packed or not: to other experts, or to other
    keys."""


@cache
def _about(model_type: str, task: str) -> _About:
    model = tiny.build(model_type, task=task, attn_implementation="eager")
    found = [
        v for v in variants(model, tiny.config(model_type, task=task)) if _is_json(v.overrides())
    ]
    declared = {name.removesuffix("_attention") for name in supported_implementations(model)}
    backends = {name: [name] for name in BACKENDS if name in declared}
    for name in {"eager", "sdpa"} & declared:
        possible = choose.candidates(name)
        backends[name] = [
            backend for backend in possible if choose.BACKENDS[backend].devices is None
        ]
    parts = [
        model.config,
        *(part for part in vars(model.config).values() if hasattr(part, "to_diff_dict")),
    ]
    discrete = any(
        "expert" in name or name == "index_topk" for part in parts for name in vars(part)
    )
    experts = any("experts" in type(module).__name__.lower() for module in model.modules())
    return _About(
        found,
        backends,
        is_pair(model),
        experts and hasattr(model, "set_experts_implementation"),
        discrete,
    )


def _changes(draw: Any, known: list[Variant]) -> tuple[tuple[str, dict[str, Any]], ...]:
    """Up to four changes of different fields."""
    if not known:
        return ()
    wanted = draw(
        st.lists(st.sampled_from(known), max_size=4, unique_by=lambda v: (*v.path, v.field))
    )
    taken: set[tuple[str, ...]] = set()
    found = []
    for variant in (_varied(draw, each) for each in wanted):
        touched = {(*variant.path, name) for name in (variant.field, *dict(variant.also))}
        if not touched & taken:
            taken |= touched
            found.append((variant.name, json.loads(json.dumps(variant.overrides()))))
    return tuple(found)


def _varied(draw: Any, variant: Variant) -> Variant:
    """Another number of tokens where a variant says how far something reaches, other layers where
    it lists layers."""
    value = variant.value
    if type(value) is int and value > 1 and any(word in variant.field for word in _REACHES):
        return replace(variant, value=draw(st.integers(1, 12)))
    if (
        isinstance(value, list)
        and len(variant.also) == 1
        and variant.also[0][1] == len(value)
        and len({*value}) > 1
    ):
        kinds = draw(st.lists(st.sampled_from(value), min_size=2, max_size=4))
        return replace(variant, value=kinds, also=((variant.also[0][0], len(kinds)),))
    return variant


def _is_json(overrides: dict[str, Any]) -> bool:
    try:
        return bool(json.loads(json.dumps(overrides)) == overrides)
    except TypeError:
        return False


def _rows(draw: Any, spec: Spec, one: bool) -> tuple[tuple[int, ...], ...]:
    """One row or several, of one document or several, with padding between, before and behind them
    now and then."""
    padded, numbers = not one and draw(_rarely(3)), st.integers(0, len(spec.lengths) - 1)
    entries = st.one_of(numbers, numbers, st.integers(-4, -1)) if padded else numbers
    row = st.lists(entries, min_size=1, max_size=5)
    rows = draw(st.lists(row, min_size=1, max_size=1 if one else 3))
    assume(all(any(entry >= 0 for entry in row) for row in rows))
    return filled(rows, spec.lengths)


def _padded_rows(draw: Any, spec: Spec) -> tuple[tuple[int, ...], ...]:
    left, wider = draw(_rarely(2)), draw(st.sampled_from((0, 0, 1, 3)))
    picks = draw(st.lists(st.integers(0, len(spec.lengths) - 1), min_size=1, max_size=4))
    columns = max(spec.lengths[number] for number in picks) + wider
    spare = [columns - spec.lengths[number] for number in picks]
    rows = [
        [n] if not k else [-k, n] if left else [n, -k] for n, k in zip(picks, spare, strict=True)
    ]
    return filled(rows, spec.lengths)


def filled(rows: Iterable[Iterable[int]], lengths: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Rows of equal width: padding behind those that are shorter."""
    found = [list(row) for row in rows]
    widths = [width(row, lengths) for row in found]
    return tuple(
        (*row, *([-spare] if (spare := max(widths) - own) else []))
        for row, own in zip(found, widths, strict=True)
    )
