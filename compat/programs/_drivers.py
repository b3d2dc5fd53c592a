"""What drives programs: their models, commands and steps, by what programs.json says of them.

`python -m compat.programs._drivers NAME RUN FOLDER OUTPUT` drives a library: its module here has
`train(told, folder, output)`, where `told` is what the run says, and gives what was logged of each
step, which is written to `output/steps.json`; nothing in processes that log nothing. With NAME and
FOLDER alone it writes what runs of a program need."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

from compat.programs._words import save_model, write_rows

Steps = list[dict[str, float]]
_TIMES = re.compile(r"runtime|per_second|step_time|flos|epoch$|_mem_")


@cache
def programs() -> dict[str, dict[str, Any]]:
    """All programs, by the names of their modules and records.

    Of each its `name`, the `package` whose version counts, what to `install` (pip's arguments, one
    command each), `stand_ins` for packages that nothing calls, runs that differ where stock lets
    documents see each other (`apart`), its `models`, the rows of its `files` (`write_rows`), and
    what each of its `runs` says. Where `settings` are there, runs are commands of the program's
    own; otherwise its `module`, if it is another one, drives them, started by its `launcher`, and
    they say the `same` beside their own."""
    found: dict[str, dict[str, Any]] = json.loads(
        Path(__file__).with_name("programs.json").read_text()
    )
    return found


def prepare(name: str, folder: Path) -> None:
    """Write the models and files of a program, and what else its module writes."""
    program = programs()[name]
    for model, fields in program["models"].items():
        save_model(folder / model, **fields)
    for file, rows in program.get("files", {}).items():
        write_rows(folder / file, *rows)
    if importlib.util.find_spec(f"compat.programs.{name}") is not None:
        module = importlib.import_module(f"compat.programs.{name}")
        if hasattr(module, "prepare"):
            module.prepare(folder)


def command(name: str, run: str, folder: Path, output: Path) -> list[str]:
    """What python is called with: a command of the program with its settings, or this module."""
    program = programs()[name]
    told = dict(program["runs"][run])
    own = told.pop("command", program.get("command"))
    if own is None:
        driver = ["-m", "compat.programs._drivers", name, run, str(folder), str(output)]
        return [*program.get("launcher", ()), *driver]
    settings = {
        key: value.format(folder=folder, output=output) if isinstance(value, str) else value
        for key, value in {**program["settings"], **told}.items()
    }
    if program.get("in a file"):
        # JSON is YAML, and LLaMA-Factory's reader of .json files raises
        file = output.with_suffix(".yaml")
        file.write_text(json.dumps(settings))
        return [*own, str(file)]
    return [
        *own,
        *(word for key, value in settings.items() for word in (f"--{key}", *str(value).split(" "))),
    ]


def arguments(output: Path, **more: Any) -> dict[str, Any]:
    """What runs by a Trainer say to their arguments."""
    same = {
        "per_device_train_batch_size": 4,
        "max_steps": 9,
        "logging_steps": 1,
        "learning_rate": 1e-3,
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": True,
    }
    return {"output_dir": str(output), **same, **more}


def logged(trainer: Any, but: tuple[str, ...] = ()) -> Steps:
    """Train, and give all numbers of a Trainer's log, those of evaluations too.

    Times are left out, as names that hold one of `but`.
    """

    def kept(name: str, value: Any) -> bool:
        left_out = _TIMES.search(name) is not None or any(word in name for word in but)
        return isinstance(value, int | float) and not left_out

    trainer.train()
    log = trainer.state.log_history
    return [{name: value for name, value in entry.items() if kept(name, value)} for entry in log]


def write_steps(output: Path, steps: Steps) -> None:
    """Write what a program logged, step by step."""
    (output / "steps.json").write_text(json.dumps(steps))


def main(name: str, run: str, folder: str, output: str) -> None:
    """Drive one run, and write its steps."""
    program = programs()[name]
    module = importlib.import_module(f"compat.programs.{program.get('module', name)}")
    told = {**program.get("same", {}), **program["runs"][run]}
    steps = module.train(told, Path(folder), Path(output))
    if steps:
        write_steps(Path(output), steps)


if __name__ == "__main__":
    if len(sys.argv) == 3:
        prepare(sys.argv[1], Path(sys.argv[2]))
    else:
        main(*sys.argv[1:])
