"""The Trainer of transformers: the tasks of its documentation and examples, and the options that
touch batches.

Everything is the default of `TrainingArguments`, but for what a run says, on tiny models without
dropout, as unpadded batches draw other random numbers. bf16 is left out: what it rounds differs by
more than 1e-5 between rows of another order."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

from compat.programs._drivers import Steps, arguments, logged
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
    import transformers

    told = dict(told)
    task, where = told.pop("task"), folder / told.pop("model")
    side, adapted = told.pop("padding_side", "right"), told.pop("peft", False)
    tokenizer = transformers.AutoTokenizer.from_pretrained(where, padding_side=side)
    transformers.set_seed(0)
    auto, fields = _HEADS.get(task, ("CausalLM", {}))
    model = getattr(transformers, f"AutoModelFor{auto}").from_pretrained(where, **fields)
    if adapted:
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM"))
    data, collator = _data(task, tokenizer, model)
    seq2seq = "Seq2Seq" if task == "seq2seq" else ""
    more: dict[str, Any] = {"compute_loss_func": _own_loss} if task == "own loss" else {}
    if "eval_strategy" in told and not seq2seq:
        more["compute_metrics"] = _accuracy
    trainer_class = (
        _weighted() if task == "weighted classes" else getattr(transformers, f"{seq2seq}Trainer")
    )
    made = getattr(transformers, f"{seq2seq}TrainingArguments")(
        **arguments(output, max_steps=9, **told)
    )
    trainer = trainer_class(
        model=model,
        args=made,
        train_dataset=data,
        eval_dataset=data.select(range(10)) if "eval_strategy" in told else None,
        data_collator=collator,
        processing_class=tokenizer,
        **more,
    )
    return logged(trainer)


def _data(task: str, tokenizer: Any, model: Any) -> tuple[Any, Any]:
    """The data set of a task as its example makes it, and its collator."""
    import transformers
    from datasets import Dataset

    draw = random.Random(0)
    texts = Dataset.from_dict({"text": [text(draw, 40) for _ in range(_ROWS)]})
    asked = Dataset.from_dict(
        {"text": [text(draw, 12) for _ in range(_ROWS)], "other": texts["text"]}
    )
    tokens = texts.map(lambda rows: tokenizer(rows["text"]), batched=True, remove_columns="text")
    padding = transformers.DataCollatorWithPadding(tokenizer)
    causal = transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False)
    if task in ("causal", "own loss"):
        return tokens, causal
    if task == "blocks":
        return tokens.map(_blocks, batched=True), transformers.default_data_collator
    if task == "flattening":
        return tokens, transformers.DataCollatorWithFlattening()
    if task == "masked":
        return tokens, transformers.DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15)
    if task in ("classes", "weighted classes"):
        return tokens.add_column("label", [draw.randrange(3) for _ in range(_ROWS)]), padding
    if task == "several classes":
        labels = [[float(draw.randrange(2)) for _ in range(3)] for _ in range(_ROWS)]
        return tokens.add_column("label", labels), padding
    if task == "regression":
        return tokens.add_column("label", [draw.random() for _ in range(_ROWS)]), padding
    if task == "tokens":
        labels = [
            [-100, *(draw.randrange(5) for _ in row[2:]), -100] for row in tokens["input_ids"]
        ]
        return tokens.add_column("labels", labels), transformers.DataCollatorForTokenClassification(
            tokenizer
        )
    if task == "answers":
        pairs = asked.map(
            lambda rows: tokenizer(rows["text"], rows["other"], max_length=64, padding="max_length")
        )
        pairs = pairs.remove_columns(["text", "other"])
        starts = [draw.randrange(1, 4) for _ in range(_ROWS)]
        pairs = pairs.add_column("start_positions", starts).add_column(
            "end_positions", [one + 2 for one in starts]
        )
        return pairs, transformers.default_data_collator
    if task == "choices":
        choices = [[text(draw, 15) for _ in range(4)] for _ in range(_ROWS)]
        rows = [
            tokenizer([one] * 4, four) for one, four in zip(asked["text"], choices, strict=True)
        ]
        labelled = [{**row, "label": draw.randrange(4)} for row in rows]
        return Dataset.from_list(labelled), transformers.DataCollatorForMultipleChoice(tokenizer)
    pairs = asked.map(
        lambda rows: tokenizer(rows["other"], text_target=rows["text"]),
        remove_columns=["text", "other"],
        batched=True,
    )
    return pairs, transformers.DataCollatorForSeq2Seq(tokenizer, model=model)


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
