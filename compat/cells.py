"""Measure cells of the matrix (task, model type, mode) in the installed transformers: one JSON line
for each.

`python -m compat.cells` is what compat/run.py runs inside a release: it is asked on standard input.

A cell is what `autopack.enable(model)` gives, without another word, and what packed and padded
calls of that model do:
    exact           packed rows and padded batches give what stock gives the documents, with gradients and loss
    refused         autopack raises one of its errors and says why
    LEAK            neither
    crash           an error that autopack did not mean to raise
    upstream error  stock itself raises for one unpacked document
    absent          the release has no such type for text (wav2vec2's masked model takes sounds), or the type no such
                    implementation
    unbuildable     no tiny model of the type can be made

One that was enabled also has its `proof`: by what `enable` knows that it is exact ("twin", "part",
"checks"; of older records "recorded", "parts", "audit"; "" where it does not say). Where `enable`
serves a part alone, the cell says which part it does not and why: `padded` is the reason for which
padded batches are left as they came, `labels` that for which packed calls with labels are refused.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import sys
import time
from collections.abc import Iterator
from typing import Any, TextIO

from compat.common import quietly, said, short

STATUSES = ("exact", "refused", "LEAK", "crash", "upstream error", "absent", "unbuildable")
_CALLS = ("default", "padding mask", "two rows", "right-padded", "left-padded")
"""Those that differ the most; in train mode, with gradients and losses. The others are
compat/exactness.py's."""
_LENGTHS = (6, 11, 5)
"""One document is past the windows and chunks of tiny models."""
_LEFT = "what such a call is, not what is known of the model"
"""Why padded batches are left where their proof is not the reason; docs/unpadding.md has the
rules."""


def measure(task: str, model_type: str, mode: str) -> dict[str, Any]:
    """Measure one cell: `status`, with `worst` error and `proof` where it is exact, otherwise with
    a `reason`."""
    from transformers import PreTrainedModel

    from autopack import tiny
    from autopack.inspection.modules import takes_tokens
    from autopack.inspection.torches import without_flex_attention
    from compat.exactness import Undeclared, built, stand_in
    from compat.standins import integration_of

    if model_type not in tiny.types_for(task):
        return {"status": "absent", "reason": "no such type for this task"}
    if mode == "flex" and (
        integration_of("flex_attention") is None or without_flex_attention() is not None
    ):
        return {"status": "absent", "reason": "not in this release, or not in this torch"}
    with stand_in(mode, **({"broadcast": True} if mode == "flex" else {})):
        try:
            model = built(model_type, mode, task=task)
        except Undeclared:
            return {"status": "absent", "reason": "not declared"}
        except tiny.CannotBuild as error:
            return {"status": "unbuildable", "reason": error.reason}
        if not any(
            isinstance(part, PreTrainedModel) and takes_tokens(part) for part in model.modules()
        ):
            return {"status": "absent", "reason": "its class takes no tokens"}
        return enabled_and_audited(model)


def enabled_and_audited(model: Any) -> dict[str, Any]:
    """Enable a model as users do and audit packed and padded calls of it: its cell."""
    from compat.outcome import outcome, upstream_error

    found = outcome(model, audit={"modes": _CALLS, "training": (True,), "lengths": _LENGTHS})
    if found.status == "refused" and found.report is None:
        # what the default's audit met may be stock's own fault
        upstream = upstream_error(model, found.handle)
        if upstream is not None:
            return {"status": "upstream error", "reason": upstream}
        return {"status": "refused", "reason": _reason(str(found.reason))}
    if found.status == "upstream error" or found.report is None:
        return {"status": found.status, "reason": found.reason}
    of = _left_out(found.handle.enabled.proof, found.report)
    if found.status == "exact":
        return {"status": "exact", "worst": float(f"{found.report.worst:.0e}"), **of}
    return {"status": found.status, "reason": found.reason, **of}


def _left_out(proof: Any, report: Any) -> dict[str, str]:
    """What an enabled model does not serve, with the reason."""
    found = {}
    padded = [result for result in report.results if result.kind == "padded"]
    if proof.why_not_unpadded is not None or (
        padded and not any(result.unpadded for result in padded)
    ):
        found["padded"] = proof.why_not_unpadded or _LEFT
    refused = next(
        (result.loss_refused for result in report.results if result.loss_refused is not None), None
    )
    if proof.why_not_labels is not None or refused is not None:
        found["labels"] = proof.why_not_labels or str(refused)
    if proof.source == "checks":
        found["twin"] = "its calls are checked"
    return found


def _reason(reason: str) -> str:
    return reason.split("and it is not exact: ")[-1].split(" (it runs third-party code")[0]


def introduce() -> dict[str, Any]:
    """What a process in a release says first: its packages and types by task, or why autopack
    refuses the release."""
    from importlib.metadata import version

    from autopack.version import problem

    versions = {
        name: version(name) for name in ("transformers", "torch", "tokenizers", "huggingface-hub")
    }
    about: dict[str, Any] = {"python": platform.python_version(), **versions}
    if (refused := problem("transformers", versions["transformers"])) is not None:
        return {**about, "refused": refused}
    try:
        from autopack import tiny

        return {
            **about,
            "types": {task: tiny.types_for(task) for task in tiny.TASKS if _has_task(task)},
        }
    except Exception as error:
        return {**about, "crash": f"import of autopack: {said(error)}"}


def _has_task(task: str) -> bool:
    from transformers.models.auto import modeling_auto

    from autopack import tiny

    return hasattr(modeling_auto, tiny.TASKS[task])


def measured(task: str, model_type: str, mode: str) -> dict[str, Any]:
    """`measure` as it is recorded: named and timed, the reason shortened; an error of the
    measurement is a crash."""
    start = time.monotonic()
    try:
        found = measure(task, model_type, mode)
    except Exception as error:
        found = {"status": "crash", "reason": f"measuring: {said(error)}"}
    for name in found.keys() & {"reason", "padded", "labels"}:
        found[name] = short(found[name])
    seconds = round(time.monotonic() - start, 2)
    return {"task": task, "type": model_type, "mode": mode, **found, "seconds": seconds}


def serve(requests: TextIO, answers: TextIO) -> None:
    """Introduce this process, then answer requests (task, type and modes, a JSON line each) by a
    line per cell."""

    def answer(line: dict[str, Any]) -> None:
        answers.write(json.dumps(line, ensure_ascii=False) + "\n")
        answers.flush()

    answer(introduce())
    for line in requests:
        asked = json.loads(line)
        with quietly():
            for mode in asked["modes"]:
                answer(measured(asked["task"], asked["type"], mode))


@contextlib.contextmanager
def private_output() -> Iterator[TextIO]:
    """Standard output for our own lines alone: whatever else is printed goes to standard error."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as own:
        os.dup2(2, 1)
        yield own


if __name__ == "__main__":
    with private_output() as lines:
        serve(sys.stdin, lines)
