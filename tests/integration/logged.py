"""Trains a tiny Llama by a Trainer that reports to a logger, stock and then enabled.

`python -m tests.integration.logged LOGGER FOLDER`; the run of each has its name, and what the trainer itself keeps of
its logs goes to FOLDER/NAME.json. Documents are padded, and some pairs of them begin alike.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import transformers

import autopack
from autopack import tiny
from tests.integration.documents import documents
from tests.integration.test_trainer_logs import pad

LENGTHS = (3, 5, 8, 2, 12, 4, 6, 9)
"""Tokens of documents after what pairs of them begin with."""
PROMPT = 24
NAMES = ("stock", "enabled")


def train(logger, folder, name):
    model = tiny.build("llama")
    prompts = [d[0].tolist() for d in documents(model.config, (PROMPT,) * (len(LENGTHS) // 2), seed=3)]
    rests = [d[0].tolist() for d in documents(model.config, LENGTHS, seed=4)]
    rows = [{"input_ids": prompts[number // 2] + rest} for number, rest in enumerate(rests)]
    # In the order of this seed the first and the last batch are pairs that begin alike, and those between are not.
    args = transformers.TrainingArguments(
        str(folder / name), run_name=name, max_steps=4, per_device_train_batch_size=2, logging_steps=1,
        per_device_eval_batch_size=2, eval_strategy="steps", eval_steps=2, learning_rate=0.1, optim="sgd",
        use_cpu=True, report_to=[logger], disable_tqdm=True, save_strategy="no", seed=1,
    )  # fmt: skip
    os.environ["TENSORBOARD_LOGGING_DIR"] = str(folder / f"tensorboard-{name}")
    trainer = transformers.Trainer(model, args, data_collator=pad, train_dataset=rows, eval_dataset=rows[:4])
    if name == "enabled":
        autopack.enable(trainer)
    trainer.train()
    (folder / f"{name}.json").write_text(json.dumps(trainer.state.log_history))
    if logger == "wandb":
        import wandb

        wandb.finish()


if __name__ == "__main__":
    for each in NAMES:
        train(sys.argv[1], Path(sys.argv[2]), each)
