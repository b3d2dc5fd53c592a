"""accelerate: loops like those of transformers' `run_*_no_trainer.py`, and what its documentation
shows.

Models are tiny, without dropout. Mixed precision is left out: what bf16 rounds differs by more than
1e-5 between rows of another order."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from compat.programs._drivers import write_steps
from compat.programs.transformers_trainer import data_of, model_of

_ROWS = 4


def train(told: dict[str, Any], folder: Path, output: Path) -> None:
    """Run the loop of a task, on several processes or by a launcher where a run says so."""
    import accelerate

    if "launcher" in told:
        launch = getattr(accelerate, told["launcher"])
        launch(_loop, (folder, output, told["task"]), num_processes=told["processes"])
    else:
        _loop(folder, output, **told)


def _loop(
    folder: Path,
    output: Path,
    task: str,
    model: Any = "llama",
    accumulated: int = 1,
    resumed: bool = False,
) -> None:
    """`run_clm_no_trainer.py` and those of other tasks, without what they read."""
    import torch
    import transformers
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulated)
    where = folder / model
    model = model_of(task, where)
    data, collator = data_of(task, transformers.AutoTokenizer.from_pretrained(where), model)
    loaded = partial(torch.utils.data.DataLoader, collate_fn=collator, batch_size=_ROWS)
    loader = loaded(data, shuffle=True)
    evaluated = loaded(data.select(range(2 * _ROWS)))
    none = ("bias", "LayerNorm.weight")
    groups = [
        {
            "params": [
                each
                for name, each in model.named_parameters()
                if any(word in name for word in none) is plain
            ],
            "weight_decay": 0.0 if plain else 0.01,
        }
        for plain in (False, True)
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    schedule = transformers.get_scheduler(
        "linear", optimizer, num_warmup_steps=2, num_training_steps=20
    )
    model, optimizer, loader, evaluated, schedule = accelerator.prepare(
        model, optimizer, loader, evaluated, schedule
    )
    steps: list[dict[str, float]] = []
    for epoch in range(2 if resumed else 1):
        model.train()
        for number, batch in enumerate(loader):
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                found = {"loss": float(loss)}
                if accelerator.sync_gradients:
                    found["grad_norm"] = float(accelerator.clip_grad_norm_(model.parameters(), 1.0))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            steps.append(found)
            if resumed and epoch == 0 and number == 4:
                accelerator.save_state(str(output / "state"))
        model.eval()
        losses = []
        for batch in evaluated:
            with torch.no_grad():
                losses.append(accelerator.gather_for_metrics(model(**batch).loss.repeat(_ROWS)))
        steps.append({"evaluated": float(torch.cat(losses).mean())})
        if resumed and epoch == 0:
            accelerator.load_state(str(output / "state"))
    if accelerator.is_main_process:
        write_steps(output, steps)
