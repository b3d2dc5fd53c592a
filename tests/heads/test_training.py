"""Heads with one result per row in training: checkpointed, compiled, PEFT, collator, auditor."""

import copy

import pytest
import torch

import autopack
from tests.conftest import LENGTHS, OTHER_LENGTHS, positions
from tests.heads.models import CLASSES, ENDS, IDS, STARTS, TASKS, agrees, packed, serves, with_head
from tests.support.trained import with_lora


@pytest.mark.parametrize("model_type", ["llama", "bert"])
def test_checkpointed_layers_know_their_documents(model_type):
    stock = with_head(model_type)
    stock.train()
    stock.gradient_checkpointing_enable()
    serves(stock, {"labels": CLASSES})


def test_compiled():
    stock = with_head("llama", "question-answering", num_hidden_layers=1)
    model = copy.deepcopy(stock)
    torch._dynamo.reset()
    with autopack.enable(model):
        compiled = torch.compile(model, backend="eager")
        for lengths in (LENGTHS, OTHER_LENGTHS):
            labels = {
                "start_positions": torch.zeros(len(lengths)).long(),
                "end_positions": torch.tensor(lengths) - 1,
            }
            output = compiled(
                input_ids=IDS, position_ids=positions(lengths), use_cache=False, **labels
            )
            agrees(model, stock, output, IDS[0].split(lengths), labels)


@pytest.mark.parametrize("task", ["sequence-classification", "question-answering"])
@pytest.mark.parametrize("enabled_first", [True, False])
def test_peft_with_a_trained_head(task, enabled_first):
    kind = "SEQ_CLS" if task == "sequence-classification" else "QUESTION_ANS"
    base, labels = with_head("bert", task), TASKS[task]
    stock = with_lora(copy.deepcopy(base), ["query"], task_type=kind).eval()
    if enabled_first:
        autopack.enable(base)
    model = with_lora(base, ["query"], task_type=kind).eval()
    autopack.enable(model)
    agrees(model, stock, packed(model, **labels), IDS[0].split(LENGTHS), labels)
    autopack.disable(model)


@pytest.mark.parametrize(
    "task", ["sequence-classification", "question-answering", "token-classification"]
)
def test_the_auditor_runs_heads(task):
    model = with_head("bert", task, torch.float32)
    stock = autopack.audit(model, modes=("use_cache=False",), training=(False,))
    assert not stock.exact
    if task == "sequence-classification":
        assert "WrongShape" in stock.results[0].failure
    with autopack.enable(model):
        report = autopack.audit(model)
    assert report.exact, report
    assert (report.packed, report.labels, report.padded) == (None, None, None)
    losses = {result.mode for result in report.results if result.loss is not None}
    assert {"default", "padding mask", "two rows", "right-padded", "left-padded"} <= losses
    assert {result.mode for result in report.results if result.gradient is not None} >= {
        "default",
        "two rows",
    }
    assert model.config.problem_type is None


def test_the_collator_packs_spans():
    stock = with_head("bert", "question-answering")
    model = copy.deepcopy(stock)
    examples = [
        {"input_ids": document.tolist(), "start_positions": int(start), "end_positions": int(end)}
        for document, start, end in zip(IDS[0].split(LENGTHS), STARTS, ENDS, strict=True)
    ]
    batch = autopack.PackingCollator.for_model(model, pad_to_multiple_of=8)(examples)
    assert batch["input_ids"].shape == (1, 40)
    assert "labels" not in batch
    with autopack.enable(model):
        agrees(model, stock, model(**batch), IDS[0].split(LENGTHS), TASKS["question-answering"])
