"""What runs in each process: `torchrun -m compat.engines.worker FOLDER CELL ...`, one cell after
the other."""

from __future__ import annotations

import datetime
import json
import logging
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autopack.errors import AutopackError
from compat.engines.data import SHARES, Spec, Step, documents, packed, reference
from compat.engines.engines import STOCK, Engine
from compat.engines.shared import engine_of


def main(arguments: list[str]) -> None:
    """Run cells, `engine/type` each, and write a line of JSON for each to FOLDER/RANK.jsonl as soon
    as it is known."""
    folder, *cells = arguments
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    timeout = datetime.timedelta(seconds=float(os.environ.get("ENGINES_TIMEOUT", "60")))
    dist.init_process_group("gloo", timeout=timeout)
    with Path(folder, f"{dist.get_rank()}.jsonl").open("a") as file:
        for number, cell in enumerate(cells):
            engine, _, name = cell.partition("/")
            found = _verdict(engine, Spec.of(name), Path(folder, str(number)))
            file.write(json.dumps({"cell": cell, **found}) + "\n")
            file.flush()
            if "error" not in found:
                # Where only some ranks raised, the others wait for them; who raised must not go on
                # alone.
                os._exit(3)
    dist.destroy_process_group()


def _verdict(name: str, spec: Spec, folder: Path) -> dict[str, Any]:
    kind = engine_of(name)
    try:
        error = trained(kind, spec, folder)
    except AutopackError as refused:
        return {"status": "refused", "reason": " ".join(refused.message.split())}
    except ImportError as missing:
        return {"status": "absent", "reason": str(missing)}
    except Exception as wrong:
        traceback.print_exc()
        return {"status": "crash", "reason": f"{type(wrong).__name__}: {wrong}"}
    return {"status": "exact" if error < kind.tolerance else "WRONG", "error": error}


def trained(kind: type[Engine], spec: Spec, folder: Path) -> float:
    """Train for some steps, the last of them after a resumption; returns the largest relative error
    of any step."""
    engine = kind(spec)
    start, wanted = reference(spec, engine.shares, kind.dtype)
    errors = []
    for step in range(len(SHARES)):
        if step == len(SHARES) - 1:
            engine.save(folder)
            dist.barrier()
            engine = kind(spec, seed=1)
            engine.load(folder)
        errors.append(_step(engine, spec, step).error(wanted[step], start))
    return 0.0 if STOCK else max(errors)


def _step(engine: Engine, spec: Spec, step: int) -> Step:
    given = documents(spec, engine.base, step, engine.share)[: 1 if STOCK else None]
    total = sum(
        each.targets
        for share in range(engine.shares)
        for each in documents(spec, engine.base, step, share)
    )
    calls = [given[: len(given) // 2], given[len(given) // 2 :]] if engine.accumulates else [given]
    calls = [each or given[:1] for each in calls]
    loss_of_all = torch.zeros(())
    for number, each in enumerate(calls):
        weight = sum(document.targets for document in each) / total
        if number == 0 and engine.accumulates and len(given) == 1:
            weight = 0.0  # the only document is that of the second call
        with engine.accumulating(last=number == len(calls) - 1):
            output = engine.call(packed(spec, each))
            scale = weight * (engine.averaged_over if engine.averages else 1)
            engine.backward(_weighed(output.loss, scale))
        loss_of_all += 0.0 if not weight else float(output.loss.detach()) * weight
    dist.all_reduce(loss_of_all)
    loss = float(loss_of_all) / (dist.get_world_size() // (engine.shares * engine.parts))
    gradients = engine.gradients()
    engine.step()
    return Step(loss, gradients, engine.parameters())


def _weighed(loss: torch.Tensor, scale: float) -> torch.Tensor:
    # The mean over no target is no number.
    return loss * scale if scale else loss.nan_to_num() * 0.0


if __name__ == "__main__":
    main(sys.argv[1:])
