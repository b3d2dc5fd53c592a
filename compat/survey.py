"""Audit every type of transformers in every configuration that differs in one field, and record which are exact.

    python -m compat.survey                        all types and tasks; goes on where an earlier run was stopped
    python -m compat.survey --types llama bert     some types, printed only; with --record also merged into the results
    python -m compat.survey --task masked-lm       some tasks
    python -m compat.survey --report               write the results of the log again, without running anything

For every class of every type the tiny model is audited in the implementations that it has, then tiny ones of its
published configurations (`compat/published`), then one variant of its configuration after the other
(`compat/variants.py`), but for fields that an earlier class of the type has been through and that no module class new
with this one mentions. What was run is kept in a log, a line per class; the results are the file of the release in
`autopack/surveyed/`, by which `enable` knows what has been measured, and a page in `compat/results`.
"""

from __future__ import annotations

import argparse
import inspect
import json
import logging
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from enum import Enum, auto
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm import tqdm

from autopack import tiny
from autopack.enabling.reading import LENGTHS
from autopack.inspection import releases
from autopack.inspection.heads import row_head
from autopack.proving import twin
from autopack.tiny.models import randomize
from autopack.trust import configuration
from autopack.trust.own import class_name
from compat import survey_results as results
from compat.outcome import outcome
from compat.published import PUBLISHED, measure
from compat.variants import Variant, variants

LOG = Path(__file__).parent / ".survey.jsonl"
_FIRST = ("causal-lm", "masked-lm", "seq2seq", "image-text-to-text", "sequence-classification")
"""Tasks that `compat.exactness` runs in all call modes, with gradients."""
_NO_TASK = ("base", "text-encoding", "pretraining")
TASKS = (*_FIRST, "base", *(task for task in tiny.TASKS if task not in _FIRST), *_NO_TASK[1:])
"""Those of tiny models, and what the auto classes without a task give."""
_AUTO = {"base": "MODEL", "text-encoding": "MODEL_FOR_TEXT_ENCODING", "pretraining": "MODEL_FOR_PRETRAINING"}
_PADDED = ("right-padded", "left-padded", "right-padded, no labels")
_LENGTHS = (13, 6)
"""On both sides of the thresholds that `compat.variants` sets; a row of them is past every one."""


class Depth(Enum):
    """How far a model is audited: rows alone, with training and padded batches, or as `enable` audits one."""

    ROWS = auto()
    TRAINED = auto()
    AS_ENABLE = auto()


# One row in order, one in reverse: every document stands in two columns and has other neighbours.
_DEPTHS: dict[Depth, dict[str, Any]] = {
    Depth.ROWS: {"modes": ("two rows",), "training": (False,), "gradients": False, "lengths": _LENGTHS},
    Depth.TRAINED: {"modes": ("two rows", *_PADDED), "training": (True,), "lengths": _LENGTHS},
    Depth.AS_ENABLE: {"lengths": LENGTHS},
}
_OF_ALL = frozenset({*vars(transformers.PretrainedConfig()), "num_labels", "problem_type"})
"""Fields that every configuration has, whether or not its models read them."""


def survey(
    model_type: str,
    task: str,
    flipped: dict[str, set[str]],
    known: frozenset[tuple[str, str]] = frozenset(),
    base_only: bool = False,
) -> dict[str, Any]:
    """Audit one class in all variants; `flipped` has, by field, the classes that mention it and have had it changed.

    `known` are the classes, by type, that another task has named. `base_only` leaves the variants out.
    """
    entry: dict[str, Any] = {"type": model_type, "task": task, "implementations": [], "variants": [], "flipped": {}}
    try:
        model = build(model_type, task, "eager")
    except tiny.CannotBuild as error:
        return {**entry, "status": "not built", "reason": error.reason}
    whole = tiny.config(model_type, task=task if task in tiny.TASKS else "causal-lm")
    entry |= {"class": class_name(type(model)), "config": model.config.model_type}
    if (entry["config"], entry["class"]) in known:
        return {**entry, "status": "done for another task"}
    words: configuration.Words = {}
    has_sdpa = "sdpa" in releases.supported_implementations(model)
    # Of the newest release compat.exactness measures the first tasks; of others nobody else has.
    depth = Depth.AS_ENABLE if base_only else Depth.ROWS if task in _FIRST else Depth.TRAINED
    for implementation in ("eager", "sdpa")[0 if task in _FIRST else int(has_sdpa) : 1 + has_sdpa]:
        found = _audited(model_type, task, implementation, {}, words, depth)
        entry |= {"status": found["status"], "reason": found.get("reason", "")}
        if found["status"] != "exact":
            return {**entry, "reason": f"{implementation}: {entry['reason']}"}
        entry["implementations"].append(implementation)
    for name in _published(model):
        found = _audited_model(partial(_twin_of_published, name), words, depth)
        entry["variants"].append({"name": f"{entry['config']}.published={name}", **found})
    if base_only:
        return {**entry, "words": _listed(words), "base only": True}
    base = model.config
    for variant in _left(variants(model, whole), model, flipped, entry["flipped"]):
        # What is chosen by a flag or a name is more often than not a way of eager attention.
        implementation = entry["implementations"][0 if isinstance(variant.value, (bool, str)) else -1]
        found = _audited(model_type, task, implementation, variant.overrides(), words, base=base)
        entry["variants"].append({"name": variant.name, **found})
    implementation = entry["implementations"][-1]
    if _has_experts(model):
        for name in ("eager", "batched_mm", "grouped_mm"):
            overrides = {"_experts": name}
            found = _audited(model_type, task, implementation, overrides, words)
            entry["variants"].append({"name": f"{entry['config']}.experts={name}", **found})
    return {**entry, "words": _listed(words)}


def build(model_type: str, task: str, implementation: str, **overrides: Any) -> Any:
    """A tiny model of a type for a task of this survey, with experts computed as asked for by `_experts`."""
    experts = overrides.pop("_experts", None)
    if task in tiny.TASKS:
        model: Any = tiny.build(model_type, task=task, attn_implementation=implementation, **overrides)
    else:
        model = _without_task(model_type, task, implementation, overrides)
    if experts is not None:
        model.set_experts_implementation(experts)
    return model


def _without_task(model_type: str, task: str, implementation: str, overrides: dict[str, Any]) -> Any:
    from transformers.models.auto import modeling_auto

    config = tiny.config(model_type, **overrides)
    try:
        cls = getattr(modeling_auto, f"{_AUTO[task]}_MAPPING")[type(config)]
        cls = cls[0] if isinstance(cls, tuple) else cls
        fitting = [part for part in (config, *vars(config).values()) if isinstance(part, cls.config_class)]
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            model = cls._from_config(next(iter(fitting), config), attn_implementation=implementation)
    except Exception as error:
        raise tiny.CannotBuild(model_type, error) from error
    randomize(model, 0)
    return model.eval()


def types_for(task: str) -> list[str]:
    """All types of a task that the release has; for the classes without one, all that have any."""
    from transformers.models.auto import modeling_auto

    if task in tiny.TASKS:
        return tiny.types_for(task) if hasattr(modeling_auto, tiny.TASKS[task]) else []
    names = set(getattr(modeling_auto, f"{_AUTO[task]}_MAPPING_NAMES", ()))
    if task == "base":
        names &= {model_type for each in tiny.TASKS for model_type in types_for(each)}
    return sorted(names)


def _left(
    found: Iterator[Variant], model: Any, flipped: dict[str, set[str]], now: dict[str, list[str]]
) -> Iterator[Variant]:
    """The variants of fields that no earlier class has been through, or that classes new with this model mention."""
    classes: set[Any] = {
        type(module) for module in model.modules() if type(module).__module__.startswith("transformers.models.")
    }
    for variant in found:
        name = f"{variant.model_type}.{variant.field}"
        readers = {cls.__qualname__ for cls in classes if variant.field in _source(cls)}
        seen = flipped.get(name)
        if variant.field in _OF_ALL and not readers:
            continue
        if variant.field == "num_labels" and variant.value == 1 and row_head(model) is None:
            continue  # of one class the loss is 0, whatever a model does
        if seen is None or readers - seen:
            now[name] = sorted(readers | set(seen or ()))
            yield variant


@cache
def _source(cls: type) -> str:
    return "\n".join(inspect.getsource(base) for base in cls.__mro__ if base.__module__.startswith("transformers."))


def _audited(
    model_type: str,
    task: str,
    implementation: str,
    overrides: dict[str, Any],
    words: configuration.Words,
    depth: Depth = Depth.ROWS,
    base: Any = None,
) -> dict[str, Any]:
    """Audit one variant; for the rest, see `_audited_model`."""
    make = partial(build, model_type, task, implementation, **overrides)
    return _audited_model(make, words, depth, base)


def _published(model: Any) -> list[str]:
    """The published configurations of models of this class."""
    cls, model_type = type(model).__name__, model.config.model_type
    return [name for name, (of, fields) in PUBLISHED.items() if (of, fields["model_type"]) == (cls, model_type)]


def _twin_of_published(name: str) -> Any:
    """A tiny model with all that a published configuration says of behaviour."""
    try:
        return twin.of(measure.build(name), torch.float32).model
    except twin.NoTwin as error:
        raise tiny.CannotBuild(PUBLISHED[name][1]["model_type"], str(error)) from error


def _audited_model(
    make: Callable[[], Any], words: configuration.Words, depth: Depth, base: Any = None
) -> dict[str, Any]:
    """Audit a model; what is exact adds its configuration to `words`. `base` is one that it has to differ from."""
    try:
        model = make()
    except tiny.CannotBuild as error:
        return {"status": "not built", "reason": error.reason}
    except Exception as error:  # a class may raise anything at a value that it does not take
        return {"status": "not built", "reason": f"{type(error).__name__}: {error}"}
    if base is not None and str(model.config) == str(base):
        return {"status": "no change"}
    # What is recorded here is what the default goes by, so it cannot be asked for it.
    found = outcome(model, audit=_DEPTHS[depth], verify=False)
    if found.status != "exact":
        return {"status": found.status, "reason": found.reason}
    for part, fields in configuration.describe(model.config).items():
        for field, values in fields.items():
            words.setdefault(part, {}).setdefault(field, set()).update(values)
    return {"status": "exact"}


def _has_experts(model: Any) -> bool:
    return any("experts" in type(module).__name__.lower() for module in model.modules()) and hasattr(
        model, "set_experts_implementation"
    )


def _listed(words: configuration.Words) -> dict[str, dict[str, list[str]]]:
    return {part: {field: sorted(values) for field, values in fields.items()} for part, fields in words.items()}


def run(tasks: list[str], types: list[str], log: Path | None, base_only: bool = False) -> list[dict[str, Any]]:
    """Run what the log lacks and add it there; returns all entries, the log's first.

    Classes of which it has the configuration of tiny models alone are lacking, unless that is all that is wanted.
    """
    found = entries(log) if log is not None else []
    done = [entry for entry in found if base_only or "base only" not in entry]
    present = {(entry["task"], entry["type"]) for entry in done}
    flipped = _flipped(done)
    wanted = [
        (task, name) for task in tasks for name in types_for(task) if not types or name in types
        if (task, name) not in present
    ]  # fmt: skip
    bar = tqdm(wanted, mininterval=10)
    count: Counter[str] = Counter()
    for task, name in bar:
        try:
            known = frozenset((e.get("config", ""), e.get("class", "")) for e in done)
            entry = survey(name, task, flipped, known, base_only)
        except Exception as error:  # one class must not end a run of hours; it counts as a crash
            said = f"{type(error).__name__}: {error}"
            entry = {"type": name, "task": task, "class": name, "implementations": [], "variants": [], "flipped": {}}
            entry |= {"status": "crash", "reason": said}
        for field, readers in entry["flipped"].items():
            flipped[field].update(readers)
        done.append(entry)
        if log is not None:
            with log.open("a") as file:
                file.write(json.dumps(entry) + "\n")
        count.update([entry["status"], *(variant["status"] for variant in entry["variants"])])
        bar.set_postfix_str(f"{task} {name} {dict(count)}", refresh=False)
        for each in (entry, *entry["variants"]):
            if each["status"] in ("LEAK", "crash"):
                tqdm.write(f"{each['status']} {task} {name} {each.get('name', '')}: {each['reason'][:200]}")
    again = {(entry["task"], entry["type"]) for entry in done}
    return [entry for entry in found if (entry["task"], entry["type"]) not in again] + done


def entries(log: Path) -> list[dict[str, Any]]:
    """What has been run, a dictionary per class."""
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def _flipped(done: list[dict[str, Any]]) -> defaultdict[str, set[str]]:
    flipped: defaultdict[str, set[str]] = defaultdict(set)
    for entry in done:
        for field, readers in entry["flipped"].items():
            flipped[field].update(readers)
    return flipped


def main() -> int:
    """Run the survey and record it; 1 where a variant leaks or crashes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", nargs="+", default=[], help="only these, whatever the log says; printed")
    parser.add_argument("--record", action="store_true", help="merge the named types into the recorded results")
    parser.add_argument("--task", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--log", type=Path, default=LOG, help="what was run; delete it to begin anew")
    parser.add_argument("--base", action="store_true", help="the configurations of tiny models alone, without variants")
    parser.add_argument("--report", action="store_true", help="run nothing, write the results of the log")
    arguments = parser.parse_args()
    if arguments.record and (arguments.base or not arguments.types or {*arguments.task} != {*TASKS}):
        parser.error("--record puts named types in the place of what is recorded of them; run all of their tasks")
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    logging.getLogger("autopack").setLevel(logging.ERROR)
    if arguments.report:
        done = entries(arguments.log)
    else:
        done = run(arguments.task, arguments.types, None if arguments.types else arguments.log, arguments.base)
    if arguments.types and not arguments.record:
        print(results.page(results.rows(done)))
    else:
        results.write(done, merge=bool(arguments.types))
    statuses = [each["status"] for entry in done for each in (entry, *entry["variants"])]
    return 1 if {"LEAK", "crash"} & set(statuses) else 0


if __name__ == "__main__":
    sys.exit(main())
