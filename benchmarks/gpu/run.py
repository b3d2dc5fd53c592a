"""A whole run: its parts one after the other, each in a process of its own on a GPU, and what is
written of them."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import interleave
from benchmarks.gpu import report
from benchmarks.gpu.job import FAILED, LEFT_OUT, NO_TIME, OK, Job, Part, carry_out
from benchmarks.gpu.machine import ROOT, Machine
from benchmarks.gpu.processes import run_bounded

GRACE = 45
"""Seconds after its time in which a part may still end by itself: it looks at the clock between
types and rounds."""
LAST = 15
"""Seconds kept for the last report."""


@dataclass
class Run:
    """A run on a device: how long it may take, where it writes, and what has been found so far.

    What an earlier run of the same code, device and settings has finished in `out` is kept and not
    measured again."""

    machine: Machine
    out: Path
    minutes: float
    small: bool = False
    apart: bool = False
    seed: int = 0
    started: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        self.result: dict[str, Any] = {
            "benchmark": "gpu",
            "origin": interleave.origin() | {"code": _digest()},
            "settings": {
                "device": self.machine.device,
                "small": self.small,
                "minutes": self.minutes,
                "seed": self.seed,
            },
            "parts": {},
        }
        self.kept = self._finished_before()

    def _finished_before(self) -> dict[str, Any]:
        """The parts that an earlier run has finished, by name; none of another code, device or
        setting."""
        path = self.out / "gpu.json"
        if not path.exists():
            return {}
        earlier = json.loads(path.read_text())
        if _identity(earlier) != _identity(self.result):
            print(
                f"{path} is of other code, packages, devices or settings, and is written anew.",
                flush=True,
            )
            return {}
        return {name: part for name, part in earlier["parts"].items() if part["status"] == OK}

    def unfinished(self) -> list[str]:
        """Names of the parts that there was no time for."""
        return [
            name
            for name, outcome in self.result["parts"].items()
            if outcome.get("reason") == NO_TIME
        ]

    def left(self) -> float:
        """Seconds that are left for parts."""
        return 60 * self.minutes - (time.monotonic() - self.started) - (LAST if self.minutes else 0)

    def go(self, parts: Sequence[Part]) -> dict[str, Any]:
        """Run parts as far as the time allows, and write all after each; returns the result."""
        self.result["parts"].update(self.kept)
        self.write()
        for part in parts:
            if part.name in self.kept:
                print(f"{part.name}: finished by an earlier run", flush=True)
                continue
            seconds = min(60 * self.minutes * part.share, self.left())
            if seconds <= 0:
                left_out = {"status": LEFT_OUT, "reason": NO_TIME}
                outcome: dict[str, Any] = {**left_out, "problems": [], "result": {}}
            else:
                print(f"{part.name} (up to {seconds:.0f} s) ...", flush=True)
                outcome = self._one(part, seconds)
            self.result["parts"][part.name] = outcome
            print(report.line(part.name, outcome), flush=True)
            self.write()
        return self.result

    def _one(self, part: Part, seconds: float) -> dict[str, Any]:
        # Beside the rest, so that a run that is killed leaves what its last part had found.
        path = self.out / f"{part.name.replace(', ', '-').replace(' ', '-')}.unfinished.json"
        path.unlink(missing_ok=True)
        if self.apart:
            outcome = self._in_process(part, seconds, path)
        else:
            outcome = carry_out(part, Job(self.machine, self.small, seconds, self.seed, path))
        path.unlink(missing_ok=True)
        return outcome

    def _in_process(self, part: Part, seconds: float, path: Path) -> dict[str, Any]:
        """Run a part in a process of its own: what it breaks of the device, and its memory, go with
        that process."""
        words = (
            f"-m benchmarks.gpu --device {self.machine.device} --seconds {seconds} "
            f"--seed {self.seed} {'--small' if self.small else ''}"
        )
        command = [sys.executable, *words.split(), "--part", part.name, "--outcome", str(path)]
        limit = min(seconds + GRACE, max(self.left(), 0) + LAST / 2)
        status, lines = run_bounded(command, limit)
        found = json.loads(path.read_text()) if path.exists() else None
        if status == 0 and found is not None:
            return found
        ended = f"its process ended with status {status}"
        if status is None:
            ended = f"stopped after {limit:.0f} s"
        told = {"type": "ended", "message": ended, "output": lines[-25:]}
        return {"problems": [], "result": {}, **(found or {}), "status": FAILED, "error": told}

    def failed(self) -> list[str]:
        """Names of the parts that failed."""
        return [
            name for name, outcome in self.result["parts"].items() if outcome["status"] == FAILED
        ]

    def write(self) -> None:
        """Write what there is: `gpu.json`, and `gpu.txt`, the same in words."""
        self.result["seconds"] = time.monotonic() - self.started
        interleave.put(self.out / "gpu.json", json.dumps(self.result, indent=1, default=str) + "\n")
        interleave.put(self.out / "gpu.txt", report.table(self.result) + "\n")


def _digest() -> str:
    """A name for the code that is measured, and that which measures."""
    places = (ROOT / name for name in ("autopack", "benchmarks"))
    texts = sorted(path.read_bytes() for place in places for path in place.rglob("*.py"))
    return hashlib.sha256(b"".join(texts)).hexdigest()


def _identity(result: dict[str, Any]) -> list[Any]:
    """What two runs have to share for the one to go on with the other: all but time, and how long
    it may take."""
    settings = {name: value for name, value in result["settings"].items() if name != "minutes"}
    names = "code device python torch transformers".split()
    return [settings, *map(result["origin"].get, names)]
