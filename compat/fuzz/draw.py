"""Draw the cases of a seed: case k is made of the seed and k alone, whichever cases ran before it.

Cases of one build follow each other: they share model, configuration and documents, and differ in layout and form.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from random import Random
from typing import Any

from autopack import tiny
from autopack.attention import choose
from autopack.inspection.modules import is_pair
from compat.exactness import BACKENDS
from compat.fuzz.case import CHECKPOINTING, Arranged, Spec
from compat.fuzz.packing import COLLATOR
from compat.standins import supported_implementations
from compat.variants import Variant, variants

PER_BUILD = 24
"""Cases of one build."""
_WEIGHTS = {"causal-lm": 8, "masked-lm": 3, "seq2seq": 3, "sequence-classification": 2, "image-text-to-text": 2}
"""How often a task is drawn; the others once."""
_DOCUMENTS = 6
_LONGEST = 14
"""Fewer tokens than the least number of positions that a variant sets, whatever position is the first."""
OF_ROWS = ("sequence-classification", "question-answering", "next-sentence-prediction", "seq2seq")
"""Tasks in which padding that is not masked would be documents with results, or with a half, of their own."""
_REACHES = ("window", "chunk", "sliding", "floor")


def spec_of(seed: int, build: int, types: frozenset[str] = frozenset()) -> Spec | None:
    """The model of one build; None where its type is not among those that are wanted.

    Raises `tiny.CannotBuild` where stock has no such model with its tiny configuration.
    """
    rng = Random(f"{seed}/{build}")
    tasks = sorted(tiny.TASKS.keys() - {"multiple-choice"})  # whose rows are choices, and packed rows refused
    task = rng.choices(tasks, [_WEIGHTS.get(name, 1) for name in tasks])[0]
    model_type = rng.choice(tiny.types_for(task))
    if types and model_type not in types:
        return None
    about = _about(model_type, task)
    implementation = rng.choice(sorted(about.backends))
    dtype = rng.choices(("float64", "float32", "bfloat16"), (8, 2, 1))[0]
    if dtype == "bfloat16" and about.discrete:
        dtype = "float32"
    changes = _changes(rng, about.variants)
    lengths = tuple(_length(rng) for _ in range(_DOCUMENTS))
    backend = rng.choice(about.backends[implementation]) if rng.random() < 0.25 else "auto"
    return Spec(
        model_type,
        task,
        implementation,
        dtype,
        backend,
        unpad=rng.choices((True, False), (11, 1))[0],
        experts=rng.choice(("", "eager", "batched_mm", "grouped_mm")) if about.experts and dtype == "float32" else "",
        changes=changes,
        lengths=lengths,
        seed=rng.randrange(1000),
        outputs=rng.random() < 0.3,
        ignored=rng.random() < 0.3,
    )


def call_of(seed: int, build: int, number: int, spec: Spec) -> Arranged:
    """One call of the model of a build."""
    rng = Random(f"{seed}/{build}/{number}")
    pair = _about(spec.model_type, spec.task).pair
    form = rng.choices(("positions", "cu_seqlens", "seq_idx", "segments", "collator", "mask"), (5, 2, 1, 2, 2, 4))[0]
    if pair and form in ("cu_seqlens", "seq_idx", "collator"):
        form = "positions"
    rows = _padded_rows(rng, spec) if form == "mask" else _rows(rng, spec, one=form == "collator")
    training = rng.random() < 0.5
    return Arranged(
        rows,
        form,
        mask=form in ("positions", "cu_seqlens", "seq_idx") and (rng.random() < 0.4 or pair or spec.task in OF_ROWS),
        positional=rng.randint(1, 4) if rng.random() < 0.15 and not pair else 0,
        labels=rng.random() < 0.5,
        use_cache=rng.choices((None, False, True), (40, 20, 1))[0],
        training=training,
        checkpointing=rng.choice(CHECKPOINTING) if training else "",
        gradients=rng.random() < 0.4,
        offset=rng.randint(1, 4) if form == "positions" and not pair and rng.random() < 0.05 else 0,
        collator=tuple(name for name in COLLATOR if form == "collator" and rng.random() < 0.5),
    )


@dataclass(frozen=True)
class _About:
    """What a type has for a task."""

    variants: list[Variant]
    backends: dict[str, list[str]]
    """Those of autopack, by the implementations that its class declares, in the names of `compat.exactness`."""
    pair: bool
    experts: bool
    """Whether it has experts whose kernels can be chosen."""
    discrete: bool
    """Whether rounding may send tokens elsewhere, packed or not: to other experts, or to other keys."""


@cache
def _about(model_type: str, task: str) -> _About:
    model = tiny.build(model_type, task=task, attn_implementation="eager")
    found = [v for v in variants(model, tiny.config(model_type, task=task)) if _is_json(v.overrides())]
    declared = {name.removesuffix("_attention") for name in supported_implementations(model)} | {"eager"}
    backends = {name: [name] for name in BACKENDS if name in declared}
    for name in {"eager", "sdpa"} & declared:
        possible = choose.candidates(name)
        backends[name] = [backend for backend in possible if choose.BACKENDS[backend].devices is None]
    parts = [model.config, *(part for part in vars(model.config).values() if hasattr(part, "to_diff_dict"))]
    discrete = any("expert" in name or name == "index_topk" for part in parts for name in vars(part))
    return _About(found, backends, is_pair(model), _has_experts(model), discrete)


def _has_experts(model: Any) -> bool:
    return any("experts" in type(module).__name__.lower() for module in model.modules()) and hasattr(
        model, "set_experts_implementation"
    )


def _changes(rng: Random, known: list[Variant]) -> tuple[tuple[str, dict[str, Any]], ...]:
    """Up to four changes of different fields, each of a random one of its values."""
    fields: dict[tuple[str, ...], list[Variant]] = {}
    for variant in known:
        fields.setdefault((*variant.path, variant.field), []).append(variant)
    wanted = rng.choices(range(5), (2, 3, 3, 2, 1))[0]
    taken: set[tuple[str, ...]] = set()
    found = []
    for place in rng.sample(sorted(fields), min(wanted, len(fields))):
        variant = _varied(rng, rng.choice(fields[place]))
        touched = {(*variant.path, name) for name in (variant.field, *dict(variant.also))}
        if not touched & taken:
            taken |= touched
            found.append((variant.name, json.loads(json.dumps(variant.overrides()))))
    return tuple(found)


def _varied(rng: Random, variant: Variant) -> Variant:
    """Another number of tokens where a variant says how far something reaches, other layers where it lists layers."""
    value = variant.value
    if type(value) is int and value > 1 and any(word in variant.field for word in _REACHES):
        return replace(variant, value=rng.randint(1, 12))
    if isinstance(value, list) and len(variant.also) == 1 and variant.also[0][1] == len(value) and len({*value}) > 1:
        kinds = [rng.choice(value) for _ in range(rng.randint(2, 4))]
        return replace(variant, value=kinds, also=((variant.also[0][0], len(kinds)),))
    return variant


def _is_json(overrides: dict[str, Any]) -> bool:
    try:
        return bool(json.loads(json.dumps(overrides)) == overrides)
    except TypeError:
        return False


def _length(rng: Random) -> int:
    return rng.choice((1, rng.randint(1, 3), rng.randint(2, 8), rng.randint(5, _LONGEST), rng.randint(8, _LONGEST)))


def _rows(rng: Random, spec: Spec, one: bool) -> tuple[tuple[int, ...], ...]:
    """One row or several, of one document or several, with padding between, before and behind them now and then."""
    padded = not one and rng.random() < 0.35
    rows = []
    for _ in range(1 if one else rng.choices((1, 2, 3), (6, 3, 1))[0]):
        row: list[int] = []
        for _ in range(rng.choices((1, 2, 3, 4, 5), (1, 4, 4, 2, 1))[0]):
            if padded and rng.random() < 0.25:
                row.append(-rng.randint(1, 4))
            row.append(rng.randrange(_DOCUMENTS))
        if padded and rng.random() < 0.5:
            row.append(-rng.randint(1, 4))
        rows.append(row)
    return filled(rows, spec.lengths)


def _padded_rows(rng: Random, spec: Spec) -> tuple[tuple[int, ...], ...]:
    left, wider = rng.random() < 0.4, rng.choice((0, 0, 1, 3))
    picks = [rng.randrange(_DOCUMENTS) for _ in range(rng.randint(1, 4))]
    columns = max(spec.lengths[number] for number in picks) + wider
    spare = [columns - spec.lengths[number] for number in picks]
    rows = [[n] if not k else [-k, n] if left else [n, -k] for n, k in zip(picks, spare, strict=True)]
    return filled(rows, spec.lengths)


def filled(rows: Iterable[Iterable[int]], lengths: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Rows of equal width: padding behind those that are shorter."""
    found = [list(row) for row in rows]
    widths = [width(row, lengths) for row in found]
    for row, columns in zip(found, widths, strict=True):
        spare = max(widths) - columns
        if spare and row[-1] < 0:
            row[-1] -= spare
        elif spare:
            row.append(-spare)
    return tuple(map(tuple, found))


def width(row: Iterable[int], lengths: tuple[int, ...]) -> int:
    """Columns of a row."""
    return sum(lengths[number] if number >= 0 else -number for number in row)
