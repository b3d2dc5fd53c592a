"""Check every call of every type, and count false alarms: `autopack.LeakDetected` from
transformers' own code.

    python -m compat.alarms causal-lm --dtype bfloat16
    python -m compat.alarms llama bert t5 mamba2 --setting lora

Each type is enabled as users do it, but for `check_every=1`: packed rows in one row and in two, and
padded batches of both sides, in evaluation and in training with dropout. A call that autopack
refuses, or that stock cannot run, is no alarm. Several processes (DDP, FSDP2, ZeRO) are those of
`python -m compat.engines`. Sums of the lines are kept in compat/results/alarms.txt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import autopack
from autopack import tiny
from autopack.auditing.asking import argument_names
from autopack.auditing.cases import FORMS, Case
from compat import study
from compat.study import Study, Verdict

TASKS = ("causal-lm", "masked-lm", "sequence-classification", "seq2seq")
_LENGTHS = ((7, 11, 5), (19, 3, 26, 9))
_RATE = 0.1
"""Dropout in training."""


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


def checked(name: str, dtype: str = "float32", setting: str = "plain") -> Verdict:
    """Return what checks of a task and type have found: ALARM where one took a call for a leak;
    numbers of calls and checks, and the largest error."""
    task, model_type = name.split()
    found: Verdict = {"status": "no calls", "calls": 0, "checks": 0, "worst": 0.0}
    for implementation in ("eager", "sdpa"):
        try:
            base = tiny.build(model_type, task=task, attn_implementation=implementation)
            _set_dropout(base)
            model = SETTINGS[setting](base.to(getattr(torch, dtype)))
            handle = autopack.enable(model, check_every=1)
        # no such implementation or no tiny model; PEFT finds no linear layers, or no checkpoints
        except (tiny.CannotBuild, autopack.AutopackError, ValueError):
            continue
        with handle, torch.autocast("cpu", torch.bfloat16, enabled=setting == "autocast"):
            _check_calls(base, model, handle, found)
    return found


def _set_dropout(model: Any) -> None:
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and (name == "p" or name.endswith("dropout")):
                setattr(module, name, _RATE)


def _check_calls(base: Any, model: Any, handle: Any, found: Verdict) -> None:
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
    found["calls"] += checks.calls
    found["checks"] += checks.checks
    found["worst"] = max(found["worst"], checks.worst)
    if found["status"] == "no calls" and checks.calls:
        found["status"] = "exact"


def _run(model: Any, call: dict[str, Any], found: Verdict) -> None:
    try:
        model(**call)
    except autopack.LeakDetected as alarm:
        found |= {"status": "ALARM", "reason": str(alarm)}
    except Exception:  # autopack refuses it, or stock cannot run it
        return


def _calls(model: Any, lengths: tuple[int, ...], seed: int) -> list[dict[str, Any]]:
    case = Case(model, lengths, seed)
    positions = "position_ids" in argument_names(model)
    rows = ["default", "two rows"] if positions and not case.is_pair else ["segment ids"]
    padded = [f"{side}-padded, use_cache=False" for side in ("right", "left")]
    return [case.given(case.call(FORMS[name])) for name in (*rows, *padded)]


STUDY = Study(
    "alarms",
    str(__doc__),
    lambda: [f"{task} {name}" for task in TASKS for name in tiny.types_for(task)],
    lambda names, asked: ((name, checked(name, asked.dtype, asked.setting)) for name in names),
    options={
        "dtype": {"default": "float32", "choices": ("float32", "bfloat16", "float16")},
        "setting": {"default": "plain", "choices": SETTINGS},
    },
)

if __name__ == "__main__":
    raise SystemExit(study.main(STUDY))
