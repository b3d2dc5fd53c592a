"""What drives programs: their models, commands and steps, by what programs.json says of them.

`python -m compat.programs._drivers NAME RUN FOLDER OUTPUT` drives a library: its module here has
`train(told, folder, output)`, where `told` is what the run says, and writes `output/steps.json`.
With NAME and FOLDER alone it writes what runs of a program need."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import random
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from compat.programs._words import save_model, text, write_rows

Steps = list[dict[str, float]]
_TIMES = re.compile(r"runtime|per_second|step_time|flos|epoch$|_mem_")


@cache
def programs() -> dict[str, dict[str, Any]]:
    """All programs, by the names of their modules and records.

    Of each its `name`, the `package` whose version counts, what to `install` (pip's arguments, one
    command each), `stand_ins` for packages that nothing calls, runs that differ where stock lets
    documents see each other (`apart`), its `models`, the rows of its `files` (`write_rows`), and what each of its
    `runs` says. Where
    `settings` are there, runs are commands of the program's own; otherwise its `module`, if it is
    another one, drives them, and they say the `same` beside their own. One that is `watched` logs
    nothing: its steps are taken from torch."""
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
    home = f"compat.programs.{program.get('module', name)}"
    if importlib.util.find_spec(home) is not None:
        module = importlib.import_module(home)
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
        "max_steps": 4,
        "logging_steps": 1,
        "learning_rate": 1e-3,
    }
    return {
        "output_dir": str(output),
        **same,
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": True,
        **more,
    }


def batches(tokenizer: Any, classes: int = 0, count: int = 9) -> Iterator[dict[str, Any]]:
    """Batches of four random texts, padded on the right, with labels: the tokens, or one class for
    each row."""
    import torch

    draw = random.Random(0)
    for _ in range(count):
        batch = dict(
            tokenizer([text(draw, 40) for _ in range(4)], padding=True, return_tensors="pt")
        )
        batch.pop("token_type_ids", None)
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        drawn = [draw.randrange(max(1, classes)) for _ in range(4)]
        yield {**batch, "labels": torch.tensor(drawn) if classes else labels}


def adapted(model: Any, method: Any) -> Any:
    """A model with LoRA, or with a method of PEFT by the name of its `config` and its options."""
    import peft

    own = {"config": "Lora", "task_type": "CAUSAL_LM", **(method if method is not True else {})}
    kind = getattr(peft, f"{own.pop('config')}Config")
    return peft.get_peft_model(model, kind(**own))


def by_trainer(
    kind: Any, build: Callable[[], Any], where: Path, count: int, settings: dict[str, Any]
) -> Any:
    """A Trainer of a kind, of a model that is built once its arguments are there, on so many random
    texts.

    A Llama predicts them; other models have one of two classes for each.
    """
    from datasets import Dataset
    from transformers import AutoTokenizer, DataCollatorForLanguageModeling, TrainingArguments

    draw, causal, made = random.Random(0), where.name == "llama", TrainingArguments(**settings)
    tokenizer = AutoTokenizer.from_pretrained(where)
    rows = [tokenizer(text(draw, 60), return_token_type_ids=False) for _ in range(count)]
    listed = [
        {**row, **({} if causal else {"labels": number % 2})} for number, row in enumerate(rows)
    ]
    return kind(
        model=build(),
        args=made,
        train_dataset=Dataset.from_list(listed),
        processing_class=tokenizer,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False) if causal else None,
    )


def stepped(loss: Any, parameters: Any, optimizer: Any) -> dict[str, float]:
    """One step by a loss, with gradients clipped."""
    import torch

    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return {"loss": float(loss), "grad_norm": float(norm)}


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


@contextlib.contextmanager
def watched() -> Iterator[Steps]:
    """Seed all generators, and take from torch the loss of each `backward`, and the gradients of
    each step.

    Of the gradients that an optimizer is given it keeps the 2-norm and the 1-norm: clipping makes
    the first one the same in all steps."""
    import numpy as np
    import torch
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    steps: Steps = []
    autograd: Any = torch.autograd
    engine = autograd._engine_run_backward

    def noted_engine(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("accumulate_grad") and len(tensors) == 1 and tensors[0].numel() == 1:
            steps.append({"loss": tensors[0].detach().double().item()})
        return engine(tensors, *args, **kwargs)

    def noted_step(optimizer: Any, args: Any, kwargs: Any) -> None:
        gradients = [
            parameter.grad.detach().double().flatten()
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        whole = torch.cat(gradients) if gradients else torch.zeros(1)
        steps.append({"grad_norm": whole.norm().item(), "grad_sum": whole.abs().sum().item()})

    autograd._engine_run_backward = noted_engine
    hook = register_optimizer_step_pre_hook(noted_step)
    try:
        yield steps
    finally:
        hook.remove()
        autograd._engine_run_backward = engine


def main(name: str, run: str, folder: str, output: str) -> None:
    """Drive one run, and write its steps."""
    program = programs()[name]
    module = importlib.import_module(f"compat.programs.{program.get('module', name)}")
    around: contextlib.AbstractContextManager[Steps] = (
        watched() if "watched" in program else contextlib.nullcontext([])
    )
    with around as steps:
        told = {**program.get("same", {}), **program["runs"][run]}
        steps += module.train(told, Path(folder), Path(output)) or []
    if steps:
        write_steps(Path(output), steps)


if __name__ == "__main__":
    if len(sys.argv) == 3:
        prepare(sys.argv[1], Path(sys.argv[2]))
    else:
        main(*sys.argv[1:])
