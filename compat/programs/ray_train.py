"""Ray Train: `TorchTrainer` on CPU workers, around the Trainer of transformers and around loops, as in its guides.

Models are tiny, without dropout.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path
from typing import Any

from compat.programs._drivers import save_encoder, write_logs, write_steps
from compat.programs._words import save_model, text

NAME = "Ray Train"
PACKAGE = "ray"
STAND_INS = ()
RUNS: dict[str, dict[str, Any]] = {
    "transformers' Trainer": {"loop": "trainer"},
    "transformers' Trainer, LoRA, gradient accumulation": {"loop": "trainer", "peft": True},
    "own loop, DDP on two workers": {"loop": "own", "workers": 2},
    "own loop, batches of Ray Data": {"loop": "data"},
}
"""The loop of each run, and how many workers it has."""
APART: frozenset[str] = frozenset()
_STEPS, _ROWS = 8, 4


def prepare(folder: Path) -> None:
    """Write a tiny Llama, and a tiny BERT with a head."""
    save_model(folder / "llama", "llama")
    save_encoder(folder / "bert", "AutoModelForSequenceClassification", num_labels=2)


def command(run: str, folder: Path, output: Path) -> list[str]:
    """This module, as a script."""
    return ["-m", "compat.programs.ray_train", run, str(folder), str(output)]


def train(run: str, folder: Path, output: Path) -> None:
    """Run a loop on Ray's workers; the first one writes what was logged."""
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    # The module has a name of its own in the workers, which would not find what `__main__` holds.
    from compat.programs import ray_train as here

    told = {"workers": 1, "peft": False, **RUNS[run]}
    os.environ["RAY_TRAIN_V2_ENABLED"] = "1"
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=True, runtime_env={"env_vars": {"PYTHONHASHSEED": "0"}})
    datasets: Any = {}
    if told["loop"] == "data":
        draw = random.Random(0)
        items = [{"text": text(draw, 40), "label": draw.randrange(2)} for _ in range(_STEPS * _ROWS)]
        datasets = {"train": ray.data.from_items(items, override_num_blocks=1)}
    trainer = TorchTrainer(
        {"trainer": here.with_trainer, "own": here.own_loop, "data": here.on_ray_data}[told["loop"]],
        train_loop_config={"folder": str(folder), "output": str(output), "peft": told["peft"]},
        scaling_config=ScalingConfig(num_workers=told["workers"], use_gpu=False),
        run_config=RunConfig(storage_path=str(output / "ray")),
        datasets=datasets,
    )
    trainer.fit()
    ray.shutdown()


def _texts() -> list[str]:
    draw = random.Random(0)
    return [text(draw, 40) for _ in range(_STEPS * _ROWS)]


def with_trainer(told: dict[str, Any]) -> None:
    """Ray's guide for transformers: a Trainer that `prepare_trainer` has prepared."""
    import ray.train.huggingface.transformers as huggingface
    import transformers
    from datasets import Dataset

    where = Path(told["folder"]) / "llama"
    tokenizer = transformers.AutoTokenizer.from_pretrained(where)
    transformers.set_seed(0)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(where)
    more: dict[str, Any] = {}
    if told["peft"]:
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM"))
        more = {"gradient_accumulation_steps": 2}
    data = Dataset.from_dict({"text": _texts()})
    trainer = transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(
            output_dir=told["output"],
            per_device_train_batch_size=_ROWS,
            max_steps=_STEPS,
            logging_steps=1,
            learning_rate=1e-3,
            report_to="none",
            save_strategy="no",
            use_cpu=True,
            **more,
        ),
        train_dataset=data.map(lambda row: tokenizer(row["text"]), remove_columns="text"),
        data_collator=transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )
    trainer.add_callback(huggingface.RayTrainReportCallback())
    huggingface.prepare_trainer(trainer).train()
    write_logs(Path(told["output"]), trainer.state.log_history)


def own_loop(told: dict[str, Any]) -> None:
    """Ray's guide for PyTorch: a model and a loader that Ray has prepared, a loss of the logits."""
    import ray.train
    import ray.train.torch
    import torch
    import transformers

    where = Path(told["folder"]) / "llama"
    tokenizer = transformers.AutoTokenizer.from_pretrained(where)
    torch.manual_seed(0)
    model = ray.train.torch.prepare_model(transformers.AutoModelForCausalLM.from_pretrained(where).train())
    rows: Any = [{"input_ids": tokenizer(one)["input_ids"]} for one in _texts()]
    collator = transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False)
    loader = torch.utils.data.DataLoader(rows, batch_size=_ROWS, collate_fn=collator)
    optimizer, steps = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for batch in ray.train.torch.prepare_data_loader(loader):
        labels = batch.pop("labels")
        logits = model(**batch).logits[:, :-1]
        steps.append(_step(torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels[:, 1:]), model, optimizer))
        ray.train.report(steps[-1])
    if ray.train.get_context().get_world_rank() == 0:
        write_steps(Path(told["output"]), steps)


def on_ray_data(told: dict[str, Any]) -> None:
    """Ray's guide for text classification: batches of Ray Data, tokenized where they arrive."""
    import ray.train
    import torch
    import transformers

    where = Path(told["folder"]) / "bert"
    tokenizer = transformers.AutoTokenizer.from_pretrained(where)
    model: Any = transformers.AutoModelForSequenceClassification.from_pretrained(where)
    model.train()
    optimizer, steps = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for rows in ray.train.get_dataset_shard("train").iter_batches(batch_size=_ROWS):
        batch = tokenizer(list(rows["text"]), padding="longest", truncation=True, return_tensors="pt")
        loss = model(**batch, labels=torch.as_tensor(rows["label"])).loss
        steps.append(_step(loss, model, optimizer))
        ray.train.report(steps[-1])
    write_steps(Path(told["output"]), steps)


def _step(loss: Any, model: Any, optimizer: Any) -> dict[str, float]:
    import torch

    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return {"loss": float(loss), "grad_norm": float(norm)}


if __name__ == "__main__":
    train(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
