"""Documents of a trainer's data: its examples, and what its collator and sampler make of them.

Documents are told apart by their content, so nothing has to be known of the code between the two.
Differences are said in words.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np
import torch

from autopack.layout import COMPLETION_KEYS, IGNORED_LABEL, LABEL_KEYS
from autopack.layout.ways import OF_EXAMPLES
from autopack.packing.batches import Example
from autopack.packing.checks import IDS, PAIRS, labels_of
from autopack.packing.examples import ANSWERS, COMPLETIONS, PROMPT, read_example

_READ = (IDS, PROMPT, COMPLETIONS, *ANSWERS, *LABEL_KEYS, *COMPLETION_KEYS, *OF_EXAMPLES)
_SAME = 2e-6
"""Largest relative difference of two losses that are made by one formula."""
_NEXT = -1
"""Stands behind each of two documents that a loss compares, which are one here."""


@dataclass(frozen=True)
class Content:
    """Tokens of one document, and its targets.

    They are a label for each token, a few for all of them, or None if nothing says.
    """

    tokens: tuple[int, ...]
    targets: tuple[Any, ...] | None = None


def given(example: Mapping[str, Any], is_pair: bool, rows_each: int) -> list[Content]:
    """Return the documents in one example of a data set.

    The labels of an encoder-decoder (`is_pair`) are another sequence than its tokens. With two
    `rows_each` the documents of an example are compared. Raises `InvalidPacking` for what cannot be
    read.
    """
    named = {name: example[name] for name in _READ if example.get(name) is not None}
    if rows_each > 1 and PROMPT not in named:
        names = next(each for each in PAIRS[1:] if example.keys() >= {*each})
        return [_compared(example[name] for name in names)]
    if is_pair:
        return [_content(named[IDS], named.get("labels"))]
    read = read_example(named, (), False, False, completes=True)
    columns, parts = read.columns, read.starts[1:]
    rows = np.split(columns[IDS], parts)
    if rows_each > 1:
        return [_compared(rows)]
    targets: Iterable[Any] = [None] * len(rows)
    if not columns.keys().isdisjoint(("labels", *COMPLETION_KEYS)):
        targets = columns["labels"] if "labels" in columns else labels_of(columns)
        targets = targets if "labels" in read.of_documents else np.split(targets, parts)
    return list(map(_content, rows, targets))


def handed(example: Example, restores: bool) -> Content:
    """Return the document of an example that was cut out of a collated batch.

    `restores` puts the tokens back that a collator has masked.
    """
    tokens, labels = example[0][IDS], example[0].get("labels")
    if len(example) > 1:
        return _compared([row[IDS] for row in example])
    if restores and labels is not None and labels.shape == tokens.shape:
        tokens = torch.where(labels == IGNORED_LABEL, tokens, labels)
    return _content(tokens, labels)


def of_documents(wanted: Sequence[Content], found: Sequence[Content], spare: int = 0) -> list[str]:
    """Return complaints on `wanted` documents that `found` has cut, joined, doubled or dropped.

    Up to `spare` may be dropped.
    """
    all_of, come = (Counter(each.tokens for each in several) for several in (wanted, found))
    missing = all_of - come
    names = {e.tokens: f"document {n} of {len(e.tokens)} tokens" for n, e in enumerate(wanted)}
    said: dict[str, list[str]] = defaultdict(list)
    met = set()
    for tokens in (come - all_of).elements():
        if tokens in names:
            said["come again"].append(names[tokens])
        else:
            inside = [each for each in missing if _text(each) in _text(tokens)]
            around = [each for each in missing if _text(tokens) in _text(each)][:1]
            kinds = ["come that no example has", "come longer", "come as one with others"]
            kind = "come cut" if around else kinds[min(len(inside), 2)]
            of = " and ".join(names[each] for each in (*around, *inside)[:2]) or "one"
            said[kind].append(f"{of}, as {len(tokens)} tokens")
            met |= {*inside, *around}
    never = [names[tokens] for tokens in missing.elements() if tokens not in met]
    said |= {"never come": never} if len(never) > spare else {}
    return [f"{len(e)} {kind}: {e[0]}{', ...' * (len(e) > 1)}" for kind, e in said.items()]


def of_labels(wanted: Sequence[Content], found: Sequence[Content], shift: int) -> list[str]:
    """Return complaints on `found` targets that differ from `wanted`, but for the first `shift`.

    Where the data set says nothing of targets, some may be ignored, but those that count are the
    tokens.
    """
    known: dict[tuple[int, ...], list[Any]] = defaultdict(list)
    for each in wanted:
        known[each.tokens].append(each.targets)
    said: dict[str, str] = {}
    ignored, counted = set(), set()
    for each in found:
        is_aligned, options = len(each.targets or ()) == len(each.tokens), known[each.tokens]
        is_free = None in options
        if each.targets is None or not options or (is_free and not is_aligned):
            continue
        first, where = shift * is_aligned, f"in a document of {len(each.tokens)} tokens"
        got, options = each.targets[first:], [(one or each.tokens)[first:] for one in options]
        if is_free:
            pairs = list(zip(got, options[0], strict=True))
            ignored |= {two for one, two in pairs if one == IGNORED_LABEL}
            counted |= {*got}
            if first and {*got} == {IGNORED_LABEL}:
                said["none counts"] = where
            got = tuple(two if one == IGNORED_LABEL else one for one, two in pairs)
        if got not in options:
            differing = enumerate(zip_longest(got, options[0]), first)
            at, (one, two) = next((at, pair) for at, pair in differing if pair[0] != pair[1])
            said.setdefault("they differ", f"token {at} {where} has {one}, wanted {two}")
    if len(ignored) == 1 and not ignored & counted:
        said["one token is never a target, as if it were padding"] = f"token {min(ignored)}"
    return [f"{kind}: {text}" for kind, text in said.items()]


def undeclared(documents: Sequence[Content], ends: set[int]) -> list[str]:
    """Return one complaint if most rows have end tokens inside and all have one length; else []."""
    rows = [each.tokens for each in documents]
    inside = sum(not ends.isdisjoint(row[:-1]) for row in rows)
    if len({*map(len, rows[:-1])}) > 1 or 2 * inside <= max(len(rows), 4):
        return []
    return [f"{inside} of {len(rows)} rows hold several documents, and nothing tells them apart"]


def formula_of(found: float, notes: list[list[float]], steps: int, shift: int) -> str | None:
    """Return in words a wrong formula that gives the loss `found`; None if none is known.

    `TrainerAudit._alone` explains `notes`. `steps` counts micro-batches; `shift` is 1 if the loss
    shifts labels.
    """
    if not notes:
        return None
    columns = np.array(notes).T
    sums, counts, at = columns[2 + shift], columns[5 + shift], columns[0].astype(int)
    of_parts, targets, widths = (np.bincount(at, each) for each in (sums, counts, columns[1]))
    with np.errstate(all="ignore"):
        means, shifted = of_parts / targets, columns[2:5].sum(1) / columns[5:].sum(1)
        formulas = {
            "the mean of micro-batches' means, without num_items_in_batch": means.mean(),
            "the sum of micro-batches' means: nobody divides it among them": means.sum(),
            "the mean of documents' means, however long they are": np.mean(sums / counts),
            "a mean over all columns, of padding too": np.mean(of_parts / widths),
            f"1/{steps} of what it should be: divided twice": shifted[shift] / steps,
            **{f"that of labels shifted by {s}": shifted[s] for s in range(3) if s != shift},
        }
    near = [said for said, value in formulas.items() if abs(value - found) <= _SAME * abs(found)]
    return near[0] if near else None


def _compared(rows: Iterable[Any]) -> Content:
    """Return a single `Content` of the documents that a loss compares, -1 behind each."""
    return Content(tuple(number for row in rows for number in (*_numbers(row), _NEXT)))


def _content(tokens: Any, targets: Any) -> Content:
    return Content(_numbers(tokens), None if targets is None else _numbers(targets))


def _numbers(values: Any) -> tuple[Any, ...]:
    """Return the values of a list or tensor, flattened, as a tuple."""
    return tuple(torch.as_tensor(values).reshape(-1).tolist())


def _text(tokens: Sequence[int]) -> str:
    """Return tokens as a string in which `in` finds a part of them."""
    return f" {' '.join(map(str, tokens))} "
