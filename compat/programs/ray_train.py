"""Ray Train: `TorchTrainer` on CPU workers, around the Trainer of transformers and around a loop, as
in its guides."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import ray
import ray.train.huggingface.transformers as huggingface
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model

from compat.programs._drivers import logged, write_steps
from compat.programs.torch_loop import adamw, stepped
from compat.programs.transformers_trainer import loaded, trainer_of


def train(told: dict[str, Any], folder: Path, output: Path) -> None:
    """Run a loop on Ray's workers; the first one writes what was logged."""
    os.environ["RAY_TRAIN_V2_ENABLED"] = "1"
    ray.init(
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=True,
        runtime_env={"env_vars": {"PYTHONHASHSEED": "0"}},
    )
    workers = told.get("workers", 1)
    TorchTrainer(
        own_loop if workers > 1 else with_trainer,
        train_loop_config={"folder": str(folder), "output": str(output), "told": told},
        scaling_config=ScalingConfig(num_workers=workers, use_gpu=False),
        run_config=RunConfig(storage_path=str(output / "ray")),
    ).fit()
    ray.shutdown()


def with_trainer(given: dict[str, Any]) -> None:
    """Ray's guide for transformers: a Trainer that `prepare_trainer` has prepared."""
    run = {"task": "causal", "model": "llama", "max_steps": 8, **given["told"]}
    trainer = trainer_of(run, Path(given["folder"]), Path(given["output"]))
    trainer.add_callback(huggingface.RayTrainReportCallback())
    write_steps(Path(given["output"]), logged(huggingface.prepare_trainer(trainer)))


def own_loop(given: dict[str, Any]) -> None:
    """Ray's guide for PyTorch: a model and a loader that Ray has prepared."""
    model, batches = loaded("causal", Path(given["folder"]) / "llama")
    model, steps = prepare_model(model.train()), []
    optimizer = adamw(model)
    for batch in prepare_data_loader(batches):
        steps.append(stepped(model(**batch).loss, model, optimizer))
        ray.train.report(steps[-1])
    if ray.train.get_context().get_world_rank() == 0:
        write_steps(Path(given["output"]), steps)
