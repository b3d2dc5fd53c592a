"""Forward and backward of a language model's last layer and loss, with transformers' loss and with `chunked_loss`.

    python -m benchmarks.large_vocabulary
    python -m benchmarks.large_vocabulary --tokens 512 --rounds 1       a first look

One row of tokens, a last layer as wide as Llama 3's vocabulary, and a loss. Before anything is timed, losses and
gradients are compared. Peak memory is what forward and backward add to the resident memory of a process that holds
hidden states and weights, each arm in a process of its own whose memory goes back to the system as it is freed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import interleave
from benchmarks.unpadding import MIB, STATUS, resident

DTYPES = ("bfloat16", "float32")
LOSSES = ("transformers", "chunked_loss")
ARMS = tuple(f"{loss}, {dtype}" for dtype in DTYPES for loss in LOSSES)
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}
"""Relative: both compute probabilities in float32 and round gradients to the dtype of the logits."""


def arm(name: str, options: argparse.Namespace) -> tuple[Any, Callable[[], Any]]:
    """The last layer's weights, and forward and backward of an arm, which give the loss."""
    import torch
    from transformers.loss.loss_utils import ForCausalLMLoss

    import autopack

    loss, dtype = name.split(", ")
    function: Any = ForCausalLMLoss if loss == "transformers" else autopack.chunked_loss
    generator = torch.Generator().manual_seed(options.seed)
    hidden = torch.randn(1, options.tokens, options.hidden, generator=generator).to(getattr(torch, dtype))
    weights = torch.randn(options.vocabulary, options.hidden, generator=generator) / options.hidden**0.5
    weights = weights.to(getattr(torch, dtype)).requires_grad_()
    labels = torch.randint(options.vocabulary, (1, options.tokens), generator=generator)

    def run() -> Any:
        weights.grad = None
        logits = hidden @ weights.T
        found = function(logits, labels, options.vocabulary)
        found.backward()
        return found.detach()

    return weights, run


def check(arms: dict[str, tuple[Any, Callable[[], Any]]]) -> None:
    """Raise `AssertionError` where losses or gradients of the arms of a dtype differ."""
    import torch

    for dtype in DTYPES:
        losses, gradients = [], []
        for loss in LOSSES:
            weights, run = arms[f"{loss}, {dtype}"]
            losses.append(run())
            gradients.append(weights.grad.float())
        torch.testing.assert_close(losses[1], losses[0], rtol=TOLERANCE[dtype], atol=0)
        error = (gradients[1] - gradients[0]).norm() / gradients[0].norm()
        assert error < TOLERANCE[dtype], f"gradients in {dtype} differ by {error}"


def peak(name: str, options: argparse.Namespace) -> float:
    """What forward and backward of one arm add to this process at most, in MiB."""
    _, run = arm(name, options)
    before = resident("VmRSS")
    run()
    return resident("VmHWM") - before


def peaks() -> dict[str, float]:
    """The peaks of all arms, each in a process of its own; empty where the system does not tell."""
    if not STATUS.exists():
        return {}
    environment = {name: value for name, value in os.environ.items() if name not in interleave.MALLOC}
    environment["MALLOC_MMAP_THRESHOLD_"] = str(2**16)
    found = {}
    for name in ARMS:
        command = [sys.executable, *sys.orig_argv[1:], "--peak-of", name]
        output = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
        found[name] = float(json.loads(output))
        print(f"peak memory, {name}: {found[name]:.0f} MiB", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=128256, help="default: Llama 3's")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="where to write the result; a .txt goes beside it")
    parser.add_argument("--peak-of", choices=ARMS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak_of is None:
        interleave.keep_freed_memory()

    import torch

    torch.set_num_threads(options.threads)
    if options.peak_of is not None:
        print(json.dumps(peak(options.peak_of, options)))
        return
    del options.peak_of  # no setting of the result
    where = interleave.origin()
    found = peaks()
    arms = {name: arm(name, options) for name in ARMS}
    check(arms)
    times = interleave.interleave({name: run for name, (_, run) in arms.items()}, options.rounds)
    settings = {name: value for name, value in vars(options).items() if name != "json"}
    result = {"benchmark": "large_vocabulary", "origin": where, "settings": settings, "seconds": times}
    interleave.write(options.json, {**result, "peak memory, MiB": found}, describe(settings, where, times, found))


def describe(
    settings: dict[str, Any], where: dict[str, Any], times: dict[str, dict[str, Any]], found: dict[str, float]
) -> str:
    """The result in a few lines."""
    logits = settings["tokens"] * settings["vocabulary"]
    lines = [
        interleave.heading(where),
        "",
        f"Last layer and loss, forward and backward: {settings['tokens']} tokens x {settings['hidden']}, vocabulary "
        f"{settings['vocabulary']}",
        f"logits take {logits * 2 / MIB:.0f} MiB in bfloat16, {logits * 4 / MIB:.0f} in float32; "
        f"{settings['rounds']} interleaved rounds",
        "",
        f"{'arm':<26}{'median s':>11}{'min s':>11}{'cpu s':>11}{'peak MiB':>11}",
    ]
    for name, seconds in times.items():
        cells = "".join(f"{seconds[key]:>11.3f}" for key in ("median", "min", "cpu median"))
        lines.append(f"{name:<26}{cells}" + (f"{found[name]:>11.0f}" if found else f"{'-':>11}"))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
