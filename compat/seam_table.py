"""The seams: named functions of autopack, how each is broken, and the tests that have to notice.

`seams.toml` has them; those whose break is no constant have it here, by their names."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from autopack.auditing.compare import Difference
from autopack.packing.media import SEEN
from compat.matrix import COMPAT, tomllib
from compat.seam_breaks import Break, Function, Seam, around, never, result, returns, stale

_STATES = "encoder_hidden_states"


def as_one(layout: Any) -> Any:
    """Return the layout of the same rows, each one document."""
    return type(layout).from_lengths([[layout.columns]] * layout.rows, layout.device)


def _see_all_images(run: Function, *given: Any) -> Any:
    """Attend from each document to the images of all."""
    *others, places = given
    keys = slice(0, others[2][1].shape[2])
    return run(*others, [(row, queries, keys) for row, queries, _ in places])


def _of_another(run: Function, mixer: Any, arguments: dict[str, Any], layout: Any) -> Any:
    """Hand each document the image of another."""
    return run(mixer, {**arguments, _STATES: arguments[_STATES].flip(0)}, layout)


def _wider(one: Any, other: Any) -> Any:
    """Return the larger of two reaches."""
    return max((each for each in (one, other) if each is not None), default=None)


def _as_it_is(call: Any) -> Any:
    """Run a module on the row, as if it kept documents apart."""
    return call.changed(lambda name, value: value)


def _scope_of_anyone(module: Any, one_token: bool = False) -> Any:
    """Return the scope that is running, whatever model it is of."""
    from autopack.runtime.scope import running_scope

    return running_scope()


def _whatever_is_in_force() -> Any:
    """Return the innermost activation, whether its forward runs or not."""
    from autopack.runtime.scope import ambient

    return ambient.activation


def _of_one_size(derive: Function, layout: Any, key: Any, build: Function) -> Any:
    """Know what was derived by its name alone."""
    return derive(layout, key[0] if isinstance(key, tuple) else key, build)


def _only_put(put: Function, site: Any, value: Any) -> None:
    """Put a function of autopack in place, and nothing back."""
    if hasattr(value, "autopack_original"):
        put(site, value)


def _one_early(starts: np.ndarray) -> np.ndarray:
    """Begin each document one token before its first, too."""
    return starts | np.roll(starts, -1, axis=1)


def _from_0(add: Function, call: Any, arguments: dict[str, Any], layout: Any) -> None:
    """Add positions that restart at 0, whatever the model begins with."""
    arguments["position_ids"] = layout.position_ids(0)


def _numbered_together(number: Function, call: Any, layout: Any) -> Any:
    """Number the images of all documents in one call."""
    before, call.traits.counts_images = call.traits.counts_images, False
    try:
        return number(call, layout)
    finally:
        call.traits.counts_images = before


def _run_on(batch: dict[str, Any]) -> dict[str, Any]:
    """Number the tokens of a row from its beginning."""
    return {**batch, "position_ids": np.arange(batch["position_ids"].size)[None]}


_BREAKS: dict[str, Break] = {
    "attention: the mask of one length serves another": stale,
    "attention: documents are cut in another order": result(lambda parts: parts[::-1]),
    "attention: documents of one length are taken in another order": result(
        lambda batches: [each.flip(0) for each in batches]
    ),
    "masks: the wider of two windows": never(_wider),
    "flex: documents have one number": result(torch.zeros_like),
    "flex: documents begin where the row does": result(torch.zeros_like),
    "autocast: attention takes the dtype that states have": never(lambda states: states.dtype),
    "rotary: all documents have the frequencies of the longest": result(
        lambda groups: [np.sort(np.concatenate(list(groups)))]
    ),
    "images: tokens see those of other documents": around(_see_all_images),
    "flash and varlen: a row is one document": result(lambda bounds: bounds[[0, -1]]),
    "convolution: taps reach into the document before": around(
        lambda places, layout, before: places(layout, 0)
    ),
    "scan: state is carried on": around(
        lambda rows, run, layout, *grouping: rows(run, as_one(layout), *grouping)
    ),
    "kernels: none is told of documents": returns(frozenset()),
    "whole halves: the encoder runs on the row": never(lambda way, call: _as_it_is(call)),
    "prefixes: mixers run on the row that shares": never(
        lambda mixer, way, scope, name, value: value
    ),
    "images: documents of BLIP get that of another": around(_of_another),
    "images: GIT keeps the states of one": never(lambda output, batch: output),
    "XLM: columns are counted by padding tokens": never(lambda way, call: _as_it_is(call)),
    "layout: what was derived for one size serves another": around(_of_one_size),
    "layout: positions do not restart": around(
        lambda number, layout, first=0: number(as_one(layout), first)
    ),
    "layout: runs of padding are documents": result(np.ones_like),
    "layout: documents come back in the order of their batches": result(
        lambda found: replace(found, back=torch.arange(len(found.back)))
    ),
    "layout: positions in sections are no tokens": around(
        lambda ask, frame, name, value: ask(frame, "", value)
    ),
    "padding: the row is one document": result(as_one),
    "padding: a token comes back in the column before": result(lambda places: places.roll(1)),
    "padding: tokens behind padding keep their labels": result(lambda places: places[:0]),
    "labels: the first of a document counts": never(lambda labels, *_: labels),
    "declarations: a document begins one token early": result(_one_early),
    "declarations: padding inside a document is taken": around(
        lambda cut, starts, real, later: cut(starts, real, np.zeros_like(later))
    ),
    "prefixes: equal tokens at other positions are taken together": around(
        lambda find, tokens, positions, *more: find(tokens, positions * 0, *more)
    ),
    "images: the mask may show those of another document": around(
        lambda find, mask, layout, real: find(mask, as_one(layout), None)
    ),
    "checkpointing: layers are recomputed without their layout": never(
        lambda bound, *args, **kwargs: bound.function(*args, **kwargs)
    ),
    "scope: what an interrupted forward left is in force": never(_whatever_is_in_force),
    "scope: the layout of another model is read": never(_scope_of_anyone),
    "shared rows: parts of rows in another order": result(lambda found: found.flip(0)),
    "sites: what was replaced stays": around(_only_put),
    "positions: those of models that begin elsewhere begin at 0": around(_from_0),
    "positions: a padding token is counted on from the row": around(
        lambda count, numbering, config, ids, starts=None: count(numbering, config, ids)
    ),
    "positions: those of left padding begin at 0": never(
        lambda numbering, config, mask, ids: mask.long().cumsum(1) - 1
    ),
    "images: a model numbers those of all documents in one call": around(_numbered_together),
    "images: rows of a padded batch read those of other rows": returns((None, None)),
    "collator: positions run on, and first labels count": result(_run_on),
    "collator: masks of images begin one image later": result(
        lambda found: {n: np.roll(m, 1, axis=2) if n in SEEN else m for n, m in found.items()}
    ),
    "audit: no document is replaced": result(lambda found: found * 0),
    "twins: what is on the model does not come along": never(lambda value, module, stand_in: value),
    "checks: nothing moves where others are replaced": result(
        lambda moved: Difference(moved.name, 0.0)
    ),
    "checks: no document is run alone": result(torch.zeros_like),
    "checks: gradients tell nothing": returns(Difference("", 0.0)),
    "audit: nothing is compared": result(
        lambda found: ([{} for _ in found[0]], [{} for _ in found[1]], [])
    ),
}


def _seam(name: str, at: str, tests: list[str], returned: Any = None) -> Seam:
    constant = tuple(returned) if isinstance(returned, list) else returned
    breaks = _BREAKS.get(name, returns(constant))
    return Seam(name, f"autopack.{at}", breaks, tuple(f"tests/{test}" for test in tests))


SEAMS = tuple(
    _seam(row["name"], row["at"], row["tests"], row.get("returns"))
    for row in tomllib.loads((COMPAT / "seams.toml").read_text(encoding="utf-8"))["seams"]
)
