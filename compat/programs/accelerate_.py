"""accelerate: loops like those of transformers' `run_*_no_trainer.py`, and what its documentation
shows.

Models are tiny, without dropout. Mixed precision is left out: what bf16 rounds differs by more than
1e-5 between rows of another order."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from compat.programs._drivers import write_steps
from compat.programs._words import text

_BATCHES, _ROWS = 9, 4
_MODELS = {
    "clm": ("llama", "AutoModelForCausalLM"),
    "mlm": ("bert", "AutoModelForMaskedLM"),
    "glue": ("bert", "AutoModelForSequenceClassification"),
    "summarization": ("bart", "AutoModelForSeq2SeqLM"),
}


def train(told: dict[str, Any], folder: Path, output: Path) -> None:
    """Run the loop of a task, on several processes or by a launcher where a run says so."""
    import accelerate

    if "launcher" in told:
        launch = getattr(accelerate, told["launcher"])
        launch(_loop, (folder, output, told["task"]), num_processes=told["processes"])
    else:
        _loop(folder, output, **told)


def _loop(
    folder: Path, output: Path, task: str, accumulated: int = 1, resumed: bool = False
) -> None:
    """`run_clm_no_trainer.py` and those of other tasks, without what they read."""
    import torch
    import transformers
    from accelerate import Accelerator
    from accelerate.utils import set_seed

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulated)
    set_seed(0)
    kind, auto = _MODELS[task]
    model = getattr(transformers, auto).from_pretrained(folder / kind)
    data: Any
    data, collator = _data(task, transformers.AutoTokenizer.from_pretrained(folder / kind), model)
    loader = torch.utils.data.DataLoader(data, shuffle=True, collate_fn=collator, batch_size=_ROWS)
    evaluated = torch.utils.data.DataLoader(
        data[: 2 * _ROWS], collate_fn=collator, batch_size=_ROWS
    )
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


def _data(task: str, tokenizer: Any, model: Any) -> tuple[Any, Any]:
    import transformers

    draw = random.Random(0)
    rows = []
    for _ in range(_BATCHES * _ROWS):
        row = tokenizer(text(draw, 40))
        if task == "glue":
            row["labels"] = draw.randrange(2)
        if task == "summarization":
            row["labels"] = tokenizer(text(draw, 12))["input_ids"]
        rows.append(dict(row))
    if task == "glue":
        return rows, transformers.DataCollatorWithPadding(tokenizer)
    if task == "summarization":
        return rows, transformers.DataCollatorForSeq2Seq(tokenizer, model=model)
    return rows, transformers.DataCollatorForLanguageModeling(
        tokenizer, mlm=task == "mlm", mlm_probability=0.15
    )
