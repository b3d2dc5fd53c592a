"""Write README's numbers: what stock does, measured here, and what recorded results say.

python -m compat.readme            write them anew, each between the two comments that name it
python -m compat.readme --check    exit with 1 where README.md says something else; write nothing
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import autopack
from autopack import registry, tiny
from autopack.architectures.encoder_decoders import WHOLE_HALF as HALVES
from autopack.mixers import OneByOne
from compat import study
from compat.exactness import has, page_of, recorded
from compat.matrix import ROOT, load_matrix
from compat.tables import cells_of, counts, load_results, markdown_table, share

README = ROOT / "README.md"

TASKS = {
    "causal-lm": "causal language model",
    "masked-lm": "masked language model",
    "seq2seq": "sequence to sequence",
    "sequence-classification": "sequence classification",
    "image-text-to-text": "image and text to text",
}
"""The tasks in words; one that has none goes by its name."""

Cells = dict[str, dict[str, Any]]
"""What was recorded of one model type: a result by backend."""


def served() -> str:
    """The table of what is served: the numbers of types by task. Their table has the reasons."""
    types = f"types of transformers {_release()}"
    said = "exact", "with images", "refused", "leaking", "could not be run"
    rows = [["task of the model's class", types, *said]]
    rows += [_row(task, results) for task, results in recorded().items()]
    whole = [
        f
        for f in registry.families()
        if any(isinstance(way, OneByOne) for way in f.mixers.values())
    ]
    models = sorted(name for f in whole if f.name != HALVES.name for name in f.model_types)
    remark = (
        f"Reasons are in the linked tables. For {_listed(models)} nothing less "
        f"than the whole model, for {_listed(sorted(HALVES.model_types))} nothing less than the "
        "whole encoder or decoder keeps them apart: that is run on each document alone, and "
        "`enable` warns of it."
    )
    return "\n".join([*markdown_table(rows), "", _filled(remark)])


def _filled(text: str) -> str:
    words = " ".join(text.split())
    return textwrap.fill(words, 130, break_on_hyphens=False, break_long_words=False)


def _exact(results: dict[str, Cells]) -> list[str]:
    return [
        name for name, cells in results.items() if has(cells, "exact") and not has(cells, "LEAK")
    ]


def _row(task: str, results: dict[str, Cells]) -> list[str]:
    exact, types = _exact(results), {f for each in registry.families() for f in each.refused_types}
    leaking = [name for name, cells in results.items() if has(cells, "LEAK")]
    refused = [
        name
        for name, cells in results.items()
        if name not in {*exact, *leaking} and (has(cells, "refused") or name in types)
    ]
    images = [name for name in exact if has(results[name], "exact", key="images")]
    rest = len(results) - len(exact) - len(leaking) - len(refused)
    counted = (*map(len, (results, exact, images, refused, leaking)), rest)
    link = f"[{TASKS.get(task, task)}](compat/results/{page_of(task).name})"
    return [link, *map(str, counted)]


def _listed(names: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def versions() -> str:
    """The releases of transformers that are recorded, and what came out."""
    matrix = load_matrix()
    results = list(load_results(matrix).values())
    found: Counter[str] = sum(map(counts, results), Counter())
    cells = [cell for result in results for cell in cells_of(result)]
    left = {
        name: sum(cell["status"] == "exact" and name in cell for cell in cells)
        for name in ("padded", "labels")
    }
    first, last = matrix.releases[0].minor, matrix.releases[-1].minor
    text = f"""Tested with every minor release of transformers {first} to {last}, with all model types of each in eager,
    sdpa, flash and flex: {found["exact"]:,} cells are exact by the default call, {share(found)} of what stock runs;
    {found["refused"]:,} refused, {found["LEAK"] + found["crash"]} wrong; padded batches of
    {left["padded"]:,} stay as they came and packed labels of {left["labels"]:,} are refused; see
    [compat/results/README.md](compat/results/README.md)."""
    return _filled(text)


def summary() -> str:
    """What is served, in a few lines: types by task, and cells of all releases."""
    counted = []
    for task, results in recorded().items():
        pictures = sum(has(cells, "exact", "images") for cells in results.values())
        also = f", {pictures} with images" if pictures else ""
        counted.append(f"{len(_exact(results))} of {len(results)} ({TASKS.get(task, task)}{also})")
    matrix = load_matrix()
    releases = list(load_results(matrix).values())
    found: Counter[str] = sum(map(counts, releases), Counter())
    text = f"""With transformers {_release()} {_listed(counted)} model types are exact, and none leaks
    ([tables](docs/reliability.md#model-types-and-releases)); with {len(releases)} releases from
    {matrix.releases[0].minor} to {matrix.releases[-1].minor} it is so of {found["exact"]:,} pairs of a type
    and a backend, {found["LEAK"] + found["crash"]} are wrong, and the rest are refused
    ([releases](compat/results/README.md)). `enable` tests a tiny random copy of your model first, in about a
    second; some of its later calls are tested too ([how](docs/trust.md))."""
    return _filled(text)


NEEDS = {
    "Llama, `position_ids` and `use_cache=False`": ("llama", "use_cache=False"),
    "Llama, `position_ids` alone: the cache is on by default": ("llama", "default"),
    "Llama, an `attention_mask` of ones beside them": ("llama", "all-ones mask"),
    "Llama, two packed rows in a batch": ("llama", "two rows"),
    "OPT: absolute positions": ("opt", "use_cache=False"),
    "GPT-OSS: windows and sinks": ("gpt_oss", "use_cache=False"),
    "Mamba-2: a recurrence": ("mamba2", "default"),
    "BERT, `position_ids`": ("bert", "default"),
}
"""Packed calls that users make: a model type and a mode of the auditor, by the words of README's
table."""


def needed() -> str:
    """Measure packed rows of tiny models in stock transformers, and enabled: a table of what
    leaks."""
    rows = [[f"packed rows, transformers {_release()}", "stock", "enabled"]]
    for words, (model_type, mode) in NEEDS.items():
        model = tiny.build(model_type, task="masked-lm" if model_type == "bert" else "causal-lm")
        ask = partial(autopack.audit, model, modes=(mode,), training=(False,), gradients=False)
        stock = ask()
        with autopack.enable(model):
            enabled = ask()
        said = ("exact" if report.exact else "**leaks**" for report in (stock, enabled))
        rows.append([words, *said])
    return "\n".join(markdown_table(rows))


def _release() -> str:
    """That of the record, such as 5.23."""
    return ".".join(study.recorded("exactness")["with"]["transformers"].split(".")[:2])


BLOCKS: dict[str, Callable[[], str]] = {"needed": needed, "served": summary}
"""What is generated, by the name that the comments around it have."""


def written(text: str) -> str:
    """README's text with everything that is generated as it has to be. Raises `ValueError` where a
    place is missing."""
    for name, block in BLOCKS.items():
        first = f"<!-- {name}: written by `python -m compat.readme` -->"
        text = study.between(text, first, f"<!-- /{name} -->", block)
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    """Write README.md anew, or with `--check` return 1 where that would change it."""
    pages = lambda: {README: written(README.read_text(encoding="utf-8"))}  # noqa: E731
    return study.write_pages(__doc__, pages, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
