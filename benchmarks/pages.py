"""Write the tables of pages that show what benchmarks have recorded.

python -m benchmarks.pages            write them anew, each between the two comments that name it
python -m benchmarks.pages --check    exit with 1 where a page says something else; write nothing
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import paper_ranks, paper_table, web_laws
from benchmarks.paper_arms import ARMS, FIXED, PADDING
from benchmarks.pretrained import PACKAGES

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
Record = dict[str, Any]


def recorded(name: str) -> Record | None:
    """What a benchmark has recorded; None where it has not been run yet."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def _paper(record: Record) -> Iterator[str]:
    """The tables of `benchmarks.paper`, with `--full` or without."""
    where, settings = record["origin"], record["settings"]
    packages = f"torch {where['torch']}, transformers {where['transformers']}"
    yield f"{where['device']}, {where['threads']} threads, {packages}, {where['date'][:10]}, load at start"
    yield f"{where['load at start']:.1f}; Llama `{settings['model']}`, {settings['dtype']}, rows of"
    yield f"{settings['max_length']}, mini-batches of {settings['batch_size']}, lengths over {settings['scale']}."
    for name, data in record["data"].items():
        arms, paper = data["arms"], paper_table.published(name)
        full = bool(data.get("waits"))
        yield ""
        yield f"**{name}**, {data['documents']} documents, {data['tokens']:,} tokens; speed and memory over padding's:"
        yield ""
        head = ["batching", "steps", "speed", *(["eight in step"] if full else []), "paper", "memory", "paper"]
        yield _row([*head, "validation loss", "less padding's", "paper"])
        yield _row(["---"] * (len(head) + 3))
        for arm in ARMS:
            found, base = arms[arm], arms[PADDING]
            speed, peak, loss = paper.get(arm, (None, None, None))
            if full:
                least, median, most = found["speed"]
                cells = [f"{median:.2f}" if arm == PADDING else f"{median:.2f} ({least:.2f} to {most:.2f})"]
                cells.append(f"{paper_table.in_step(data, arm):.2f}")
            else:
                cells = [f"{found['tokens per second'] / base['tokens per second']:.2f}"]
            cells += [_range(speed, ".2f"), f"{found['peak bytes'] / base['peak bytes']:.2f}", _range(peak, ".2f")]
            mean = found["epoch"]["validation"]
            cells += [f"{mean:.4f}", f"{mean - base['epoch']['validation']:+.4f}", _range(loss, "+.3f")]
            yield _row([f"{arm} (leaks)" if arm == FIXED else arm, str(found["steps"]), *cells])
    yield ""
    yield from (f"* {'holds' if passed else 'DOES NOT HOLD'}: {text}" for passed, text in record["checks"])
    if found := record.get("expected"):
        yield f"* took {record['seconds'] / 60:.0f} minutes; expected were {found['seconds'] / 60:.0f}, of"
        yield f"  {found['operations'] / 1e12:.0f} TFLOP at {found['operations per second'] / 1e9:.0f} GFLOP/s"


def _waits(record: Record) -> Iterator[str]:
    """What was counted for `paper_full`: columns and waiting."""
    names = list(record["data"])
    yield _row(["batching", *(f"{name}: {what}" for name in names for what in ("columns per token", "largest of 8"))])
    yield _row(["---"] * (1 + 2 * len(names)))
    for arm in ARMS:
        cells = []
        for name in names:
            wait = record["data"][name]["waits"][arm]
            cells += [f"{wait['columns']:.2f}", f"{wait['largest over mean']:.2f}"]
        yield _row([arm, *cells])


def _ranks(record: Record) -> Iterator[str]:
    """The table of `benchmarks.paper_ranks`."""
    where, settings = record["origin"], record["settings"]
    yield f"{where['device']}, torch {where['torch']}, transformers {where['transformers']}, {where['date'][:10]};"
    yield f"{settings['documents']} documents with lengths like FLAN's, Llama `{settings['model']}`, rows of at most"
    yield f"{settings['max_length']} tokens."
    yield ""
    yield _row(["batching", "mini-batches of a rank", "speed, eight in step", "slowest rank", "loss apart"])
    yield _row(["---"] * 5)
    for accumulation, found in record["found"].items():
        base = found[PADDING]["tokens per second"]
        for arm, each in found.items():
            of_documents = arm != paper_ranks.OFFLINE
            apart = f"{paper_ranks.difference(found, arm):.0e}" if of_documents else "other steps"
            speed, slowest = each["tokens per second"] / base, each["slowest over mean"]
            batches = accumulation if of_documents else "one row"
            yield _row([arm, batches, f"{speed:.2f}", f"{slowest:.2f}", "" if arm == PADDING else apart])
    yield ""
    yield from (f"* {'holds' if passed else 'DOES NOT HOLD'}: {text}" for passed, text in record["checks"])


def _pretrained(record: Record) -> Iterator[str]:
    """The table of `benchmarks.pretrained`, with what was measured on."""
    arms = ("enabled", "packed", "alone")
    yield _row(["real tokens per second, relative to stock on padded batches", "enabled", "packed row", "alone"])
    yield "|---|---|---|---|"
    for task, speed in record["speed of stock"].items():
        yield _row([task, *(f"{speed[arm]['median']:.1f} ×" if arm in speed else "" for arm in arms)])
    where, rounds = record["origin"], record["settings"]["rounds"]
    off = max(max(found.values()) for found in record["largest differences"].values())
    versions = [f"{name} {where[name]}" for name in ("torch", "transformers", *PACKAGES)]
    said = (
        f"Medians of {rounds} interleaved rounds on {where['cores']} cores ({where['device']}), load at start "
        f"{where['load at start']:.1f}, float32; embeddings and losses of all arms are those of each text alone within "
        f"{off:.0e}. {', '.join(versions)} ([record](../benchmarks/results/pretrained.txt))."
    )
    yield from ("", *textwrap.wrap(said, 130, break_long_words=False, break_on_hyphens=False))


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _range(bounds: tuple[float, float] | None, form: str) -> str:
    return paper_table.range_of(bounds, form, between=" to ", none="")


Block = tuple[str, str, str, Callable[[Record], Iterator[str]]]
BLOCKS: tuple[Block, ...] = (
    ("docs/paper.md", "paper_full", "paper_full", _paper),
    ("docs/paper.md", "waits", "paper_full", _waits),
    ("docs/paper.md", "paper", "paper", _paper),
    ("docs/paper.md", "paper_ranks", "paper_ranks", _ranks),
    ("docs/pretrained.md", "pretrained", "pretrained", _pretrained),
    ("docs/scale.md", "web_scale", "web_scale", web_laws.page),
)
"""The page, the name of the block in it, the record, and what makes its lines."""


def written(page: str, text: str) -> str:
    """A page's text with everything that is generated as it has to be; raises `ValueError` where a place is missing."""
    for path, name, record, block in BLOCKS:
        if path != page:
            continue
        first, last = f"<!-- {name}: written by `python -m benchmarks.pages` -->\n", f"\n<!-- /{name} -->"
        if text.count(first) != 1 or text.count(last) != 1:
            raise ValueError(f"{page} wants the two lines {first.strip()!r} and {last.strip()!r} once")
        found = recorded(record)
        made = "Not recorded yet." if found is None else "\n".join(block(found))
        before, _, rest = text.partition(first)
        text = before + first + made + last + rest.partition(last)[2]
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    """Write all pages anew, or with `--check` return 1 where that would change one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where a page is out of date")
    check, stale = parser.parse_args(arguments).check, False
    for page in dict.fromkeys(path for path, *_ in BLOCKS):
        path = ROOT / page
        present = path.read_text(encoding="utf-8")
        wanted = written(page, present)
        if not check:
            path.write_text(wanted, encoding="utf-8")
        elif wanted != present:
            stale = True
            print(f"{page} is not what the records give; run `python -m benchmarks.pages`.")
    return int(stale)


if __name__ == "__main__":
    sys.exit(main())
