"""accelerate: loops like those of transformers' `run_*_no_trainer.py`.

Models are tiny, without dropout. Mixed precision is left out: what bf16 rounds differs by more than
1e-5 between rows of another order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from compat.programs._drivers import Steps
from compat.programs.torch_loop import adamw
from compat.programs.transformers_trainer import loaded


def train(told: dict[str, Any], folder: Path, output: Path) -> Steps:
    """Run the loop of a task for an epoch, or for two, the second from a state that was saved in the
    first."""
    resumed = told.get("resumed", False)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=told.get("accumulated", 1))
    model, loader = loaded(told["task"], folder / told.get("model", "llama"))
    model, optimizer, loader = accelerator.prepare(model, adamw(model), loader)
    steps: Steps = []
    for epoch in range(1 + resumed):
        model.train()
        for number, batch in enumerate(loader):
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                found = {"loss": float(loss)}
                if accelerator.sync_gradients:
                    found["grad_norm"] = float(accelerator.clip_grad_norm_(model.parameters(), 1.0))
                optimizer.step()
                optimizer.zero_grad()
            steps.append(found)
            if resumed and epoch == 0 and number == 4:
                accelerator.save_state(str(output / "state"))
        model.eval()
        with torch.no_grad():
            losses = [accelerator.gather_for_metrics(model(**batch).loss) for batch in loader]
        steps.append({"evaluated": float(torch.stack(losses).mean())})
        if resumed and epoch == 0:
            accelerator.load_state(str(output / "state"))
    return steps
