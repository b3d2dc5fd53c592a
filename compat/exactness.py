"""Print, for every type of transformers with a language model, whether packed equals alone, on every backend.

    python -m compat.exactness                    print the recorded tables of all tasks, one after the other
    python -m compat.exactness --task causal-lm   measure all types of a task and record them in compat/results/
    python -m compat.exactness llama gemma2       some types, printed only; with --record also merged into the results
    python -m compat.exactness --task image-text-to-text   text alone, and documents with images beside it

`flash` and `flex` run on CPU stand-ins of the same signature, where the model declares support. Every cell is the worst
relative error of logits over all of the auditor's call modes, in train and eval; gradients and losses are held to their
own tolerances and decide, with it, between a number and LEAK.

With `--float64` everything is held to 1e-9. Where a model casts to float32 in code of its own, that is measured again
with those casts lifted, and its cell has a star.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import autopack
from autopack import registry, tiny
from autopack.tiny.images import needs_images
from compat.old_releases import bind_flash, chosen_when_built, without_hardware_checks
from compat.outcome import outcome
from compat.standins import (
    flash_standin,
    flex_standin,
    float64_throughout,
    set_implementation,
    supported_implementations,
)
from compat.with_images import cast, with_images
from compat.with_sounds import ABOUT_SOUNDS, with_sounds

RESULTS = Path(__file__).parent / "results"
RELEASE = "5.23.0"
"""The release of transformers that the results were recorded with."""
BACKENDS = ("eager", "sdpa", "flex", "flash")
_IMPLEMENTATION = {"eager": "eager", "sdpa": "sdpa", "flex": "flex_attention", "flash": "flash_attention_2"}
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

    Returns `status` (exact, LEAK, refused, undeclared, unbuildable), and the worst errors or the reason.
    """
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
    no_text = found.status == "refused" and found.report is None and found.handle is not None and needs_images(model)
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
    if task == "causal-lm" and any(model_type in tiny.types_for(other) for other in ("seq2seq", "image-text-to-text")):
        return {}  # measured there
    try:
        return with_sounds(partial(built, model_type, backend, dtype, task), model_type, dtype)
    except Undeclared:
        return {"sounds": "undeclared"}


def _images_alone(model: Any, backend: str, task: str, dtype: torch.dtype, why: str) -> dict[str, Any]:
    """The same for a type that stock cannot run without images (`why`): with them alone, if it is covered."""
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
    return result if found["images"] == "exact" else {**result, "reason": f"with images: {found['images worst']}"}


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
    """A tiny model that computes its attention by a backend, inside its stand-in; for the overrides, see `tiny.build`.

    Raises `Undeclared` where its class says that it cannot, and `tiny.CannotBuild`.
    """
    implementation = _IMPLEMENTATION[backend]
    build = partial(tiny.build, model_type, task=task, dtype=dtype, **overrides)
    model: Any = build()
    if backend != "eager":
        if not supported_implementations(model) & {implementation, implementation.removesuffix("_2")}:
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


def measure_in_float64(model_type: str, backend: str, task: str) -> dict[str, Any]:
    """`measure` in float64; what casts to float32 by itself is measured without those casts, and says so."""
    found = measure(model_type, backend, torch.float64, task)
    if found["status"] not in ("LEAK", "upstream error"):
        return found
    with float64_throughout():
        lifted = measure(model_type, backend, torch.float64, task)
    return {**lifted, "with casts": found["reason"]} if lifted["status"] == "exact" else found


def _cell(result: dict[str, Any]) -> str:
    if result["status"] == "exact":
        text = ("*" if "with casts" in result else "") + _number(result["worst"])
        if "without images" in result:
            return f"- / {text}"
        return " / ".join([text, *(_of_media(result, kind) for kind in ("images", "sounds") if kind in result)])
    return {"undeclared": "-"}.get(result["status"], result["status"])


def _of_media(result: dict[str, Any], kind: str) -> str:
    found = _number(result[f"{kind} worst"]) if result[kind] == "exact" else result[kind]
    return {"undeclared": "-"}.get(found, found) + (" (alike)" if f"{kind} alike" in result else "")


def _number(error: float) -> str:
    return "0" if error == 0 else f"{error:.0e}"


def _table(results: dict[str, dict[str, dict[str, Any]]]) -> list[str]:
    lines = [f"{'model type':<26}" + "".join(f"{b:>24}" for b in BACKENDS) + "  path"]
    for model_type, cells in results.items():
        row = "".join(f"{_cell(cells[b]):>24}" for b in BACKENDS)
        lines.append(f"{model_type:<26}{row}  {_path(model_type, cells)}")
    return lines


def _path(model_type: str, cells: dict[str, dict[str, Any]]) -> str:
    if any(cell["status"] == "exact" for cell in cells.values()):
        path = next((cell["path"] for cell in cells.values() if "path" in cell), None)
        if path is not None:
            return path
        config = next(cell["config"] for cell in cells.values() if "config" in cell)
        family = next((f for f in registry.families() if config in f.model_types), None)
        return family.how if family is not None else "structure: attention site, document by document"
    return next((cell["reason"] for cell in cells.values() if "reason" in cell), "")


_ABOUT_IMAGES = (
    "Two results to a cell: rows of text alone, and rows of documents with images, in one row and in two, with a "
    "document that has none, two that touch with their images, and one with two images of different sizes where the "
    "type allows; gradients include those of the vision tower, and other text or pixels of one document leave the "
    "others as they were. `refused`: packed calls with pixels raise. `none`: its class is one of text alone. Types "
    "that take videos have been run with them too. Norms over a batch (Emu3, FastVLM) stay in evaluation; while they "
    "train, packed calls with pixels raise. `-` before the second result: transformers cannot run the type without "
    "images. Types that take sounds have one result more, as those of speech have in the table of seq2seq."
)


def _markdown(results: dict[str, dict[str, dict[str, Any]]], task: str, counts: str) -> str:
    import transformers

    head = [
        f"# Exactness by model type and backend: {task}",
        "",
        f"Generated by `python -m compat.exactness --task {task}` with transformers {transformers.__version__}, torch "
        f"{torch.__version__}, CPU, float32, tiny random models.",
        "",
        "A number is the worst error of a logit, packed against alone, relative to the standard deviation of the "
        "logits, over all call modes of the auditor in train and eval; gradients agree within 1e-3 and losses within "
        "1e-3 relative. `-`: the model's class declares no support of that implementation. `flex` and `flash` ran on "
        "CPU stand-ins of the kernels' signatures. Models were enabled with `verify=False`: this is the record that "
        "the plain `enable(model)` goes by; what that says is in [releases](releases), of every release.",
        "",
        *([_ABOUT_IMAGES, ""] if task in _WITH_MEDIA else []),
        *([ABOUT_SOUNDS, ""] if any("sounds" in c for cells in results.values() for c in cells.values()) else []),
        counts,
        "",
        "| model type | " + " | ".join(BACKENDS) + " | path, or reason of refusal |",
        "|---|" + "---|" * (len(BACKENDS) + 1),
    ]
    rows = [
        f"| {model_type} | " + " | ".join(_cell(cells[b]) for b in BACKENDS) + f" | {_path(model_type, cells)} |"
        for model_type, cells in results.items()
    ]
    return "\n".join([*head, *rows, ""])


def main() -> int:
    """Run the measurements, print the table, and return 1 where a type leaks that is not refused."""
    import transformers

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", help="model types (default: all)")
    parser.add_argument("--record", action="store_true", help="merge the named types into the recorded results")
    parser.add_argument(
        "--task",
        choices=(*tiny.TASKS, "all"),
        help="of the models' classes; 'all', or neither a task nor types: print what is recorded of all",
    )
    parser.add_argument("--float64", action="store_true", help="measure in float64 (tolerance 1e-9)")
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=list(BACKENDS))
    arguments = parser.parse_args()
    if arguments.task == "all" or not (arguments.task or arguments.types):
        if arguments.types:
            parser.error("--task all prints what is recorded; name one task to measure types")
        return _print_recorded()
    task = arguments.task or "causal-lm"
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    one = measure_in_float64 if arguments.float64 else partial(measure, dtype=torch.float32)
    results: dict[str, dict[str, dict[str, Any]]] = {}
    started = time.time()
    left_out: dict[str, Any] = {"status": "undeclared"}
    for model_type in tqdm(arguments.types or tiny.types_for(task), disable=not sys.stderr.isatty()):
        results[model_type] = {
            b: one(model_type, b, task=task) if b in arguments.backends else left_out for b in BACKENDS
        }
    print("\n".join(_table(results)))
    if any("with casts" in cell for cells in results.values() for cell in cells.values()):
        print("\n*: with the casts to float32 in the model's own code lifted; as it stands")
        named = [(name, cell) for name, cells in results.items() for cell in cells.values()]
        casts = [f"  {name}: {cell['with casts']}" for name, cell in named if "with casts" in cell]
        print("\n".join(casts))
    print(f"\n{_counts(results)} ({time.time() - started:.0f} s)")
    whole = not arguments.float64 and tuple(arguments.backends) == BACKENDS
    if whole and (arguments.record or not arguments.types):
        _record(results, task, merge=bool(arguments.types))
    return 1 if any(_leaks(cells) for cells in results.values()) else 0


def _leaks(cells: dict[str, dict[str, Any]]) -> bool:
    return any(cell["status"] == "LEAK" for cell in cells.values())


def _counts(results: dict[str, dict[str, dict[str, Any]]]) -> str:
    leaks = sum(_leaks(cells) for cells in results.values())
    exact = sum(
        not _leaks(cells) and any(cell["status"] == "exact" for cell in cells.values()) for cells in results.values()
    )
    refused = len(results) - exact - leaks
    return f"{len(results)} types: {exact} exact, {refused} refused or not buildable, {leaks} leaking."


def recorded() -> dict[str, dict[str, dict[str, dict[str, Any]]]]:
    """The results of all tasks that have been recorded: by task, model type and backend."""
    return {task: json.loads(results_of(task).read_text()) for task in tiny.TASKS if results_of(task).exists()}


def results_of(task: str) -> Path:
    """Where the results of a task are recorded."""
    return RESULTS / ("exactness.json" if task == "causal-lm" else f"exactness-{task}.json")


def _print_recorded() -> int:
    found = recorded()
    for task, results in found.items():
        print("\n".join([f"{task}\n", *_table(results), f"\n{_counts(results)}\n"]))
    return 1 if any(_leaks(cells) for results in found.values() for cells in results.values()) else 0


def _record(results: dict[str, dict[str, dict[str, Any]]], task: str, merge: bool) -> None:
    RESULTS.mkdir(exist_ok=True)
    data = results_of(task)
    if merge and data.exists():
        results = dict(sorted({**json.loads(data.read_text()), **results}.items()))
    data.write_text(json.dumps(results, indent=1) + "\n")
    data.with_suffix(".md").write_text(_markdown(results, task, _counts(results)))


if __name__ == "__main__":
    sys.exit(main())
