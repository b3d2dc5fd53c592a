"""accelerate: loops like those of transformers' `run_*_no_trainer.py`, and what its documentation shows.

Models are tiny, without dropout. Mixed precision is left out: what bf16 rounds differs by more than 1e-5 between rows
of another order.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

from compat.programs._drivers import Run, save_encoder, write_steps
from compat.programs._words import save_model, text

NAME = "accelerate"
PACKAGE = "accelerate"
STAND_INS = ()
APART: frozenset[str] = frozenset()
_BATCHES, _ROWS = 9, 4


def prepare(folder: Path) -> None:
    """Write a tiny Llama, a tiny BERT and a tiny BART."""
    save_model(folder / "llama", "llama")
    save_encoder(folder / "bert")
    sizes = {"d_model": 64, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4}
    more = {"decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "dropout": 0.0}
    tokens = {"decoder_start_token_id": 2, "forced_eos_token_id": 2, "max_position_embeddings": 128}
    save_model(folder / "bart", "bart", "AutoModelForSeq2SeqLM", **sizes, **more, **tokens)


def command(run: str, folder: Path, output: Path) -> list[str]:
    """This module, as a script."""
    return ["-m", "compat.programs.accelerate_", run, str(folder), str(output)]


def _loop(folder: Path, output: Path, task: str, accumulated: int = 1, resumed: bool = False) -> None:
    """`run_clm_no_trainer.py` and those of other tasks, without what they read."""
    import torch
    import transformers
    from accelerate import Accelerator
    from accelerate.utils import set_seed

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulated)
    set_seed(0)
    kind, auto = {
        "clm": ("llama", "AutoModelForCausalLM"),
        "mlm": ("bert", "AutoModelForMaskedLM"),
        "glue": ("bert", "AutoModelForSequenceClassification"),
        "summarization": ("bart", "AutoModelForSeq2SeqLM"),
    }[task]
    model = getattr(transformers, auto).from_pretrained(folder / kind)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / kind)
    data: Any
    data, collator = _data(task, tokenizer, model)
    loader = torch.utils.data.DataLoader(data, shuffle=True, collate_fn=collator, batch_size=_ROWS)
    evaluated = torch.utils.data.DataLoader(data[: 2 * _ROWS], collate_fn=collator, batch_size=_ROWS)
    none = ("bias", "LayerNorm.weight")
    groups = [
        {
            "params": [each for name, each in model.named_parameters() if any(word in name for word in none) is plain],
            "weight_decay": 0.0 if plain else 0.01,
        }
        for plain in (False, True)
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    schedule = transformers.get_scheduler("linear", optimizer, num_warmup_steps=2, num_training_steps=20)
    model, optimizer, loader, evaluated, schedule = accelerator.prepare(model, optimizer, loader, evaluated, schedule)
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
    return rows, transformers.DataCollatorForLanguageModeling(tokenizer, mlm=task == "mlm", mlm_probability=0.15)


def _clm(folder: Path, output: Path) -> None:
    _loop(folder, output, "clm")


def _clm_accumulated(folder: Path, output: Path) -> None:
    _loop(folder, output, "clm", accumulated=2)


def _clm_resumed(folder: Path, output: Path) -> None:
    _loop(folder, output, "clm", resumed=True)


def _mlm(folder: Path, output: Path) -> None:
    _loop(folder, output, "mlm")


def _glue(folder: Path, output: Path) -> None:
    _loop(folder, output, "glue")


def _summarization(folder: Path, output: Path) -> None:
    _loop(folder, output, "summarization")


def _launched(folder: Path, output: Path) -> None:
    """`notebook_launcher`, on one CPU process."""
    from accelerate import notebook_launcher

    notebook_launcher(_loop, (folder, output, "clm"), num_processes=1)


def _two_processes(folder: Path, output: Path) -> None:
    """`debug_launcher`: the loop in two processes, by DDP on CPUs; the losses are those of the first."""
    from accelerate import debug_launcher

    debug_launcher(_of_rank, (folder, output), num_processes=2)


def _of_rank(folder: Path, output: Path) -> None:
    import os

    own = output / f"rank{os.environ['RANK']}"
    own.mkdir()
    _loop(folder, own, "clm")
    if os.environ["RANK"] == "0":
        (own / "steps.json").rename(output / "steps.json")


RUNS: dict[str, Run] = {
    "run_clm_no_trainer": _clm,
    "run_clm_no_trainer, accumulation": _clm_accumulated,
    "run_clm_no_trainer, state saved and loaded": _clm_resumed,
    "run_mlm_no_trainer": _mlm,
    "run_glue_no_trainer": _glue,
    "run_summarization_no_trainer": _summarization,
    "notebook_launcher": _launched,
    "debug_launcher, two processes": _two_processes,
}
"""What each run is called, and its loop."""

if __name__ == "__main__":
    RUNS[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
