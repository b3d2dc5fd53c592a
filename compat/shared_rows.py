"""Measure, for every causal and masked type, whether rows that two ranks share give what each
document gives alone.

    python -m compat.shared_rows --record

Two processes of gloo have half of the columns of every row each. Models are tiny and random,
without dropout and in training mode, and enabled by `autopack.enable(model,
sequence_parallel=group)`; compared are logits, loss and gradients with those of every document
alone on one process. Positions are those of `PackingCollator.for_model`."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.multiprocessing as mp

import autopack
from autopack import tiny
from autopack.errors import AutopackError
from autopack.inspection.source import shifts_labels
from autopack.registry import first_position
from compat import study
from compat.common import quietly, said, short
from compat.study import Study
from tests.integration.documents import FLOAT32, run_alone
from tests.integration.row_parts import model_of, rows_of, shared

TOLERANCE = 10 * FLOAT32
LENGTHS = ((7, 12, 5), (3, 19, 2))
"""Of two rows of 24 columns: documents begin and end in parts of both ranks, and one is longer than
a part."""


def measure(kind: str) -> dict[str, Any]:
    """Compare one type on this rank: its `status` (exact, WRONG, refused, unbuildable, upstream
    error) and error."""
    attention = "sdpa"
    try:
        try:
            model, plain = model_of(kind, attention), model_of(kind, attention)
        except (tiny.CannotBuild, ValueError):
            attention = "eager"
            model, plain = model_of(kind, attention), model_of(kind, attention)
    except Exception as error:
        return {"status": "unbuildable", "reason": short(said(error))}
    shifts = bool(shifts_labels(plain))  # the loss of a decoder of the BART kind does not
    texts, batch = rows_of(model.config, LENGTHS)
    batch["position_ids"] = batch["position_ids"] + first_position(model.config)
    try:
        alone = run_alone(plain, texts, shifts)
    except Exception as error:
        return {"status": "upstream error", "reason": short(said(error))}
    try:
        autopack.enable(model, sequence_parallel=dist.group.WORLD)
        found = shared(model, batch, shifts=shifts)
    except AutopackError as error:
        return {"status": "refused", "reason": short(said(error))}
    worst = found.error(alone)
    return {"status": "exact" if worst < TOLERANCE else "WRONG", "error": worst}


def _work(rank: int, kinds: list[str], folder: str) -> None:
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    found = {}
    with quietly():
        for kind in kinds:
            try:
                found[kind] = measure(kind)
            except Exception as error:
                found[kind] = {"status": "ERROR", "reason": short(said(error))}
            statuses: list[Any] = [None, None]
            dist.all_gather_object(statuses, found[kind])
            found[kind] = next(
                (each for each in statuses if each["status"] in ("WRONG", "ERROR")), statuses[0]
            )
            if rank == 0:
                print(kind, *found[kind].values(), flush=True)
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def _measured(kinds: list[str], _: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_work, args=(kinds, folder), nprocs=2)
        yield from json.loads(Path(folder, "found.json").read_text()).items()


STUDY = Study(
    "shared_rows",
    str(__doc__),
    lambda: [
        f"{name}:{task}" for task in ("causal-lm", "masked-lm") for name in tiny.types_for(task)
    ],
    _measured,
)

if __name__ == "__main__":
    raise SystemExit(study.main(STUDY))
