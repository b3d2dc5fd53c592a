"""Record the code that the survey of the installed transformers ran, function by function, by digests.

    python -m compat.content                   write what the package carries of the installed release
    python -m compat.content --check           fail where that is not what is written; writes nothing
    python -m compat.content --against 5.23.0  by task, which types have here the code of a recorded release, and what
                                               keeps the others from it; --reasons also names the first types of each

A release is surveyed first (`python -m compat.survey`). A model of any release whose code is the recorded one, comments
and annotations aside, is covered by that survey (docs/trust.md).
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import transformers
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from autopack import tiny
from autopack.trust.content import TABLES, Content, entry, file_digest, root_of_entry
from autopack.trust.data import content_of, load, nearest, survey_of
from autopack.trust.own import class_name
from compat.closure import Closure, Piece, file_of

_MODELS = "transformers.models."
_TASKS = ("causal-lm", "masked-lm", "seq2seq", "sequence-classification")


def recorded(release: str) -> dict[str, Any]:
    """What the package carries of the installed code, for the classes that the survey of a release has."""
    roots = dict(_roots(load(survey_of(release))["types"]))
    reached = {name: Closure(*pieces, large=large).pieces for name, (pieces, large) in sorted(roots.items())}
    by_module: dict[str, set[str]] = defaultdict(set)
    for pieces in reached.values():
        for module, piece in pieces:
            by_module[module].add(piece)
    order = {module: {piece: n for n, piece in enumerate(sorted(found))} for module, found in sorted(by_module.items())}
    parts: dict[tuple[int, str], int] = {}
    lists: dict[str, list[int]] = {}
    for name, pieces in reached.items():
        bits: dict[int, int] = defaultdict(int)
        for module, piece in pieces:
            bits[list(order).index(module)] |= 1 << order[module][piece]
        told = [(number, f"{found:x}") for number, found in sorted(bits.items())]
        lists[name] = sorted(parts.setdefault(part, len(parts)) for part in told)
    return {
        "with": {"transformers": release},
        "files": {module.removeprefix("transformers."): file_digest(module) for module in order},
        "pieces": {module.removeprefix("transformers."): _told(module, list(names)) for module, names in order.items()},
        "parts": [list(part) for part in parts],
        "roots": lists,
    }


def _told(module: str, pieces: list[str]) -> str:
    source = file_of(module)
    assert source is not None
    return " ".join(f"{piece}:{source.digest(piece)}" for piece in pieces)


def _roots(types: dict[str, Any]) -> Iterator[tuple[str, tuple[list[Piece], bool]]]:
    """By name what code starts from: classes of models and configurations, and entries of tables."""
    for entry_of_type in types.values():
        for name in entry_of_type["classes"]:
            module, _, cls = name.rpartition(".")
            yield name, ([(_MODELS + module, cls)], True)
    parts = (found for e in types.values() for field, found in e["fields"].items() if field.endswith("config"))
    words = {word for found in parts for word in found}
    for model_type in sorted({*types, *words} & set(CONFIG_MAPPING.keys())):
        config = CONFIG_MAPPING[model_type]
        yield class_name(config), ([(config.__module__, config.__name__)], False)
        for cls in _auto_classes(config):
            yield class_name(cls), ([(cls.__module__, cls.__name__)], True)
    for table in TABLES:
        for key in keys_of(table):
            yield root_of_entry(table, key), ([entry(table, key)], False)


def _auto_classes(config: Any) -> Iterator[type]:
    """The classes that stand for a part of a model of another type."""
    for mapping in ("MODEL_MAPPING", "MODEL_FOR_BACKBONE_MAPPING"):
        found = getattr(modeling_auto, mapping)
        if config in found:
            yield from found[config] if isinstance(found[config], tuple) else (found[config],)


def keys_of(table: str) -> list[str]:
    """The keys of a table of the installed release; none where it has no such table, or where it is no literal."""
    module, piece = TABLES[table]
    source = file_of(module)
    return [] if source is None else source.keys(piece)


def _meant(data: dict[str, Any]) -> dict[str, Any]:
    """A record by what it says: how its parts are numbered does not matter."""
    roots = {name: sorted(tuple(data["parts"][part]) for part in parts) for name, parts in data["roots"].items()}
    return {**data, "parts": None, "roots": roots}


def write(data: dict[str, Any]) -> None:
    """Write what the package carries; the same data give the same bytes."""
    text = json.dumps(data, separators=(",", ":"))
    content_of(data["with"]["transformers"]).write_bytes(gzip.compress(text.encode(), 9, mtime=0))


def against(release: str) -> tuple[dict[str, Counter[bool]], dict[str, list[str]]]:
    """By task, how many types are covered by the code of a release or are not; by reason, the classes that are not."""
    content = Content.of(release)
    counts: dict[str, Counter[bool]] = defaultdict(Counter)
    reasons: dict[str, list[str]] = defaultdict(list)
    classes = {name for e in load(survey_of(release))["types"].values() for name in e["classes"]}
    for task in _TASKS:
        for model_type in tiny.types_for(task):
            cls = _class_for(model_type, task)
            if cls is None or class_name(cls) not in classes:
                continue
            names = [class_name(cls), class_name(CONFIG_MAPPING[model_type]), root_of_entry("loss", "ForCausalLM")]
            names += [root_of_entry(table, "sdpa") for table in ("attention", "mask")]
            reason = content.why_other(name for name in names if content.knows(name))
            counts[task][reason is None] += 1
            if reason is not None:
                reasons[reason].append(class_name(cls))
    return counts, reasons


def _class_for(model_type: str, task: str) -> type | None:
    names = {"causal-lm": "CAUSAL_LM", "masked-lm": "MASKED_LM", "seq2seq": "SEQ_TO_SEQ_CAUSAL_LM"}
    mapping = getattr(modeling_auto, f"MODEL_FOR_{names.get(task, 'SEQUENCE_CLASSIFICATION')}_MAPPING")
    found = mapping.get(CONFIG_MAPPING[model_type], None)
    return found[0] if isinstance(found, tuple) else found


def main() -> int:
    """Write or compare; 1 where the record is not that of the installed code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="fail where the record is another one; write nothing")
    parser.add_argument("--against", metavar="RELEASE", help="compare the installed code with a recorded release")
    parser.add_argument("--reasons", action="store_true", help="say what differs, and how many classes it concerns")
    arguments = parser.parse_args()
    if arguments.against:
        counts, reasons = against(arguments.against)
        for task, found in counts.items():
            print(f"{transformers.__version__} {task}: {found[True]} of {found.total()} as in {arguments.against}")
        for reason, names in sorted(reasons.items(), key=lambda item: -len(item[1])) if arguments.reasons else ():
            print(f"  {len(names):4} {reason} ({', '.join(name.rpartition('.')[2] for name in names[:3])})")
        return 0
    release = transformers.__version__
    if not survey_of(release).exists():
        print(f"transformers {release} has not been surveyed, only {', '.join(nearest(release))} has", file=sys.stderr)
        return 1
    data = json.loads(json.dumps(recorded(release)))
    if arguments.check:
        same = content_of(release).exists() and _meant(load(content_of(release))) == _meant(data)
        print("The recorded code is the installed one." if same else "It differs; run `python -m compat.content`.")
        return 0 if same else 1
    write(data)
    size = content_of(release).stat().st_size
    count = sum(len(text.split(" ")) for text in data["pieces"].values())
    roots, files = len(data["roots"]), len(data["files"])
    print(f"{content_of(release).name}: {roots} roots, {count} pieces of {files} files, {size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
