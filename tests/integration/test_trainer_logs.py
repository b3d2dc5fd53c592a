"""What a transformers Trainer logs of its enabled model: numbers beside its losses, and nothing
else changed."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import transformers

import autopack
from autopack import tiny
from tests.engine import padded_batch
from tests.integration.documents import documents, with_labels
from tests.support.trained import QUIET

pytestmark = pytest.mark.usefixtures("nothing_left_behind")
LENGTHS = (7, 12, 5, 9, 30, 3, 8, 6, 21, 14, 4, 11, 17, 5, 9, 10)
HELD_OUT = (9, 4, 16, 7)
NAMES = {"fill", "padding_skipped", "documents_per_row", "real_tokens_per_second"}


class Reporter(transformers.TrainerCallback):
    """A callback that reports, as those of TensorBoard, W&B and trackio do: it reads the logs that
    it is given."""

    def __init__(self):
        self.logs: list[dict[str, Any]] = []
        self.evaluations: list[dict[str, Any]] = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append(
            {name: value for name, value in logs.items() if isinstance(value, int | float)}
        )

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        self.evaluations.append(dict(metrics))


def pad(examples):
    return with_labels(padded_batch([torch.tensor(example["input_ids"]) for example in examples]))


def share_of_padding(lengths, size):
    columns = sum(
        len(part) * max(part)
        for part in (lengths[i : i + size] for i in range(0, len(lengths), size))
    )
    return round(1 - sum(lengths) / columns, 4)


def trainer(
    path, reporter=None, model=None, kind=transformers.Trainer, collate=pad, given=(), **settings
):
    """A Trainer of documents that are padded; `given` are arguments of its own, and settings those
    of its arguments."""
    model = model or tiny.build("llama")
    options = {
        "output_dir": str(path),
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "per_device_eval_batch_size": 4,
        "logging_steps": 2,
        "learning_rate": 0.1,
        "optim": "sgd",  # Adam would blow rounding up where a gradient is nearly zero
        "train_sampling_strategy": "sequential",
        **QUIET,
        **settings,
    }
    if "train_sampling_strategy" not in transformers.TrainingArguments.__dataclass_fields__:
        del options["train_sampling_strategy"]
    data = {
        "train_dataset": [
            {"input_ids": d[0].tolist()} for d in documents(model.config, LENGTHS, seed=1)
        ],
        "eval_dataset": [
            {"input_ids": d[0].tolist()} for d in documents(model.config, HELD_OUT, seed=2)
        ],
    }
    return kind(
        model=model,
        args=transformers.TrainingArguments(**options),
        data_collator=collate,
        callbacks=[] if reporter is None else [reporter],
        **{**data, **dict(given)},
    )


def ours(logs, prefix=""):
    """The numbers of autopack in a dict of logs, by name."""
    start = f"{prefix}autopack/"
    return {
        name.removeprefix(start): value for name, value in logs.items() if name.startswith(start)
    }


def none_of_ours(logs):
    return not any("autopack" in name for each in logs for name in each)


@pytest.fixture
def reporter():
    return Reporter()


@pytest.fixture
def enabled(tmp_path, reporter):
    """Makes an enabled trainer that logs to the reporter."""
    made = []

    def make(logs_to=reporter, **settings):
        made.append(trainer(tmp_path, logs_to, **settings))
        autopack.enable(made[-1])
        return made[-1]

    yield make
    for subject in made:
        autopack.disable(subject)


def test_training_logs_have_them_before_others_report(enabled, reporter):
    subject, later = enabled(), Reporter()
    subject.add_callback(later)
    subject.train()
    first, second, end = reporter.logs
    # A window is the calls since the last log, over all micro-batches of its steps; 4 steps of 4
    # are one epoch.
    for logs, window in ((first, LENGTHS[:8]), (second, LENGTHS[8:])):
        found = ours(logs)
        assert set(found) == NAMES
        assert (found["fill"], found["documents_per_row"]) == (1.0, 2.0)
        assert found["padding_skipped"] == share_of_padding(window, 2)
        assert found["real_tokens_per_second"] > 0
    assert ours(end, "train_")["padding_skipped"] == share_of_padding(LENGTHS, 2)
    assert set(ours(end, "train_")) == NAMES
    assert not ours(end)
    assert ours(later.logs[0]), "a reporter that is added later comes after"
    assert subject.state.log_history[0]["autopack/fill"] == 1.0


def test_an_evaluation_in_between_is_logged_apart_and_returned_as_it_was(enabled, reporter):
    subject = enabled(eval_strategy="steps", eval_steps=2)
    subject.train()
    evaluated = [logs for logs in reporter.logs if "eval_loss" in logs]
    assert [ours(logs, "eval_")["padding_skipped"] for logs in evaluated] == [
        share_of_padding(HELD_OUT, 4)
    ] * 2
    assert [ours(logs, "eval_")["documents_per_row"] for logs in evaluated] == [4.0] * 2
    trained = [logs for logs in reporter.logs if "loss" in logs]
    assert [ours(logs)["documents_per_row"] for logs in trained] == [2.0] * 2
    # An objective of a search is the sum of all that is returned, and a model card has a column for
    # each.
    entries = [each for each in subject.state.log_history if "eval_loss" in each]
    assert len(entries) == len(reporter.evaluations) == 2
    assert none_of_ours([*entries, *reporter.evaluations])


def test_what_train_returns_and_saves_is_what_it_was_but_for_logs(tmp_path):
    states, metrics = [], []
    for enables in (False, True):
        subject = trainer(tmp_path / str(enables), save_strategy="steps", save_steps=4)
        if enables:
            autopack.enable(subject)
        metrics.append(set(subject.train().metrics))
        saved = tmp_path / str(enables) / "checkpoint-4" / "trainer_state.json"
        states.append(json.loads(saved.read_text()))
    autopack.disable(subject)
    assert metrics[1] == metrics[0]
    logs = [state.pop("log_history") for state in states]
    assert states[1] == states[0]
    plain = [{k: v for k, v in entry.items() if "autopack" not in k} for entry in logs[1]]
    assert plain == [pytest.approx(entry, rel=1e-5) for entry in logs[0]]
    assert plain != logs[1]


def test_evaluations_and_predictions_without_training(enabled, reporter):
    """One on the training set is no end of training, and predictions are not counted into the next
    one."""
    subject = enabled()
    returned = subject.evaluate(subject.eval_dataset, metric_key_prefix="train")
    assert ours(reporter.logs[-1], "train_")["documents_per_row"] == 4.0
    predicted = subject.predict([{"input_ids": [5] * 3}])
    subject.evaluate()
    assert none_of_ours([returned, predicted.metrics])
    assert ours(reporter.logs[-1], "eval_")["documents_per_row"] == 4.0


def test_the_callback_comes_once_and_goes_with_the_handle(tmp_path):
    subject = trainer(tmp_path)
    before = list(subject.callback_handler.callbacks)
    handle = autopack.enable(subject)
    autopack.enable(subject)
    assert [each for each in subject.callback_handler.callbacks if each not in before] == [
        subject.callback_handler.callbacks[0]
    ]
    handle.remove()
    assert subject.callback_handler.callbacks == before
    autopack.enable(subject)
    autopack.disable(subject)
    assert subject.callback_handler.callbacks == before
