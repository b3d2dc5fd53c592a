"""What a transformers Trainer logs of its enabled model: numbers beside its losses, and nothing else changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import autopack
from autopack import tiny
from autopack.enabling.trainer_logs import PackingLogs, logs_packing
from tests.integration.documents import documents

pytestmark = pytest.mark.usefixtures("nothing_left_behind")
LENGTHS = (7, 12, 5, 9, 30, 3, 8, 6, 21, 14, 4, 11, 17, 5, 9, 10)
HELD_OUT = (9, 4, 16, 7)
NAMES = {"fill", "padding_skipped", "documents_per_row", "real_tokens_per_second"}


class Reporter(transformers.TrainerCallback):
    """A callback that reports, as those of TensorBoard, W&B and trackio do: it reads the logs that it is given."""

    def __init__(self) -> None:
        self.logs: list[dict[str, Any]] = []
        self.evaluations: list[dict[str, Any]] = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append({name: value for name, value in logs.items() if isinstance(value, int | float)})

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        self.evaluations.append(dict(metrics))


def pad(examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    rows = [torch.tensor(example["input_ids"]) for example in examples]
    lengths = torch.tensor([len(row) for row in rows])
    mask = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def share_of_padding(lengths: tuple[int, ...], size: int) -> float:
    columns = sum(len(part) * max(part) for part in (lengths[i : i + size] for i in range(0, len(lengths), size)))
    return round(1 - sum(lengths) / columns, 4)


def trainer(path: Path, reporter: Reporter | None = None, model: Any = None, **settings: Any) -> transformers.Trainer:
    model = model or tiny.build("llama")
    options: dict[str, Any] = {
        "output_dir": str(path),
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "per_device_eval_batch_size": 4,
        "logging_steps": 2,
        "learning_rate": 0.1,
        "optim": "sgd",
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "no",
        "train_sampling_strategy": "sequential",
        **settings,
    }
    if "train_sampling_strategy" not in transformers.TrainingArguments.__dataclass_fields__:
        del options["train_sampling_strategy"]
    found = transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(**options),
        train_dataset=[{"input_ids": d[0].tolist()} for d in documents(model.config, LENGTHS, seed=1)],
        eval_dataset=[{"input_ids": d[0].tolist()} for d in documents(model.config, HELD_OUT, seed=2)],
        data_collator=pad,
        callbacks=[] if reporter is None else [reporter],
    )
    return found


def ours(logs: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers of autopack in a dict of logs, by name."""
    start = f"{prefix}autopack/"
    return {name.removeprefix(start): value for name, value in logs.items() if name.startswith(start)}


def test_training_logs_have_them_before_others_report(tmp_path):
    reporter = Reporter()
    subject = trainer(tmp_path, reporter)
    handle = autopack.enable(subject)
    subject.train()
    first, second, end = reporter.logs
    # A window is the calls since the last log, over all micro-batches of its steps; 4 steps of 4 are one epoch.
    for logs, window in ((first, LENGTHS[:8]), (second, LENGTHS[8:])):
        found = ours(logs)
        assert set(found) == NAMES
        assert (found["fill"], found["documents_per_row"]) == (1.0, 2.0)
        assert found["padding_skipped"] == share_of_padding(window, 2)
        assert found["real_tokens_per_second"] > 0
    total = sum(LENGTHS)
    weights = [sum(max(LENGTHS[i : i + 2]) * 2 for i in range(0, 16, 2))]
    assert ours(end, "train_")["padding_skipped"] == round(1 - total / weights[0], 4)
    assert set(ours(end, "train_")) == NAMES
    assert not ours(end)
    assert subject.state.log_history[0]["autopack/fill"] == 1.0
    handle.remove()


def test_rates_leave_out_how_long_a_reporter_takes_to_begin(tmp_path, monkeypatch):
    class Clock(Reporter):
        now = 0.0

        def perf_counter(self) -> float:
            return self.now

        def on_train_begin(self, args, state, control, **kwargs):
            self.now += 1000  # as one that makes a run on a server

        def on_step_end(self, args, state, control, **kwargs):
            self.now += 1

    clock = Clock()
    monkeypatch.setattr("autopack.enabling.trainer_logs.time", clock)
    subject = trainer(tmp_path, clock)
    with autopack.enable(subject):
        subject.train()
        subject.train()
    first, second, end, *again = clock.logs
    assert ours(first)["real_tokens_per_second"] == sum(LENGTHS[:8]) / 2
    assert ours(second)["real_tokens_per_second"] == sum(LENGTHS[8:]) / 2
    assert ours(end, "train_")["real_tokens_per_second"] == round(sum(LENGTHS) / 4, 1)
    assert [ours(logs) | ours(logs, "train_") for logs in again] == [
        ours(logs) | ours(logs, "train_") for logs in (first, second, end)
    ]


def test_an_evaluation_in_between_is_logged_apart_and_returned_as_it_was(tmp_path):
    reporter, stock = Reporter(), Reporter()
    subject = trainer(tmp_path, reporter, eval_strategy="steps", eval_steps=2)
    with autopack.enable(subject):
        subject.train()
        evaluated = [logs for logs in reporter.logs if "eval_loss" in logs]
        assert [ours(logs, "eval_")["padding_skipped"] for logs in evaluated] == [share_of_padding(HELD_OUT, 4)] * 2
        assert [ours(logs, "eval_")["documents_per_row"] for logs in evaluated] == [4.0] * 2
        trained = [logs for logs in reporter.logs if "loss" in logs]
        assert [ours(logs)["documents_per_row"] for logs in trained] == [2.0] * 2
        returned = subject.evaluate(metric_key_prefix="held")
        assert set(ours(reporter.logs[-1], "held_")) == NAMES
    other = trainer(tmp_path, stock, eval_strategy="steps", eval_steps=2)
    other.train()
    # An objective of a search is the sum of all that is returned, and a model card has a column for each.
    assert [set(each) for each in reporter.evaluations[:2]] == [set(each) for each in stock.evaluations]
    assert set(returned) == {name.replace("eval_", "held_") for name in stock.evaluations[0]}
    entries = [each for each in subject.state.log_history if "eval_loss" in each]
    assert [set(each) for each in entries] == [set(each) for each in other.state.log_history if "eval_loss" in each]


def test_what_train_returns_and_saves_is_what_it_was_but_for_logs(tmp_path):
    stock = trainer(tmp_path / "stock", save_strategy="steps", save_steps=4)
    expected = stock.train()
    subject = trainer(tmp_path / "enabled", save_strategy="steps", save_steps=4)
    with autopack.enable(subject):
        found = subject.train()
    assert set(found.metrics) == set(expected.metrics)
    before, after = (
        json.loads((tmp_path / name / "checkpoint-4" / "trainer_state.json").read_text())
        for name in ("stock", "enabled")
    )
    logs = [part.pop("log_history") for part in (before, after)]
    assert after == before
    plain = [{k: v for k, v in entry.items() if "autopack" not in k} for entry in logs[1]]
    assert plain == [pytest.approx(entry, rel=1e-5) for entry in logs[0]]
    assert plain != logs[1]


def test_a_resumed_run_counts_what_it_runs(tmp_path):
    first = trainer(tmp_path, save_strategy="steps", save_steps=2)
    with autopack.enable(first):
        first.train()
    reporter = Reporter()
    second = trainer(tmp_path, reporter, save_strategy="steps", save_steps=2)
    with autopack.enable(second) as handle:
        second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        assert handle.handles["model"].tally.training.calls == 4
    assert [set(ours(logs)) for logs in reporter.logs if "loss" in logs] == [NAMES]


def test_packed_rows_are_counted_with_their_padding(tmp_path):
    reporter = Reporter()
    subject = trainer(tmp_path, reporter)
    subject.data_collator = autopack.PackingCollator(max_length=64, pad_to_multiple_of=32)
    with autopack.enable(subject) as handle:
        subject.train()
        training = handle.handles["model"].tally.training
    assert 0 < ours(reporter.logs[-1], "train_")["fill"] == round(training.tokens / training.columns, 4) < 1


def test_others_keys_and_own_logs_of_a_script_are_left_alone(tmp_path):
    reporter = Reporter()
    subject = trainer(tmp_path, reporter)
    with autopack.enable(subject):
        subject.train()
        subject.log({"kl": 0.5})
        subject.log({"loss": 0.5})
    assert not any("autopack" in name for logs in reporter.logs[-2:] for name in logs)


def test_a_trainer_that_counts_tokens_itself_has_both(tmp_path):
    reporter = Reporter()
    subject = trainer(tmp_path, reporter, include_num_input_tokens_seen=True)
    with autopack.enable(subject):
        subject.train()
    trained = [logs for logs in reporter.logs if "loss" in logs]
    assert [set(ours(logs)) for logs in trained] == [NAMES] * 2
    assert all("num_input_tokens_seen" in logs and not ours(logs, "train_") for logs in trained)


def test_several_evaluation_sets_are_apart(tmp_path):
    reporter = Reporter()
    subject = trainer(tmp_path, reporter, eval_strategy="steps", eval_steps=4)
    short, long = [{"input_ids": [5] * n} for n in (2, 4)], [{"input_ids": [5] * n} for n in (10, 20, 30)]
    subject.eval_dataset = {"short": short, "long": long}
    with autopack.enable(subject):
        subject.train()
    found = {prefix: [ours(logs, prefix) for logs in reporter.logs] for prefix in ("eval_short_", "eval_long_")}
    shares = {prefix: [each["padding_skipped"] for each in every if each] for prefix, every in found.items()}
    assert shares == {"eval_short_": [0.25], "eval_long_": [round(30 / 90, 4)]}


def test_an_evaluation_on_the_training_set_is_no_end_of_training(tmp_path):
    reporter = Reporter()
    subject = trainer(tmp_path, reporter)
    with autopack.enable(subject):
        returned = subject.evaluate(subject.eval_dataset, metric_key_prefix="train")
    assert ours(reporter.logs[-1], "train_")["documents_per_row"] == 4.0
    assert not any("autopack" in name for name in returned)


def test_predictions_are_not_counted_into_the_next_evaluation(tmp_path):
    reporter = Reporter()
    subject = trainer(tmp_path, reporter)
    with autopack.enable(subject):
        found = subject.predict([{"input_ids": [5] * 3}])
        subject.evaluate()
    assert not any("autopack" in name for name in found.metrics)
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


def test_the_callback_is_removed_like_any_other(tmp_path):
    subject = trainer(tmp_path)
    with autopack.enable(subject):
        assert logs_packing(subject)
        subject.remove_callback(PackingLogs)
        subject.train()
        assert not logs_packing(subject)
    assert not any(name.startswith("autopack/") for entry in subject.state.log_history for name in entry)


def test_a_model_that_is_disabled_meanwhile_has_nothing_to_log(tmp_path):
    reporter = Reporter()
    subject = trainer(tmp_path, reporter)
    with autopack.enable(subject):
        autopack.disable(subject.model)
        subject.train()
    assert not any("autopack" in name for logs in reporter.logs for name in logs)


def test_a_reporter_that_is_added_later_comes_after(tmp_path):
    reporter = Reporter()
    subject = trainer(tmp_path)
    with autopack.enable(subject):
        subject.add_callback(reporter)
        subject.train()
    assert ours(reporter.logs[0])
