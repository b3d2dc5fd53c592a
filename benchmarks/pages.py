"""Write docs/measured.md: the tables of benchmarks whose records take a page.

python -m benchmarks.pages            write it anew
python -m benchmarks.pages --check    exit with 1 if it says something else; write nothing
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


_PAPER = """
"Enhancing Training Efficiency Using Packing with Flash Attention" ([arXiv 2407.09105](https://arxiv.org/abs/2407.09105))
compares ways of batching on eight GPUs with models of seven and eight billion parameters. `python -m benchmarks.paper
--full` compares them on two CPU cores with a small Llama, at the paper's lengths and mini-batches. Which losses are
equal carries over, and so do ratios that follow from counting.

| batching | a step is | a token sees |
|---|---|---|
| `padding` | 4 documents, padded to the longest | its document; stock |
| `padding, sorted` | 4 documents of like length (`group_by_length`) | its document; stock |
| `FixedLength (leaks)` | 4 full rows of all documents end to end, cut at row ends | all before it in the row; stock |
| `FixedLength + PosID` | the same rows, with positions | its piece; enabled |
| `offline rows + PosID` | one row of as many documents as 4 rows hold | its document; enabled |
| `multipack + PosID` | 4 bins that are filled by first-fit decreasing | its document; enabled |
| `MiniBatch + PosID` | the 4 documents of `padding` in one row | its document; enabled |

FLAN's lengths are lognormal with the paper's mean (471) and sigma 1. Of OrcaMath's, 500 and 0.4 are assumed. Text is
of a small grammar, so differences of losses are compared. Speed is of real tokens, the median of rounds (least to
greatest). *Eight in step* multiplies it by the gain or loss of waiting on eight devices (below). Batchings with full
rows make several times fewer steps in an epoch, so their losses are higher, here as in the paper.
"""
_WAITS = """
*Columns per token* is the work of one device, padding too. *Largest of 8* is the largest mini-batch of a step over the
mean: eight devices lose that by waiting. Both are counted over 20,000 documents. They predict for FLAN that full rows
are 5.0 times as fast as padding and mini-batches 2.6 times; the paper measured 4.0 and 1.9. Two more things differ
there. Attention weighs less in a large model, so padding costs little more than its columns. Memory is mostly
parameters and states of the optimizer, which no batching changes.
"""
_RANKS = """
`python -m benchmarks.paper_ranks` runs eight ranks one after the other and takes the slowest of each step; exchange
between ranks is not in it. `MiniBatch, regrouped` is [`max_tokens`](steps.md): the losses of mini-batches at the speed
of full rows. With one mini-batch of 4 per rank, a step takes as long as its longest document; with four, all ranks
have the same to do.
"""
_EIGHTH = """
The same with 800 documents and a smaller model, where Python takes a larger share of a step
([record](../benchmarks/results/paper.txt)):
"""
_WEIGHTS = """
all-MiniLM-L6-v2 and SmolLM2-135M on text of the Python installation ([how](../examples/pretrained/README.md)):
"""
_CORPUS = """
`python -m benchmarks.web_scale` plans and writes a corpus for [`pack_shards`](packing.md#beyond-one-machine). Costs are
measured at three sizes and carried on by the law that is shown; the planning of all 10^9 lengths was run. Disks and
networks slower than the one measured are not in it. Memory is the largest resident memory of a process, with the
pages of the corpus that it maps.
"""
Section = tuple[str, str, str, Callable[[Record], Iterator[str]]]
SECTIONS: tuple[Section, ...] = (
    ("The paper's comparison", _PAPER, "paper_full", _paper),
    ("Why ratios differ from the paper's", _WAITS, "paper_full", _waits),
    ("The paper's steps on eight ranks", _RANKS, "paper_ranks", _ranks),
    ("The paper's comparison, lengths divided by eight", _EIGHTH, "paper", _paper),
    ("Pretrained models", _WEIGHTS, "pretrained", _pretrained),
    ("A corpus of 10^12 tokens", _CORPUS, "web_scale", web_laws.page),
)
"""The title of a section, its words, its record, and a function that makes the lines of its table."""


def page() -> str:
    """Return the text of docs/measured.md."""
    parts = ["# Measured\n\nWritten by `python -m benchmarks.pages` from [records](../benchmarks/README.md).\n"]
    for title, words, name, block in SECTIONS:
        record = recorded(name)
        table = "Not recorded yet." if record is None else "\n".join(block(record))
        parts.append(f"## {title}\n{words}\n{table}\n")
    return "\n".join(parts)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page anew, or with `--check` return 1 if that would change it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the page is out of date")
    check = parser.parse_args(arguments).check
    path, wanted = ROOT / "docs" / "measured.md", page()
    if not check:
        path.write_text(wanted, encoding="utf-8")
    elif not path.is_file() or path.read_text(encoding="utf-8") != wanted:
        print("docs/measured.md is not what the records give; run `python -m benchmarks.pages`.")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
