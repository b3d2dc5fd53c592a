"""Trains an enabled tiny Llama by a Trainer that reports to a logger.

`python -m tests.integration.logged LOGGER FOLDER`; what the trainer itself keeps of its logs goes to FOLDER/logs.json.
Documents are padded, and some pairs of them begin alike.
"""

import json
import os
import sys
from pathlib import Path

import autopack
from autopack import tiny
from tests.integration.documents import documents
from tests.integration.test_trainer_logs import trainer

LENGTHS = (3, 5, 8, 2, 12, 4, 6, 9)
"""Tokens of documents after what pairs of them begin with."""
PROMPT = 24


def train(logger, folder):
    model = tiny.build("llama")
    prompts = [d[0].tolist() for d in documents(model.config, (PROMPT,) * (len(LENGTHS) // 2), seed=3)]
    rests = [d[0].tolist() for d in documents(model.config, LENGTHS, seed=4)]
    rows = [{"input_ids": prompts[number // 2] + rest} for number, rest in enumerate(rests)]
    os.environ["TENSORBOARD_LOGGING_DIR"] = str(folder / "tensorboard")
    # In the order of this seed the first and the last batch are pairs that begin alike, and those between are not.
    drawn = {"seed": 1, "train_sampling_strategy": "random", "report_to": [logger]}
    times = {"gradient_accumulation_steps": 1, "logging_steps": 1, "eval_strategy": "steps", "eval_steps": 2}
    given = {"train_dataset": rows, "eval_dataset": rows[:4]}
    subject = trainer(folder, model=model, given=given, per_device_eval_batch_size=2, **drawn, **times)
    autopack.enable(subject)
    subject.train()
    (folder / "logs.json").write_text(json.dumps(subject.state.log_history))
    if logger == "wandb":
        import wandb

        wandb.finish()


if __name__ == "__main__":
    train(sys.argv[1], Path(sys.argv[2]))
