"""Print, for every causal and masked type, whether rows that two ranks share give what each document gives alone.

    python -m compat.shared_rows                     all types, recorded in compat/results/shared_rows.json
    python -m compat.shared_rows llama gpt_oss       some types, printed only

Two processes of gloo have half of the columns of every row each. Models are tiny and random, without dropout and in
training mode, and enabled by `autopack.enable(model, sequence_parallel=group)`; compared are logits, loss and gradients
with those of every document alone on one process. Positions are those of `PackingCollator.for_model`.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import autopack
from autopack import tiny
from autopack.errors import AutopackError
from autopack.inspection.source import shifts_labels
from autopack.registry import first_position
from compat.tables import json_by_lines
from tests.integration.documents import FLOAT32, run_alone
from tests.integration.row_parts import model_of, rows_of, shared

RESULTS = Path(__file__).parent / "results" / "shared_rows.json"
NAMES = [f"{name}:{task}" for task in ("causal-lm", "masked-lm") for name in tiny.types_for(task)]
TOLERANCE = 10 * FLOAT32
LENGTHS = ((7, 12, 5), (3, 19, 2))
"""Of two rows of 24 columns: documents begin and end in parts of both ranks, and one is longer than a part."""


def measure(kind: str) -> dict[str, Any]:
    """Compare one type on this rank: its `status` (exact, WRONG, refused, unbuildable, upstream error) and error."""
    attention = "sdpa"
    try:
        try:
            model, plain = model_of(kind, attention), model_of(kind, attention)
        except (tiny.CannotBuild, ValueError):
            attention = "eager"
            model, plain = model_of(kind, attention), model_of(kind, attention)
    except Exception as error:
        return {"status": "unbuildable", "reason": _line(error)}
    shifts = bool(shifts_labels(plain))  # the loss of a decoder of the BART kind does not
    texts, batch = rows_of(model.config, LENGTHS)
    batch["position_ids"] = batch["position_ids"] + first_position(model.config)
    try:
        alone = run_alone(plain, texts, shifts)
    except Exception as error:
        return {"status": "upstream error", "reason": _line(error)}
    try:
        autopack.enable(model, sequence_parallel=dist.group.WORLD)
        found = shared(model, batch, shifts=shifts)
    except AutopackError as error:
        return {"status": "refused", "reason": _line(error)}
    worst = found.error(alone)
    return {"status": "exact" if worst < TOLERANCE else "WRONG", "error": worst}


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0][:400]


def _work(rank: int, kinds: list[str], folder: str) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    import transformers

    transformers.logging.set_verbosity_error()
    logging.getLogger("autopack").setLevel(logging.ERROR)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    found = {}
    for kind in kinds:
        try:
            found[kind] = measure(kind)
        except Exception as error:
            found[kind] = {"status": "ERROR", "reason": _line(error)}
        statuses: list[Any] = [None, None]
        dist.all_gather_object(statuses, found[kind])
        found[kind] = next((each for each in statuses if each["status"] in ("WRONG", "ERROR")), statuses[0])
        if rank == 0:
            cell = found[kind]
            said = f"{cell['error']:.0e}" if "error" in cell else cell["reason"][:150]
            print(f"{kind:<40} {cell['status']:<16} {said}", flush=True)
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def main() -> int:
    """Run the measurements, print the table, and return 1 where a type is wrong."""
    import transformers

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", help="model types (default: all)")
    arguments = parser.parse_args()
    kinds = [name for name in NAMES if not arguments.types or name.partition(":")[0] in arguments.types]
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_work, args=(kinds, folder), nprocs=2)
        found = json.loads(Path(folder, "found.json").read_text())
    counted = Counter(cell["status"] for cell in found.values())
    print(f"\n{len(found)} types: {dict(counted)}")
    if not arguments.types:
        versions = {"transformers": transformers.__version__, "torch": torch.__version__}
        RESULTS.write_text(json_by_lines({**versions, "types": found}))
    return int(counted["WRONG"] + counted["ERROR"] > 0)


if __name__ == "__main__":
    sys.exit(main())
