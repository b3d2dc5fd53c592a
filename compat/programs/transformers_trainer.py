"""The Trainer of transformers: the tasks of its documentation and examples, and the options that
touch batches.

Everything is the default of `TrainingArguments`, but for what a run says, on tiny models without
dropout, as unpadded batches draw other random numbers. bf16 is left out: what it rounds differs by
more than 1e-5 between rows of another order."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset

from compat.programs._drivers import Steps, arguments, logged
from compat.programs._words import text

_ROWS = 32
_HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "masked": ("MaskedLM", {}),
    "classes": ("SequenceClassification", {"num_labels": 3}),
    "regression": ("SequenceClassification", {"num_labels": 1}),
    "tokens": ("TokenClassification", {"num_labels": 5}),
    "answers": ("QuestionAnswering", {}),
    "choices": ("MultipleChoice", {}),
    "seq2seq": ("Seq2SeqLM", {}),
}


def train(told: dict[str, Any], folder: Path, output: Path) -> Steps:
    """Train by the Trainer, as a run says."""
    return logged(trainer_of(told, folder, output))


def model_of(task: str, where: Path) -> Any:
    """The model of a task."""
    transformers.set_seed(0)
    auto, fields = _HEADS.get(task, ("CausalLM", {}))
    return getattr(transformers, f"AutoModelFor{auto}").from_pretrained(where, **fields)


def loaded(task: str, where: Path) -> tuple[Any, Any]:
    """The model of a task as it is loaded, and batches of its data, as scripts with a loop of their
    own have them."""
    model = model_of(task, where)
    data, collator = data_of(task, transformers.AutoTokenizer.from_pretrained(where), model)
    return model, torch.utils.data.DataLoader(data, batch_size=4, collate_fn=collator)


def adapted(model: Any, method: Any) -> Any:
    """A model with LoRA, or with a method of PEFT by the name of its `config` and its options."""
    import peft

    own = {"config": "Lora", "task_type": "CAUSAL_LM", **(method if method is not True else {})}
    kind = getattr(peft, f"{own.pop('config')}Config")
    return peft.get_peft_model(model, kind(**own))


def trainer_of(told: dict[str, Any], folder: Path, output: Path) -> Any:
    """The Trainer of a run."""
    told = dict(told)
    task, where = told.pop("task"), folder / told.pop("model")
    side, method = told.pop("padding_side", "right"), told.pop("peft", None)
    seq2seq = "Seq2Seq" if task == "seq2seq" else ""
    # before the model, which ZeRO-3 makes in parts
    made = getattr(transformers, f"{seq2seq}TrainingArguments")(**arguments(output, **told))
    tokenizer = transformers.AutoTokenizer.from_pretrained(where, padding_side=side)
    model = model_of(task, where)
    if method is not None:
        model = adapted(model, method)
    data, collator = data_of(task, tokenizer, model)
    more: dict[str, Any] = {"compute_loss_func": _own_loss} if task == "own loss" else {}
    if "eval_strategy" in told:
        more["eval_dataset"] = data.select(range(10))
        more |= {} if seq2seq else {"compute_metrics": _accuracy}
    return getattr(transformers, f"{seq2seq}Trainer")(
        model=model,
        args=made,
        train_dataset=data,
        data_collator=collator,
        processing_class=tokenizer,
        **more,
    )


def data_of(task: str, tokenizer: Any, model: Any) -> tuple[Any, Any]:
    """The data set of a task as its example makes it, and its collator."""
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
        "regression": lambda _: {"label": draw.random()},
        "tokens": lambda ids: {"labels": [-100, *(draw.randrange(5) for _ in ids[2:]), -100]},
        "answers": lambda _: {
            "start_positions": (first := draw.randrange(1, 4)),
            "end_positions": first + 2,
        },
        "choices": lambda _: {"label": draw.randrange(4)},
    }
    of_task = labels.get(task, lambda _: {})
    data = Dataset.from_list([{**row, **of_task(row["input_ids"])} for row in found])
    collators: dict[str, Callable[[], Any]] = {
        "flattening": transformers.DataCollatorWithFlattening,
        "answers": lambda: transformers.default_data_collator,
        "seq2seq": lambda: transformers.DataCollatorForSeq2Seq(tokenizer, model=model),
        "classes": lambda: transformers.DataCollatorWithPadding(tokenizer),
        "regression": lambda: transformers.DataCollatorWithPadding(tokenizer),
        "tokens": lambda: transformers.DataCollatorForTokenClassification(tokenizer),
        "choices": lambda: transformers.DataCollatorForMultipleChoice(tokenizer),
    }
    of_tokens = transformers.DataCollatorForLanguageModeling
    return data, collators.get(task, lambda: of_tokens(tokenizer, mlm=task == "masked"))()


def _own_loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    """A loss of the logits, as users hand one to the Trainer."""
    logits, wanted = outputs["logits"][:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    loss = torch.nn.functional.cross_entropy(logits, wanted, reduction="sum")
    return loss / (num_items_in_batch if num_items_in_batch is not None else (wanted != -100).sum())


def _accuracy(predicted: Any) -> dict[str, float]:
    logits, labels = predicted
    counted = labels != -100
    return {"accuracy": float((logits.argmax(-1)[counted] == labels[counted]).mean())}
