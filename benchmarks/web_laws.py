"""Laws of `benchmarks.web_scale`: what was measured at a few sizes, fitted, carried to 10^12 tokens, and in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

TOKENS, DOCUMENTS = 10**12, 10**9
"""What the laws are carried to."""
SHARD = 1 << 25
"""Tokens of a shard, as `autopack.packing.pack_shards` makes them where nobody says."""
SHARDS = -(-TOKENS // SHARD)
JOBS = (1, 64, 1024)
GIB = 2**30


def power(points: Sequence[dict[str, Any]], size: str, value: str, at: float) -> dict[str, Any]:
    """`value` = a x `size`^b by least squares of logarithms, its largest relative error, and what it says `at`."""
    x, y = (np.array([point[name] for point in points], float) for name in (size, value))
    exponent, constant = np.polyfit(np.log(x), np.log(y), 1)
    return _law("power", lambda n: np.exp(constant) * n**exponent, x, y, at) | {
        "factor": float(np.exp(constant)),
        "exponent": float(exponent),
    }


def line(points: Sequence[dict[str, Any]], size: str, value: str, at: float) -> dict[str, Any]:
    """`value` = a + b x `size` by least squares, its largest relative error, and what it says `at`."""
    x, y = (np.array([point[name] for point in points], float) for name in (size, value))
    slope, constant = np.polyfit(x, y, 1)
    return _law("line", lambda n: constant + slope * n, x, y, at) | {
        "constant": float(constant),
        "slope": float(slope),
    }


def _law(kind: str, law: Any, x: np.ndarray, y: np.ndarray, at: float) -> dict[str, Any]:
    residual = float(np.abs(law(x) / y - 1).max())
    return {"law": kind, "residual": residual, "measured to": float(x.max()), "at": at, "value": float(law(at))}


def laws(measured: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """By name, the law of each quantity, carried to `TOKENS` in `DOCUMENTS`, or to a shard or all shards of them."""
    whole, parts, writing, listing = (measured[name] for name in ("plan", "shard plans", "write", "list"))
    documents = DOCUMENTS * SHARD / TOKENS
    return {
        "one plan: seconds": power(whole, "documents", "seconds", DOCUMENTS),
        "one plan: bytes of memory": line(whole, "documents", "peak", DOCUMENTS),
        "one plan: bytes of the file": line(whole, "documents", "file", DOCUMENTS),
        "one plan: seconds to load it": power(whole, "documents", "load", DOCUMENTS),
        "one plan: bytes of a job that loads it": line(whole, "documents", "load peak", DOCUMENTS),
        "a plan per shard: seconds for one": power(parts, "documents", "seconds", documents),
        "a plan per shard: share of padding": power(parts, "documents", "padding", documents),
        "writing a shard: seconds": power(writing, "tokens", "seconds", SHARD),
        "writing a shard: bytes of memory": line(writing, "tokens", "peak", SHARD),
        "shard_files: seconds": power(listing, "files", "seconds", SHARDS),
    }


def describe(result: dict[str, Any]) -> Iterator[str]:
    """Yield the whole result in lines."""
    yield about(result["settings"])
    for name, points in result["measured"].items():
        keys = list(points[0])
        yield from ("", f"{name:<14}" + "".join(f"{key:>16}" for key in keys))
        yield from (" " * 14 + "".join(f"{point[key]:>16,.6g}" for key in keys) for point in points)
    yield from ("", f"{'law':<42}{'':<26}{'error':>8}{'measured to':>14}{'carried to':>14}{'value':>12}")
    for name, law in result["laws"].items():
        error, sizes = f"{law['residual']:>8.1%}", f"{law['measured to']:>14,.0f}{law['at']:>14,.0f}"
        yield f"{name:<42}{formula(law):<26}{error}{sizes}{law['value']:>12.4g}"
    yield from ("", *_whole(result))


def about(settings: dict[str, Any]) -> str:
    """The data, in a sentence."""
    return (
        f"Lognormal lengths of mean {settings['mean']:g} and sigma {settings['sigma']:g}, rows of "
        f"{settings['max_length']:,}, best fit, documents that are longer cut; one thread."
    )


def formula(law: dict[str, Any]) -> str:
    """A law, in a few characters."""
    if law["law"] == "power":
        return f"{law['factor']:.3g} x n^{law['exponent']:.3f}"
    return f"{law['constant']:.3g} + {law['slope']:.4g} x n"


def _whole(result: dict[str, Any]) -> Iterator[str]:
    """What the simulation of all shards gave, against the laws."""
    found = result["whole"]
    if found is None:
        yield "All shards were not simulated (--whole 0)."
        return
    seconds, padding = (result["laws"][f"a plan per shard: {name}"] for name in ("seconds for one", "share of padding"))
    yield (
        f"All of it, shard by shard: {found['documents']:,} documents, {found['tokens']:,} tokens in "
        f"{found['shards']:,} shards planned in {found['seconds']:.0f} s (the law says "
        f"{seconds['value'] * found['shards']:.0f}), {found['rows']:,} rows, "
        f"{found['padding']:.4%} padding (the law says {padding['value']:.4%}), "
        f"peak {found['peak'] / GIB:.2f} GiB, of one process."
    )


def page(result: dict[str, Any]) -> Iterator[str]:
    """Yield the tables of docs/measured.md."""
    where, found, measured = result["origin"], result["laws"], result["measured"]
    yield f"{where['device']}, {where['date'][:10]}, load at start {where['load at start']:.1f}."
    yield about(result["settings"])
    yield ""
    yield f"| for {TOKENS:,} tokens in {DOCUMENTS:,} documents | one plan of all | a plan per shard |"
    yield "|---|---|---|"

    def of(name: str) -> float:
        return found[name]["value"]

    whole_plan, shard_plan = of("one plan: seconds"), of("a plan per shard: seconds for one")
    each = f"{_time(shard_plan * SHARDS)} in all, {_time(shard_plan)} a shard"
    yield f"| planning, one core | {_time(whole_plan)} | {each} |"
    memory = of("writing a shard: bytes of memory")
    yield f"| memory of who plans | {of('one plan: bytes of memory') / GIB:.0f} GiB | that of a job |"
    loads, load = of("one plan: bytes of a job that loads it"), of("one plan: seconds to load it")
    yield f"| a job that is given the plan | {loads / GIB:.0f} GiB, {_time(load)} to load | |"
    yield f"| file of the plan | {of('one plan: bytes of the file') / GIB:.0f} GiB | none |"
    biggest = measured["plan"][-1]
    padding = f"{biggest['padding']:.4%} (of {biggest['documents']:,})"
    yield f"| padding | {padding} | {of('a plan per shard: share of padding'):.4%} |"
    write = of("writing a shard: seconds")
    jobs = ", ".join(f"{_time(write * -(-SHARDS // count))} with {count:,}" for count in JOBS)
    each, unknown = f"{_time(write)} a shard; {jobs}", "not measured: documents lie anywhere"
    yield f"| writing {SHARDS:,} shards, one core a job | {unknown} | {each} |"
    yield f"| memory of a job | the plan, and what it reads | {memory / GIB:.1f} GiB |"
    yield f"| `shard_files` of all | {_time(of('shard_files: seconds'))} | the same |"
    yield ""
    yield "| quantity | law | largest error at the sizes measured | measured to n = | carried to n = |"
    yield "|---|---|---|---|---|"
    for name, law in found.items():
        sizes = f"{law['measured to']:,.0f} | {law['at']:,.0f}"
        yield f"| {name} | {formula(law)} | {law['residual']:.1%} | {sizes} |"
    yield ""
    yield from _whole(result)


def _time(seconds: float) -> str:
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
