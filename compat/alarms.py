"""Check every call of every type, and count false alarms: `autopack.LeakDetected` from
transformers' own code.

    python -m compat.alarms --tasks causal-lm --dtypes float32 bfloat16 --jobs 2
    python -m compat.alarms --settings lora checkpointing autocast compile --types llama bert t5 mamba2
    python -m compat.alarms --json compat/results/alarms.json

Each type is enabled as users do it, but for `check_every=1`: packed rows in one row and in two, and
padded batches of both sides, in evaluation and in training with dropout. A call that autopack
refuses, or that stock cannot run, is no alarm. Several processes (DDP, FSDP2, ZeRO) are those of
`python -m compat.engines`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import autopack
from autopack import tiny
from autopack.auditing.asking import argument_names
from autopack.auditing.cases import FORMS, Case
from compat import study
from compat.common import quietly, write_json

TASKS = ("causal-lm", "masked-lm", "sequence-classification", "seq2seq")
DTYPES = ("float32", "bfloat16", "float16")
_LENGTHS = ((7, 11, 5), (19, 3, 26, 9))
_RATE = 0.1
"""Dropout in training."""

Found = dict[str, Any]


def _lora(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(target_modules="all-linear", lora_dropout=_RATE))


def _checkpointed(model: Any, reentrant: bool) -> Any:
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    return model


def _compiled(model: Any) -> Any:
    torch._dynamo.reset()
    model.compile(backend="aot_eager", dynamic=True)
    return model


SETTINGS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda model: model,
    "lora": _lora,
    "checkpointing": lambda model: _checkpointed(model, reentrant=False),
    "reentrant": lambda model: _checkpointed(model, reentrant=True),
    "autocast": lambda model: model,
    "compile": _compiled,
}
"""What users do to a model before they enable it; `autocast` is around its calls, in bfloat16."""


def checked(task: str, model_type: str, dtype: str, setting: str = "plain") -> Found:
    """Return what checks of one type have found: calls, checks, alarms, the largest error, skipped
    checks."""
    found: Found = {"calls": 0, "checks": 0, "worst": 0.0, "alarms": [], "skipped": Counter()}
    for implementation in ("eager", "sdpa"):
        try:
            model = tiny.build(model_type, task=task, attn_implementation=implementation)
        except (
            Exception
        ):  # of an implementation that the type has not, or a type without a tiny model
            continue
        with torch.autocast("cpu", torch.bfloat16, enabled=setting == "autocast"):
            _check_calls(model.to(getattr(torch, dtype)), found, SETTINGS[setting])
    return {**found, "skipped": dict(found["skipped"])}


def _check_calls(model: Any, found: Found, change: Callable[[Any], Any]) -> None:
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and (name == "p" or name.endswith("dropout")):
                setattr(module, name, _RATE)
    base = model
    try:
        model = change(model)
        handle = autopack.enable(model, check_every=1)
    except (
        autopack.AutopackError,
        ValueError,
    ):  # PEFT finds no linear layers in some types, or no checkpoints
        return
    for number, lengths in enumerate(_LENGTHS):
        for trains in (False, True):
            model.train(trains)
            for call in _calls(base, lengths, number):
                # padded batches run without their padding at once
                handle.enabled.padding_read = None
                torch.manual_seed(number)
                with torch.set_grad_enabled(trains):
                    _run(model, call, found)
    checks = handle.enabled.live.checked
    found["calls"], found["checks"] = found["calls"] + checks.calls, found["checks"] + checks.checks
    found["worst"] = max(found["worst"], checks.worst)
    found["skipped"].update(checks.skipped)
    handle.remove()


def _run(model: Any, call: dict[str, Any], found: Found) -> None:
    try:
        model(**call)
    except autopack.LeakDetected as alarm:
        found["alarms"].append(str(alarm))
    except Exception:  # autopack refuses it, or stock cannot run it
        return


def _calls(model: Any, lengths: tuple[int, ...], seed: int) -> list[dict[str, Any]]:
    case = Case(model, lengths, seed)
    positions = "position_ids" in argument_names(model)
    rows = ["default", "two rows"] if positions and not case.is_pair else ["segment ids"]
    padded = [f"{side}-padded, use_cache=False" for side in ("right", "left")]
    return [case.given(case.call(FORMS[name])) for name in (*rows, *padded)]


def _of(about: tuple[str, str, str, str]) -> Found:
    with quietly():
        return {
            **dict(zip(("task", "type", "dtype", "setting"), about, strict=True)),
            **checked(*about),
        }


def table(found: list[Found]) -> str:
    """Return a line for each task, dtype and setting."""
    lines = [f"{'':40}{'types':>6}{'calls':>8}{'checks':>8}{'alarms':>8}{'worst':>10}"]
    keys = [(each["task"], each["dtype"], each["setting"]) for each in found]
    for key in dict.fromkeys(keys):
        of = [each for each, its in zip(found, keys, strict=True) if its == key and each["calls"]]
        total = [sum(each[name] for each in of) for name in ("calls", "checks")]
        alarms, worst = (
            sum(len(each["alarms"]) for each in of),
            max((each["worst"] for each in of), default=0.0),
        )
        lines.append(
            f"{' '.join(key):40}{len(of):6}{total[0]:8}{total[1]:8}{alarms:8}{worst:10.1e}"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = study.parser_of(__doc__)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=["plain"])
    parser.add_argument("--types", nargs="+", help="of these types alone")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the outcomes there")
    asked = parser.parse_args(arguments)
    todo = [
        (task, model_type, dtype, setting)
        for task in asked.tasks
        for dtype in asked.dtypes
        for setting in asked.settings
        for model_type in tiny.types_for(task)
        if asked.types is None or model_type in asked.types
    ]
    with ProcessPoolExecutor(asked.jobs) as pool:
        found = list(tqdm(pool.map(_of, todo), total=len(todo), disable=None))
    print(table(found))
    for each in found:
        for alarm in each["alarms"]:
            print(f"ALARM {each['task']} {each['type']} {each['dtype']} {each['setting']}: {alarm}")
    if asked.json is not None:
        write_json(asked.json, found)
    return int(any(each["alarms"] for each in found))


if __name__ == "__main__":
    raise SystemExit(main())
