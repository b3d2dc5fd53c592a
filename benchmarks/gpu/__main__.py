"""All that is to be known of autopack on a GPU, in one command.

    python -m benchmarks.gpu --out DIR                              parts of ten minutes on one card of the H100's class
    python -m benchmarks.gpu --out DIR --device cpu --small         every part on stand-ins: a rehearsal, no result
    python -m benchmarks.gpu --out DIR --parts "waits" "speed, 1B"  some parts

It needs torch, transformers and triton, and no network; kernels of fla and others are used where
they are installed. It writes `gpu.json` with everything and `gpu.txt` with the tables into DIR.

The parts are in benchmarks/gpu/parts.py. Each has its share of the time and, on a GPU, a process of
its own. One that fails is named at the end, with what it had found until then; the others go on.
The status is 1 if one failed. The same command goes on where an earlier one was killed or had no
more time: what is finished in DIR is not measured again."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status: 1 if a part failed."""
    started = time.monotonic()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="the folder to write into")
    parser.add_argument(
        "--device", default="cuda", help="cuda, cuda:1 or cpu, which is for rehearsals"
    )
    parser.add_argument("--small", action="store_true", help="tiny shapes and few types")
    parser.add_argument(
        "--minutes", type=float, default=10.0, help="parts that do not fit into them are left out"
    )
    parser.add_argument("--parts", nargs="+", help="only these")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=60.0, help=argparse.SUPPRESS)
    parser.add_argument("--outcome", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)

    import torch

    from benchmarks.gpu.job import Job, carry_out
    from benchmarks.gpu.machine import Machine
    from benchmarks.gpu.parts import PARTS

    machine = Machine(options.device)
    if machine.is_cuda and not torch.cuda.is_available():
        parser.exit(
            2,
            "torch finds no CUDA device; --device cpu --small rehearses every part on stand-ins.\n",
        )
    named = {part.name: part for part in PARTS}
    unknown = [
        name
        for name in [*(options.parts or ()), *filter(None, [options.part])]
        if name not in named
    ]
    if unknown:
        parser.error(f"no such part: {', '.join(unknown)}; there are: {', '.join(named)}")
    if options.part is not None:
        prepare(machine)
        carry_out(
            named[options.part],
            Job(machine, options.small, options.seconds, options.seed, options.outcome),
        )
        return 0
    if options.out is None:
        parser.error("--out is needed")

    from benchmarks.gpu.run import Run

    run = Run(
        machine, options.out, options.minutes, options.small, machine.is_cuda, options.seed, started
    )
    run.go([named[name] for name in options.parts or named])
    failed = run.failed()
    print(f"\n{(options.out / 'gpu.txt').read_text()}")
    if failed:
        print(
            f"FAILED: {'; '.join(failed)}. What they had found until then is in "
            f"{options.out / 'gpu.json'}."
        )
    if unfinished := run.unfinished():
        print(f"LEFT: {'; '.join(unfinished)}. The same command goes on with them.")
    return 1 if failed else 0


def prepare(machine: object) -> None:
    """Set a process up for one part: quiet, on its device, and in float32 where float32 is said."""
    import logging
    import warnings

    import torch
    import transformers

    from benchmarks.gpu.machine import Machine

    assert isinstance(machine, Machine)
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    if machine.is_cuda:
        torch.cuda.set_device(
            torch.device(machine.device if ":" in machine.device else f"{machine.device}:0")
        )
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False


if __name__ == "__main__":
    # nothing is fetched, and nothing waits for a network
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # so that what it has started is stopped, too
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
