"""The Trainer of transformers: the tasks of its documentation and examples, and the options that
touch batches.

Everything is the default of `TrainingArguments`, but for what a run says, on tiny models without
dropout, as unpadded batches draw other random numbers. bf16 is left out: what it rounds differs by
more than 1e-5 between rows of another order."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from compat.programs._drivers import Steps, adapted, arguments, logged
from compat.programs._words import text

_ROWS = 32
_CLASSES = ("SequenceClassification", {"num_labels": 3})
_HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "masked": ("MaskedLM", {}),
    "classes": _CLASSES,
    "weighted classes": _CLASSES,
    "several classes": (
        _CLASSES[0],
        {"num_labels": 3, "problem_type": "multi_label_classification"},
    ),
    "regression": (_CLASSES[0], {"num_labels": 1}),
    "tokens": ("TokenClassification", {"num_labels": 5}),
    "answers": ("QuestionAnswering", {}),
    "choices": ("MultipleChoice", {}),
    "seq2seq": ("Seq2SeqLM", {}),
}


def train(told: dict[str, Any], folder: Path, output: Path) -> Steps:
    """Train by the Trainer, as a run says."""
    return logged(trainer_of(dict(told), folder, output))


def model_of(task: str, where: Path) -> Any:
    """The model of a task."""
    import transformers

    transformers.set_seed(0)
    auto, fields = _HEADS.get(task, ("CausalLM", {}))
    return getattr(transformers, f"AutoModelFor{auto}").from_pretrained(where, **fields)


def trainer_of(told: dict[str, Any], folder: Path, output: Path) -> Any:
    """The Trainer of a run."""
    import transformers

    task, where = told.pop("task"), folder / told.pop("model")
    side, method = told.pop("padding_side", "right"), told.pop("peft", None)
    tokenizer = transformers.AutoTokenizer.from_pretrained(where, padding_side=side)
    model = model_of(task, where)
    if method is not None:
        model = adapted(model, method)
    data, collator = data_of(task, tokenizer, model)
    seq2seq = "Seq2Seq" if task == "seq2seq" else ""
    more: dict[str, Any] = {"compute_loss_func": _own_loss} if task == "own loss" else {}
    if "eval_strategy" in told:
        more["eval_dataset"] = data.select(range(10))
        more |= {} if seq2seq else {"compute_metrics": _accuracy}
    kind = _weighted() if task == "weighted classes" else getattr(transformers, f"{seq2seq}Trainer")
    made = getattr(transformers, f"{seq2seq}TrainingArguments")(
        **arguments(output, **{"max_steps": 9, **told})
    )
    return kind(
        model=model,
        args=made,
        train_dataset=data,
        data_collator=collator,
        processing_class=tokenizer,
        **more,
    )


def data_of(task: str, tokenizer: Any, model: Any) -> tuple[Any, Any]:
    """The data set of a task as its example makes it, and its collator."""
    import transformers
    from datasets import Dataset

    draw = random.Random(0)
    long = [text(draw, 40) for _ in range(_ROWS)]
    short = [text(draw, 12) for _ in range(_ROWS)]
    # the rows of other tasks are those of texts, with a column of labels
    rows: dict[str, Callable[[int], Any]] = {
        "answered": lambda n: tokenizer(f"{short[n]} Assistant: {long[n]}"),
        "seq2seq": lambda n: tokenizer(long[n], text_target=short[n]),
        "choices": lambda n: tokenizer([short[n]] * 4, [text(draw, 15) for _ in range(4)]),
        "answers": lambda n: tokenizer(short[n], long[n], max_length=64, padding="max_length"),
    }
    found = [dict(rows.get(task, lambda n: tokenizer(long[n]))(n)) for n in range(_ROWS)]
    labels: dict[str, Callable[[list[int]], dict[str, Any]]] = {
        "classes": lambda _: {"label": draw.randrange(3)},
        "several classes": lambda _: {"label": [float(draw.randrange(2)) for _ in range(3)]},
        "regression": lambda _: {"label": draw.random()},
        "tokens": lambda ids: {"labels": [-100, *(draw.randrange(5) for _ in ids[2:]), -100]},
        "answers": lambda _: {
            "start_positions": (first := draw.randrange(1, 4)),
            "end_positions": first + 2,
        },
        "choices": lambda _: {"label": draw.randrange(4)},
    }
    of_task = labels.get(task.removeprefix("weighted "), lambda _: {})
    data = Dataset.from_list([{**row, **of_task(row["input_ids"])} for row in found])
    if task == "blocks":
        return data.map(_blocks, batched=True), transformers.default_data_collator
    if task == "flattening":
        return data, transformers.DataCollatorWithFlattening()
    if task == "masked":
        return data, transformers.DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15)
    if task == "answers":
        return data, transformers.default_data_collator
    if task == "seq2seq":
        return data, transformers.DataCollatorForSeq2Seq(tokenizer, model=model)
    kinds = {"tokens": "ForTokenClassification", "choices": "ForMultipleChoice"}
    if task in labels or task == "weighted classes":
        return data, getattr(transformers, f"DataCollator{kinds.get(task, 'WithPadding')}")(
            tokenizer
        )
    return data, transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False)


def _blocks(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """`group_texts` of transformers' run_clm.py."""
    size = 32
    together = {name: list(itertools.chain(*columns)) for name, columns in rows.items()}
    total = len(together["input_ids"]) // size * size
    cut = {
        name: [column[at : at + size] for at in range(0, total, size)]
        for name, column in together.items()
    }
    return {**cut, "labels": list(cut["input_ids"])}


def _own_loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    """A loss of the logits, as users hand one to the Trainer."""
    import torch

    logits, wanted = outputs["logits"][:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    loss = torch.nn.functional.cross_entropy(logits, wanted, reduction="sum")
    return loss / (num_items_in_batch if num_items_in_batch is not None else (wanted != -100).sum())


def _weighted() -> Any:
    """The documentation's Trainer whose loss weighs classes."""
    import torch
    import transformers

    class Weighted(transformers.Trainer):
        def compute_loss(
            self,
            model: Any,
            inputs: Any,
            return_outputs: bool = False,
            num_items_in_batch: Any = None,
        ) -> Any:
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            weights = torch.tensor([1.0, 2.0, 3.0])
            loss = torch.nn.functional.cross_entropy(outputs.logits, labels, weight=weights)
            return (loss, outputs) if return_outputs else loss

    return Weighted


def _accuracy(predicted: Any) -> dict[str, float]:
    logits, labels = predicted
    counted = labels != -100
    return {"accuracy": float((logits.argmax(-1)[counted] == labels[counted]).mean())}
