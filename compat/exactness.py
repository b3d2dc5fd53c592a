"""Measure, for every type of transformers with a language model, whether packed equals alone, on
every backend.

    python -m compat.exactness seq2seq --record    all types of a task, recorded in compat/results
    python -m compat.exactness llama gemma2        some types of all tasks
    python -m compat.exactness "image-text-to-text llava"    text alone, and documents with images beside it

`flash` and `flex` run on CPU stand-ins of the same signature, where the model declares support.
Every cell is the worst relative error of logits over all of the auditor's call modes, in train and
eval; gradients and losses are held to their own tolerances and decide, with it, between a number
and LEAK."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

import autopack
from autopack import registry, tiny
from autopack.tiny.images import needs_images
from compat import matrix, study
from compat.images import cast, with_images
from compat.old_releases import bind_flash, chosen_when_built, without_hardware_checks
from compat.outcome import outcome
from compat.standins import (
    flash_standin,
    flex_standin,
    set_implementation,
    supported_implementations,
)
from compat.study import Study
from compat.tables import markdown_table
from compat.with_sounds import ABOUT_SOUNDS, with_sounds

Cells = dict[str, dict[str, dict[str, Any]]]
"""Results by model type and backend."""
BACKENDS = ("eager", "sdpa", "flex", "flash")
_IMPLEMENTATION = {
    "eager": "eager",
    "sdpa": "sdpa",
    "flex": "flex_attention",
    "flash": "flash_attention_2",
}
_WITH_MEDIA = ("image-text-to-text", "multimodal-lm")
_STANDIN: dict[str, Callable[..., contextlib.AbstractContextManager[None]]] = {
    "flex": flex_standin,
    "flash": flash_standin,
}


def measure(
    model_type: str,
    backend: str,
    dtype: torch.dtype = torch.float32,
    task: str = "causal-lm",
    modes: tuple[str, ...] | None = None,
    training: tuple[bool, ...] = (False, True),
) -> dict[str, Any]:
    """Audit one tiny model on one backend, in the call modes of the auditor (all by default).

    Returns `status` (exact, LEAK, refused, undeclared, unbuildable), and the worst errors or the
    reason."""
    with stand_in(backend):
        try:
            model = built(model_type, backend, dtype, task)
        except Undeclared:
            return {"status": "undeclared"}
        except tiny.CannotBuild as error:
            return {"status": "unbuildable", "reason": error.reason}
        # The audit is the measurement itself.
        found = outcome(model, audit={"modes": modes, "training": training}, verify=False)
    # Where `enable` served it and the audit could not, its encoder may take nothing but images.
    no_text = (
        found.status == "refused"
        and found.report is None
        and found.handle is not None
        and needs_images(model)
    )
    if no_text:
        found.handle.remove()
    if found.status == "upstream error" or no_text:
        return _images_alone(model, backend, task, dtype, str(found.reason))
    report = found.report
    if report is None:
        return {"status": found.status, "reason": found.reason}
    with stand_in(backend):
        images = with_images(model, task, dtype) if task in _WITH_MEDIA else {}
        images |= _with_sounds(model_type, backend, dtype, task)
    result = {
        "status": found.status,
        "config": model.config.model_type,
        "path": registry.look_up(model)[0].how,
        "worst": report.worst,
        "gradient": report.worst_gradient,
        "loss": max((r.loss for r in report.results if r.loss is not None), default=None),
        **images,
    }
    for kind in ("images", "sounds"):
        if result["status"] == "exact" and images.get(kind) == "LEAK":
            return {**result, "status": "LEAK", "reason": f"with {kind}: {images[f'{kind} worst']}"}
    return result if report.exact else {**result, "reason": found.reason}


def _with_sounds(model_type: str, backend: str, dtype: torch.dtype, task: str) -> dict[str, Any]:
    if task == "causal-lm" and any(
        model_type in tiny.types_for(other) for other in ("seq2seq", "image-text-to-text")
    ):
        return {}  # measured there
    try:
        return with_sounds(partial(built, model_type, backend, dtype, task), model_type, dtype)
    except Undeclared:
        return {"sounds": "undeclared"}


def _images_alone(
    model: Any, backend: str, task: str, dtype: torch.dtype, why: str
) -> dict[str, Any]:
    """The same for a type that stock cannot run without images (`why`): with them alone, if it is
    covered."""
    if task not in _WITH_MEDIA or "image" not in registry.media_of(model.config.model_type):
        return {"status": "upstream error", "reason": why}
    with stand_in(backend):
        handle = autopack.enable(model, verify=False)
        found = with_images(model, task, dtype)
        handle.remove()
    if found["images"] == "upstream error":
        return {"status": "upstream error", "reason": found["images reason"]}
    result = {
        "status": found["images"],
        "config": model.config.model_type,
        "path": registry.look_up(model)[0].how,
        "without images": why,
        **{name: found.get(f"images {name}") for name in ("worst", "gradient", "loss")},
        **found,
    }
    return (
        result
        if found["images"] == "exact"
        else {**result, "reason": f"with images: {found['images worst']}"}
    )


class Undeclared(ValueError):
    """The class of a model declares no support of an attention implementation."""


def stand_in(backend: str, **options: Any) -> contextlib.AbstractContextManager[None]:
    """What stands in for the kernels of a backend, if it needs any."""
    return _STANDIN[backend](**options) if backend in _STANDIN else contextlib.nullcontext()


def built(
    model_type: str,
    backend: str,
    dtype: torch.dtype = torch.float32,
    task: str = "causal-lm",
    **overrides: Any,
) -> Any:
    """A tiny model that computes its attention by a backend, inside its stand-in; for the
    overrides, see `tiny.build`.

    Raises `Undeclared` where its class says that it cannot, and `tiny.CannotBuild`.
    """
    implementation = _IMPLEMENTATION[backend]
    build = partial(tiny.build, model_type, task=task, dtype=dtype, **overrides)
    model: Any = build()
    if backend != "eager":
        if not supported_implementations(model) & {
            implementation,
            implementation.removesuffix("_2"),
        }:
            raise Undeclared(f"{type(model).__name__} declares no support of {implementation}")
        try:
            if backend == "sdpa" or chosen_when_built(model):
                with without_hardware_checks():
                    model = build(attn_implementation=implementation)
                if backend == "flash":
                    bind_flash(model)
            else:
                set_implementation(model, implementation)
        except tiny.CannotBuild as error:
            if "does not support an attention" in str(error):
                raise Undeclared(str(error)) from error
            raise
        except ValueError as error:  # of its configuration (GPT-OSS, 5.0)
            raise Undeclared(str(error)) from error
    cast(model, dtype)
    if dtype == torch.float64 and hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # grouped matrix products take no float64
    return model


def _cell(result: dict[str, Any]) -> str:
    if result["status"] == "exact":
        text = _number(result["worst"])
        if "without images" in result:
            return f"- / {text}"
        return " / ".join(
            [text, *(_of_media(result, kind) for kind in ("images", "sounds") if kind in result)]
        )
    return {"undeclared": "-"}.get(result["status"], result["status"])


def _of_media(result: dict[str, Any], kind: str) -> str:
    found = _number(result[f"{kind} worst"]) if result[kind] == "exact" else result[kind]
    return {"undeclared": "-"}.get(found, found) + (" (alike)" if f"{kind} alike" in result else "")


def _number(error: float) -> str:
    return "0" if error == 0 else f"{error:.0e}"


def rows_of(results: Cells) -> list[list[str]]:
    """The rows of a table, header first."""
    rows = [["model type", *BACKENDS, "path, or reason of refusal"]]
    return rows + [
        [name, *(_cell(cells[b]) for b in BACKENDS), _path(cells)]
        for name, cells in results.items()
    ]


def _path(cells: dict[str, dict[str, Any]]) -> str:
    name = "path" if has(cells, "exact") else "reason"
    return next((cell[name] for cell in cells.values() if name in cell), "")


_ABOUT_IMAGES = (
    "Two results to a cell: rows of text alone, and rows of documents with images, in one row and "
    "in two, with a document that has none, two that touch with their images, and one with two "
    "images of different sizes where the type allows; gradients include those of the vision tower, "
    "and other text or pixels of one document leave the others as they were. `refused`: packed "
    "calls with pixels raise. `none`: its class is one of text alone. Types that take videos have "
    "been run with them too. Norms over a batch (Emu3, FastVLM) stay in evaluation; while they "
    "train, packed calls with pixels raise. `-` before the second result: transformers cannot run "
    "the type without images. Types that take sounds have one result more, as those of speech have "
    "in the table of seq2seq."
)


def _markdown(results: Cells, task: str) -> str:
    versions = study.recorded("exactness")["with"]
    head = [
        f"# Exactness by model type and backend: {task}",
        "",
        f"Generated by `python -m compat.exactness {task} --record` with transformers "
        f"{versions['transformers']}, torch {versions['torch']}, CPU, float32, tiny random models.",
        "",
        "A number is the worst error of a logit, packed against alone, relative to the standard "
        "deviation of the logits, over all call modes of the auditor in train and eval; gradients "
        "agree within 1e-3 and losses within 1e-3 relative. `-`: the model's class declares no "
        "support of that implementation. `flex` and `flash` ran on CPU stand-ins of the kernels' "
        "signatures. Models were enabled with `verify=False`, so that rows say what packing gives; "
        "what the plain `enable(model)` says is in [releases](releases), of every release.",
        "",
        *([_ABOUT_IMAGES, ""] if task in _WITH_MEDIA else []),
        *(
            [ABOUT_SOUNDS, ""]
            if any("sounds" in c for cells in results.values() for c in cells.values())
            else []
        ),
        _counts(results),
        "",
    ]
    return "\n".join([*head, *markdown_table(rows_of(results)), ""])


def _counts(results: Cells) -> str:
    leaks = sum(has(cells, "LEAK") for cells in results.values())
    exact = sum(has(cells, "exact") and not has(cells, "LEAK") for cells in results.values())
    refused = len(results) - exact - leaks
    return (
        f"{len(results)} types: {exact} exact, {refused} refused or not buildable, {leaks} leaking."
    )


def has(cells: dict[str, dict[str, Any]], status: str, key: str = "status") -> bool:
    """Whether any backend has a status."""
    return any(cell.get(key) == status for cell in cells.values())


def recorded() -> dict[str, Cells]:
    """The results of all tasks that have been recorded: by task, model type and backend."""
    return by_task(STUDY.recorded())


def by_task(found: Cells) -> dict[str, Cells]:
    """Results by task and model type, by the names of cells."""
    tasks: dict[str, Cells] = {}
    for name, cells in found.items():
        task, _, model_type = name.partition(" ")
        tasks.setdefault(task, {})[model_type] = cells
    return tasks


def page_of(task: str) -> Path:
    """The page of a task."""
    return matrix.RESULTS / ("exactness.md" if task == "causal-lm" else f"exactness-{task}.md")


def _measured(names: list[str], _: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    for name in names:
        task, model_type = name.split(" ")
        yield name, {backend: measure(model_type, backend, task=task) for backend in BACKENDS}


STUDY = Study(
    "exactness",
    str(__doc__),
    lambda: [f"{task} {name}" for task in tiny.TASKS for name in tiny.types_for(task)],
    _measured,
    lambda _, cells: "LEAK" if has(cells, "LEAK") else None,
    pages=lambda cells: {
        page_of(task): _markdown(found, task) for task, found in by_task(cells).items()
    },
)

if __name__ == "__main__":
    raise SystemExit(study.main(STUDY))
