"""The arguments of one call: tokens in their places, what declares the documents, labels."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import numpy as np
import torch

import autopack
from autopack.auditing.asking import Labels
from autopack.auditing.cases import Case, DrawnHalf, Input
from autopack.auditing.fields import Side, Sides
from autopack.layout import IGNORED_LABEL
from compat.fuzz.case import Arranged, width

COLLATOR: dict[str, Any] = {"flash": "cu_seq_lens", "seq_idx": "seq_idx", "multiple": 8}
"""What the collator declares beside positions, and the multiple of its rows, by the names that a
call has them by."""


def labels_of(labels: Labels, picks: list[int]) -> Labels:
    """The labels of the documents of a call."""
    alone = [labels.alone[number] for number in picks]
    return replace(labels, alone=alone, counts=[labels.counts[number] for number in picks])


def placed(pool: Case, arranged: Arranged) -> tuple[dict[str, Any], Input]:
    """All arguments of a call but its labels, and where its documents lie."""
    arguments: dict[str, Any] = {}
    sides: list[Side] = []
    first: list[int] = []
    for half in pool.halves:
        of_half, owner, first = _side(pool, half, arranged)
        arguments |= {f"{half.prefix}{name}": value for name, value in of_half.items()}
        sides.append(Side(owner, half.prefix))
    return arguments, Input({}, Sides(sides), first)


def _side(
    pool: Case, half: DrawnHalf, arranged: Arranged
) -> tuple[dict[str, Any], np.ndarray, list[int]]:
    """The arguments of one half, the document of each of its tokens, and the positions at which
    documents begin."""
    lengths = half.lengths
    shape = len(arranged.rows), max(width(row, lengths) for row in arranged.rows)
    ids, positions = torch.full(shape, pool.filler), torch.full(shape, pool.base)
    numbers, owner = torch.zeros(shape, dtype=torch.int32), np.full(shape, -1)
    first: list[int] = []
    bounds = [0]
    for row, entries in enumerate(arranged.rows):
        column = 0
        for place, number in enumerate(entries):
            end = column + width([number], lengths)
            if number >= 0:
                begin = pool.base + arranged.each[len(first)][1]
                here = row, slice(column, end)
                ids[here] = half.documents[number]
                positions[here] = torch.arange(begin, begin + end - column)
                numbers[here], owner[here] = place + 1, len(first)
                first.append(begin)
                bounds += [row * shape[1] + column, row * shape[1] + end]
            column = end
    real = torch.from_numpy(owner >= 0)
    # Padding that is not masked is documents of one token, which any model has positions for.
    starts = torch.cat(
        [real.flatten().logical_not().nonzero().flatten(), torch.tensor([*bounds, ids.numel()])]
    ).unique()
    numbers = torch.where(real, numbers, -torch.arange(shape[1], dtype=torch.int32))
    arguments: dict[str, Any] = {"input_ids": ids}
    if arranged.form == "positions":
        arguments["position_ids"] = positions
    elif arranged.form == "cu_seqlens":
        cumulative = starts.int()
        longest = int(starts.diff().max())
        arguments |= {"cu_seq_lens_q": cumulative, "cu_seq_lens_k": cumulative.clone()}
        arguments |= {"max_length_q": longest, "max_length_k": longest}
    elif arranged.form == "seq_idx":
        arguments["seq_idx"] = numbers
    elif arranged.form == "segments":
        arguments["attention_mask"] = torch.from_numpy(owner + 1)
    if arranged.form == "mask" or arranged.mask:
        arguments["attention_mask"] = real.long()
    return arguments, owner, first


def collated(
    model: Any, pool: Case, arranged: Arranged, labels: Labels | None
) -> tuple[dict[str, Any], Input]:
    """The same, labels included, by autopack's collator: one row of all documents."""
    declared = [COLLATOR[key] for key in arranged.collator if key != "multiple"]
    options: dict[str, Any] = {"declare": ("attention_mask", *declared)}
    if "multiple" in arranged.collator:
        options["pad_to_multiple_of"] = COLLATOR["multiple"]
    if labels is None:
        options["labels"] = "none"
    elif labels.per_token and not labels.shifts:
        options["labels"] = "unshifted"
    examples: list[dict[str, Any]] = []
    for place, number in enumerate(arranged.picks):
        example: dict[str, Any] = {"input_ids": pool.documents[number].tolist()}
        if labels is not None:
            example |= {name: value[0].tolist() for name, value in labels.alone[place].items()}
        examples.append(example)
    batch = dict(autopack.PackingCollator.for_model(model, **options)(examples))
    _, call = placed(pool, arranged)
    owner = call.sides.halves[0].owner
    padding = batch["input_ids"].shape[1] - owner.shape[1]
    return batch, Input(
        {}, Sides([Side(np.pad(owner, ((0, 0), (0, padding)), constant_values=-1))]), call.first
    )


def ignoring(labels: Labels, seed: int) -> Labels:
    """Labels of which about a third is ignored, of one per token in whole numbers; others as they
    are."""
    (name,) = labels.alone[0] if len(labels.alone[0]) == 1 else ("",)
    if (
        not labels.per_token
        or not name
        or labels.alone[0][name].is_floating_point()
        or labels.alone[0][name].dim() > 2
    ):
        return labels
    generator = torch.Generator().manual_seed(seed)
    alone = []
    for each in labels.alone:
        dropped = torch.rand(each[name].shape, generator=generator) < 0.35
        alone.append({name: each[name].masked_fill(dropped, IGNORED_LABEL)})
    counts = [int((each[name][:, int(labels.shifts) :] != IGNORED_LABEL).sum()) for each in alone]
    return replace(labels, alone=alone, counts=counts)


def by_place(model: Any, arguments: dict[str, Any], count: int) -> tuple[list[Any], dict[str, Any]]:
    """The first `count` arguments of the forward of a model by their place, those that are not
    given as None."""
    rest = dict(arguments)
    parameters = list(inspect.signature(type(model).forward).parameters.values())[1:]
    named = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD][:count]
    defaults = {p.name: None if p.default is p.empty else p.default for p in parameters}
    return [rest.pop(name, defaults[name]) for name in named], rest
