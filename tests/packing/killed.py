"""Programs of test_kills.py: a job of an array and a driver of Ray that stop somewhere for whoever
kills them.

    python -m tests.packing.killed job SHARD COUNT FOLDER [STAGE]
    python -m tests.packing.killed ray 0 COUNT FOLDER [STAGE]

At a stage a process writes its number to `FOLDER/../at-NAME` and goes on when `FOLDER/../go` is
there. What is run again does not stop."""

import os
import sys
import time
from pathlib import Path

from tests.packing.engines import blocks_of, ray_started

MAX_LENGTH = 32
STAGES = ("within", "before", "whole", "named")
"""In the middle of a file; before it is opened; when it is whole and has no name yet; when it has
its name."""


def stopping(stage):
    """A folder that stops at a stage; made in a function, so that workers of Ray get the class and
    not its name."""
    from autopack.packing import shards

    class Stopping(shards.Folder):
        def wait(self, name):
            about = Path(self.base).parent
            flag = about / f"at-{name}"
            if not flag.exists():
                hidden = about / f".{name}.{os.getpid()}"
                hidden.write_text(str(os.getpid()))
                hidden.rename(flag)
                while not (about / "go").exists():
                    time.sleep(0.01)

        def write(self, rows, name, metadata):
            tables = rows.tables()

            def with_a_stop():
                for number, table in enumerate(tables):
                    yield table
                    if number == 0:
                        self.wait(name)

            if stage == "before":
                self.wait(name)
            rows.tables = with_a_stop if stage == "within" else lambda: tables
            super().write(rows, name, metadata)

        def publish(self, hidden, name):
            if stage == "whole":
                self.wait(name)
            super().publish(hidden, name)
            if stage == "named":
                self.wait(name)

    return Stopping


def job(shard, count, folder):
    """A job as docs/packing.md has it: it writes its shard unless that is there."""
    import datasets

    import autopack

    dataset = datasets.load_from_disk(Path(folder).parent / "corpus")
    if not os.path.exists(f"{folder}/rows-{shard:05d}-of-{count:05d}.parquet"):
        autopack.packing.pack_shards(dataset, MAX_LENGTH, folder, num_shards=count, shard=shard)


def drive(count, folder):
    """A program that packs with two workers of Ray."""
    import datasets

    import autopack

    ray = ray_started()
    made = datasets.load_from_disk(Path(folder).parent / "corpus").to_list()
    data = blocks_of(ray)(made, len(made) // 2)
    autopack.packing.pack_shards(data, MAX_LENGTH, folder, num_shards=count)
    ray.shutdown()


def main(kind, *arguments):
    """Run a program, its folder one that stops where a stage is named."""
    from autopack.packing import rows, shards

    if len(arguments) > 3:
        shards.Folder = stopping(arguments[3])
    rows.BLOCK = 4 * MAX_LENGTH  # a few rows at a time, so that a file has a middle
    if kind == "job":
        job(int(arguments[0]), int(arguments[1]), arguments[2])
    else:
        drive(int(arguments[1]), arguments[2])


if __name__ == "__main__":
    main(*sys.argv[1:])
