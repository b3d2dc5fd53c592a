"""Outcomes of models under ``autopack run``: in one process, and summed over all processes.

Each process keeps its outcomes in a file, while it runs and when it ends (a killed one leaves what
it had). The first process makes the directory of these files, reads them all when it ends, and
reports them. This is part of every Python process that the script starts, so it imports next to
nothing.
"""

from __future__ import annotations

import os
import zlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autopack.runtime.tally import Checked, Tally


@dataclass(eq=False)
class ProcessOutcome:
    """Outcome of one model, in one process or in several.

    It holds counts alone: a reference to the model would keep the model alive. `pads` says whether
    padded batches may run without their padding.
    """

    text: str
    tally: Tally | None = None
    checked: Checked | None = None
    pads: bool = True
    process: int = field(default_factory=os.getpid)
    rank: str = ""
    processes: int = 1

    def __str__(self) -> str:
        who = f"rank {self.rank}: " if self.rank else ""
        who = f"{self.processes} processes: " if self.processes > 1 else who
        if self.tally is None:
            return f"{who}{self.text}"
        said = any((self.tally.batches, self.tally.left, self.tally.refused, self.tally.unmasked))
        batches = self.tally if said else "no padded batch came"
        parts = [
            f"{who}{self.text}",
            str(batches) if self.pads else "padded batches stay as they come",
        ]
        parts += [f"trained: {self.tally.trained}"] if self.tally.trained is not None else []
        parts += (
            [f"checked: {self.checked}"] if self.checked is not None and self.checked.every else []
        )
        return "; ".join(parts)

    def add(self, other: ProcessOutcome) -> None:
        """Add the counts of the same model in another process."""
        self.processes += other.processes
        if self.tally is not None and other.tally is not None:
            self.tally.add(other.tally)
        if self.checked is not None and other.checked is not None:
            self.checked.add(other.checked)

    def __getstate__(self) -> dict[str, Any]:
        # Kinds of calls are of this process.
        return {**vars(self), "checked": self.checked and replace(self.checked, kinds=set())}


def summed(outcomes: Iterable[ProcessOutcome]) -> list[ProcessOutcome]:
    """Return one outcome per model: the n-th of a kind in one process is the n-th in another."""
    found: dict[tuple[Any, ...], ProcessOutcome] = {}
    times: Counter[tuple[Any, ...]] = Counter()
    for each in sorted(outcomes, key=lambda each: (each.rank.zfill(9), each.process)):
        same = (each.text, each.pads)
        times[(each.process, same)] += 1
        key = (same, times[(each.process, same)])
        if key in found:
            found[key].add(each)
        else:
            found[key] = each
    return list(found.values())


def keep(outcomes: Iterable[ProcessOutcome], directory: Path) -> bool:
    """Write this process's outcomes for the first one; return False if that one has ended."""
    import pickle

    kept = directory / f"{os.getpid()}.outcomes"
    part = kept.with_suffix(".part")
    try:
        part.write_bytes(pickle.dumps(list(outcomes)))
        os.replace(part, kept)  # whoever is killed in between leaves the file as it was
    except OSError:
        return False
    return True


def kept(directory: Path) -> list[ProcessOutcome]:
    """Return the outcomes that all processes have left in a directory."""
    import pickle

    return [
        each
        for file in sorted(directory.glob("*.outcomes"))
        for each in pickle.loads(file.read_bytes())
    ]


def is_first(text: str, directory: Path) -> bool:
    """Return True if no process has called this with the same text yet."""
    said = directory / f"{zlib.crc32(text.encode()):08x}.said"
    try:
        said.open("x").close()
    except OSError as error:
        return not isinstance(error, FileExistsError)
    return True
