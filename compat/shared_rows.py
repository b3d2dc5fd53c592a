"""Print, for every causal and masked type, whether rows that two ranks share give what each
document gives alone.

    python -m compat.shared_rows                     all types, recorded in compat/results/shared_rows.json
    python -m compat.shared_rows llama gpt_oss       some types, printed only

Two processes of gloo have half of the columns of every row each. Models are tiny and random,
without dropout and in training mode, and enabled by `autopack.enable(model,
sequence_parallel=group)`; compared are logits, loss and gradients with those of every document
alone on one process. Positions are those of `PackingCollator.for_model`."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.multiprocessing as mp

import autopack
from autopack import tiny
from autopack.errors import AutopackError
from autopack.inspection.source import shifts_labels
from autopack.registry import first_position
from compat.common import quietly, said, short, write_json
from tests.integration.documents import FLOAT32, run_alone
from tests.integration.row_parts import model_of, rows_of, shared

RESULTS = Path(__file__).parent / "results" / "shared_rows.json"
NAMES = [f"{name}:{task}" for task in ("causal-lm", "masked-lm") for name in tiny.types_for(task)]
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


def main() -> int:
    """Run the measurements, print the table, and return 1 where a type is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("types", nargs="*", help="model types (default: all)")
    arguments = parser.parse_args()
    kinds = [
        name for name in NAMES if not arguments.types or name.partition(":")[0] in arguments.types
    ]
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_work, args=(kinds, folder), nprocs=2)
        found = json.loads(Path(folder, "found.json").read_text())
    counted = Counter(cell["status"] for cell in found.values())
    print(f"\n{len(found)} types: {dict(counted)}")
    if not arguments.types:
        versions = {name: version(name) for name in ("transformers", "torch")}
        write_json(RESULTS, {**versions, "types": found}, depth=3)
    return int(counted["WRONG"] + counted["ERROR"] > 0)


if __name__ == "__main__":
    sys.exit(main())
