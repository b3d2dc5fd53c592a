"""Start groups of processes as users do, and gather what they found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from compat.engines.cells import processes_of

ROOT = Path(__file__).parents[2]
_ACCELERATE = {
    "accelerate fsdp2": "distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\n  "
    "fsdp_auto_wrap_policy: "
    "TRANSFORMER_BASED_WRAP\n  fsdp_reshard_after_forward: true\n  fsdp_state_dict_type: "
    "SHARDED_STATE_DICT\n",
}
"""What is in the file that `accelerate launch` is configured by, beside the number of processes."""

Verdict = dict[str, Any]


def run(cells: Sequence[str], timeout: float = 60.0) -> Iterator[tuple[str, Verdict]]:
    """The verdict of every cell, `engine/type`. Cells of one number of processes share them, as
    long as none fails."""
    batches: dict[tuple[int, str], list[str]] = {}
    for cell in cells:
        engine = cell.partition("/")[0]
        batches.setdefault(
            (processes_of(engine), engine if engine in _ACCELERATE else ""), []
        ).append(cell)
    for (processes, launcher), waiting in batches.items():
        while waiting:
            found = _started(waiting, processes, launcher, timeout)
            for cell, verdict in found:
                if verdict["status"] == "crash" and _stock_fails(
                    cell, processes, launcher, timeout
                ):
                    verdict["status"] = "no stock"
                yield cell, verdict
            del waiting[: len(found)]


def launched(
    command: Sequence[str], processes: int, config: str = "", **environ: str
) -> subprocess.CompletedProcess[str]:
    """Run a Python script or module, `command`, on so many processes by torchrun, or by accelerate
    with a `config`."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environ}
    with tempfile.TemporaryDirectory() as folder:
        if config:
            path = Path(folder, "config.yaml")
            path.write_text(
                "compute_environment: LOCAL_MACHINE\nuse_cpu: true\nnum_machines: "
                "1\nmachine_rank: 0\n"
                f"num_processes: {processes}\nmain_process_port: 0\nrdzv_backend: static\n{config}"
            )
            start = ["-m", "accelerate.commands.launch", "--config_file", str(path)]
        else:
            start = [
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc-per-node",
                str(processes),
            ]
        return subprocess.run(
            [sys.executable, *start, *command],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )


def _started(
    cells: Sequence[str], processes: int, launcher: str, timeout: float, stock: bool = False
) -> list[tuple[str, Verdict]]:
    """The verdicts of the first cells, up to the first that is not exact or right; of one at
    least."""
    environ = {"ENGINES_TIMEOUT": str(timeout), "ENGINES_STOCK": str(int(stock))}
    with tempfile.TemporaryDirectory() as folder:
        worker = ["-m", "compat.engines.worker", folder, *cells]
        done = launched(worker, processes, _ACCELERATE.get(launcher, ""), **environ)
        ranks = [_lines(Path(folder, f"{rank}.jsonl")) for rank in range(processes)]
    found = []
    for cell in cells:
        verdicts = [rank[cell] for rank in ranks if cell in rank]
        whole = len(verdicts) == processes
        if whole and all("error" in verdict for verdict in verdicts):
            found.append((cell, max(verdicts, key=lambda verdict: float(verdict["error"]))))
            continue
        order = ("WRONG", "refused", "absent", "crash")
        worst = min(verdicts, key=lambda each: order.index(each["status"]), default=None)
        found.append((cell, worst or {"status": "not started", "reason": done.stderr[-400:]}))
        break
    return found


def _stock_fails(cell: str, processes: int, launcher: str, timeout: float) -> bool:
    """Whether the same without autopack, one document per call, fails too."""
    [(_, verdict), *_] = _started([cell], processes, launcher, timeout, stock=True)
    return verdict["status"] == "crash"


def _lines(path: Path) -> dict[str, Verdict]:
    if not path.exists():
        return {}
    return {line.pop("cell"): line for line in map(json.loads, path.read_text().splitlines())}
