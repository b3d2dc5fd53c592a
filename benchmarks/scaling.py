"""The cost of attention against the length of the row: it is to grow as the sum of the squared lengths of documents.

    python -m benchmarks.scaling                                        rows of 1k to 32k, some minutes on two cores
    python -m benchmarks.scaling --tokens 256 512 1024 --rounds 2       a first look
    python -m benchmarks.scaling --json benchmarks/results/scaling.json

A forward pass (or, with --backward, that and its gradients) of one attention layer on rows of T tokens: a Llama's
backbone of one layer, whose MLP is as good as none. The arms, with the same weights:

* `enabled, documents`: documents of a fixed mean length, on an enabled model. The sum of their squares is linear in T.
* `enabled, one document`: a single document of T tokens on the enabled model. T squared: quadratic.
* `stock, dense mask`: the same documents in stock transformers, whose mask over the whole row hides all but
  the documents, and whose attention computes it all: quadratic, although the squares of the documents are not.

Rows of stock whose mask would need more than the memory that is free (--memory) are left out, and are named.

Exponents are slopes of least squares of log(median seconds) over log(sum of squared lengths), and over log(T), at rows
of at least --fit-from tokens: below that a call costs what a call costs. 1 over the squares is what is claimed.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from autopack.bench.contest import Batch
from autopack.bench.subjects import SHORTEST, Lengths
from benchmarks import interleave, workload

PACKED, SINGLE, STOCK = "enabled, documents", "enabled, one document", "stock, dense mask"
ARMS = (PACKED, SINGLE, STOCK)
BYTES_OF_PAIR = 8
"""What stock takes at once for a pair of columns, of masks of several dtypes: 6 to 7.5 were measured."""
TOLERANCE = 1e-4
GIB = 2**30


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = interleave.parser(__doc__, rounds=5)
    sizes = [1024 * 2**n for n in range(6)]
    parser.add_argument("--tokens", type=int, nargs="+", default=sizes, help="tokens of the rows (%(default)s)")
    parser.add_argument("--mean", type=float, default=400, help="tokens of a document (%(default)s)")
    parser.add_argument("--sigma", type=float, default=0.5, help="of the logarithm of their lengths (%(default)s)")
    parser.add_argument("--heads", type=int, default=2, help="of 64 (%(default)s)")
    parser.add_argument("--backward", action="store_true", help="the gradients of the parameters too")
    parser.add_argument(
        "--fit-from", type=int, help="fit rows of so many tokens and more (a quarter of the sizes, 4096)"
    )
    parser.add_argument("--memory", type=float, help="GiB that stock's mask may take (most of what is free)")
    options = parser.parse_args(arguments)
    options.tokens = sorted(set(options.tokens))
    if len(options.tokens) < 2:
        parser.error("wanted at least two sizes of rows in --tokens: a slope takes two")
    if options.fit_from is None:
        options.fit_from = min(4096, options.tokens[len(options.tokens) // 4])
    if sum(size >= options.fit_from for size in options.tokens) < 2:
        parser.error(f"--fit-from {options.fit_from} leaves fewer than two sizes of {options.tokens}")
    return options


def documents_of(tokens: int, options: argparse.Namespace) -> list[int]:
    """Return lengths of documents that fill a row."""
    return workload.filling(tokens, Lengths(options.mean, options.sigma), options.seed, SHORTEST, tokens)


def build(options: argparse.Namespace) -> Any:
    """Return one layer of attention, with as little of a Llama around it as there can be."""
    sizes: dict[str, Any] = {"head_dim": 64, "intermediate_size": 8, "max_position_embeddings": max(options.tokens)}
    return workload.llama(1, 64, options.heads, 128, seed=options.seed, base=True, use_cache=False, **sizes)


def call_of(documents: list[int], seed: int) -> dict[str, Any]:
    """Return a packed row of random tokens."""
    import torch

    import autopack

    row = Batch.of(documents, torch.arange(128), seed, "cpu").row(autopack.PackingCollator())
    del row["labels"]
    return row


def forward(model: Any, call: dict[str, Any], backward: bool) -> Any:
    """One pass of an arm; the states (1, tokens, 64)."""
    import torch

    with torch.set_grad_enabled(backward):
        states = model(**call).last_hidden_state
        if backward:
            states.square().mean().backward()
            model.zero_grad(set_to_none=True)
    return states.detach()


def free_memory() -> float:
    """GiB that a mask may take: three quarters of what is available."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("MemAvailable"))) * 1024 / GIB * 0.75


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Times of all arms at all sizes: interleaved within a size, after stock and enabled were found to agree."""
    import autopack

    stock = build(options)
    enabled = copy.deepcopy(stock)
    autopack.enable(enabled)
    memory = free_memory() if options.memory is None else options.memory
    found: dict[str, list[dict[str, Any]]] = {arm: [] for arm in ARMS}
    left_out = []
    for tokens in options.tokens:
        documents = documents_of(tokens, options)
        row, single = call_of(documents, options.seed), call_of([tokens], options.seed)
        arms = {PACKED: (enabled, row, documents), SINGLE: (enabled, single, [tokens])}
        needed = tokens**2 * BYTES_OF_PAIR / GIB
        if needed <= memory:
            arms[STOCK] = (stock, row, documents)
        else:
            left_out.append(f"{STOCK}, {tokens} tokens: needs about {needed:.1f} GiB, and {memory:.1f} may be taken")
        warm = {arm: forward(model, call, options.backward) for arm, (model, call, _) in arms.items()}
        if STOCK in warm:
            off = float((warm[STOCK] - warm[PACKED]).abs().max())
            assert off <= TOLERANCE, f"stock and enabled differ by {off:.1e} in rows of {tokens} tokens"
        runs = {arm: _run(model, call, options.backward) for arm, (model, call, _) in arms.items()}
        for arm, times in interleave.interleave(runs, options.rounds, report=None).items():
            lengths = arms[arm][2]
            sums = {"tokens": tokens, "documents": len(lengths), "squares": sum(n * n for n in lengths)}
            found[arm].append({**sums, "seconds": times})
        said = ", ".join(f"{arm} {found[arm][-1]['seconds']['median']:.4f} s" for arm in arms)
        print(f"{tokens} tokens: {said}", flush=True)
    return {"arms": found, "left out": left_out}


def _run(model: Any, call: dict[str, Any], backward: bool) -> Any:
    return lambda: forward(model, call, backward)


def exponents(points: list[dict[str, Any]], fit_from: int) -> dict[str, float] | None:
    """Slopes of log(median seconds) over log of what is counted, by least squares; None for fewer than two rows."""
    fitted = [point for point in points if point["tokens"] >= fit_from]
    if len(fitted) < 2:
        return None
    seconds = np.log([point["seconds"]["median"] for point in fitted])
    return {name: float(np.polyfit(np.log([p[name] for p in fitted]), seconds, 1)[0]) for name in ("squares", "tokens")}


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    where = interleave.begin(options)
    found = measure(options)
    fits = {arm: exponents(points, options.fit_from) for arm, points in found["arms"].items()}
    result = interleave.result_of("scaling", options, where, **found, exponents=fits)
    interleave.write(options.json, result, describe(result))


def describe(result: dict[str, Any]) -> Iterator[str]:
    """Yield the result in a few lines."""
    settings = result["settings"]
    work = "forward and backward" if settings["backward"] else "forward"
    documents = f"documents of {settings['mean']:g} tokens on average; {settings['rounds']} interleaved rounds"
    yield from (f"One attention layer of {settings['heads']} heads of 64, fp32, {work}; {documents}", "")
    head = f"{'arm':<24}{'tokens':>8}{'documents':>11}{'sum of squares':>16}"
    yield f"{head}{'median s':>11}{'min s':>11}{'cpu s':>11}"
    for arm, points in result["arms"].items():
        for point in points:
            counts = f"{point['tokens']:>8}{point['documents']:>11}{point['squares']:>16.3g}"
            yield f"{arm:<24}{counts}{interleave.cells(point['seconds'], '>11.4f')}"
    yield from ("", f"{'exponent of the clock':<24}{'over squares':>19}{'over tokens':>16}")
    for arm, fit in result["exponents"].items():
        squares, tokens = (f"{fit[name]:.2f}" if fit else "-" for name in ("squares", "tokens"))
        yield f"{arm:<24}{squares:>19}{tokens:>16}"
    yield from ("", f"Fitted to rows of {settings['fit_from']} tokens and more.", *result["left out"])


if __name__ == "__main__":
    main()
