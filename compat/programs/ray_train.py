"""Ray Train: `TorchTrainer` on CPU workers, around the Trainer of transformers and around loops, as
in its guides."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from compat.programs._drivers import logged, stepped, write_steps
from compat.programs._words import rows_of
from compat.programs.transformers_trainer import data_of, model_of, trainer_of

_STEPS, _ROWS = 8, 4


def train(told: dict[str, Any], folder: Path, output: Path) -> None:
    """Run a loop on Ray's workers; the first one writes what was logged."""
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    os.environ["RAY_TRAIN_V2_ENABLED"] = "1"
    ray.init(
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=True,
        runtime_env={"env_vars": {"PYTHONHASHSEED": "0"}},
    )
    datasets: Any = {}
    if told["loop"] == "data":
        items = rows_of(folder / "classes.jsonl")
        datasets = {"train": ray.data.from_items(items, override_num_blocks=1)}
    TorchTrainer(
        {"trainer": with_trainer, "own": own_loop, "data": on_ray_data}[told["loop"]],
        train_loop_config={
            "folder": str(folder),
            "output": str(output),
            "told": told.get("told", {}),
        },
        scaling_config=ScalingConfig(num_workers=told.get("workers", 1), use_gpu=False),
        run_config=RunConfig(storage_path=str(output / "ray")),
        datasets=datasets,
    ).fit()
    ray.shutdown()


def with_trainer(told: dict[str, Any]) -> None:
    """Ray's guide for transformers: a Trainer that `prepare_trainer` has prepared."""
    import ray.train.huggingface.transformers as huggingface

    run = {"task": "causal", "model": "llama", "max_steps": _STEPS, **told["told"]}
    trainer = trainer_of(run, Path(told["folder"]), Path(told["output"]))
    trainer.add_callback(huggingface.RayTrainReportCallback())
    write_steps(Path(told["output"]), logged(huggingface.prepare_trainer(trainer)))


def own_loop(told: dict[str, Any]) -> None:
    """Ray's guide for PyTorch: a model and a loader that Ray has prepared, a loss of the logits."""
    import ray.train
    import ray.train.torch
    import torch
    import transformers

    where = Path(told["folder"]) / "llama"
    tokenizer = transformers.AutoTokenizer.from_pretrained(where)
    model = ray.train.torch.prepare_model(model_of("causal", where).train())
    data, collator = data_of("causal", tokenizer, model)
    loader: Any = torch.utils.data.DataLoader(data, batch_size=_ROWS, collate_fn=collator)
    optimizer, steps = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for batch in ray.train.torch.prepare_data_loader(loader):
        labels = batch.pop("labels")
        logits = model(**batch).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels[:, 1:])
        steps.append(stepped(loss, model.parameters(), optimizer))
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
        batch = tokenizer(
            list(rows["text"]), padding="longest", truncation=True, return_tensors="pt"
        )
        loss = model(**batch, labels=torch.as_tensor(rows["label"])).loss
        steps.append(stepped(loss, model.parameters(), optimizer))
        ray.train.report(steps[-1])
    write_steps(Path(told["output"]), steps)
