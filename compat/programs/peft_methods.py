"""PEFT: its methods, each by the default of its configuration, on a tiny Llama under the Trainer of
transformers.

Methods that put virtual tokens before a row cannot be packed: with them training runs as it did.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from compat.programs._drivers import Steps, arguments, logged
from compat.programs._words import text


def train(told: dict[str, Any], folder: Path, output: Path) -> Steps:
    """Train by one of the methods."""
    import peft
    import transformers
    from datasets import Dataset

    options = {"task_type": "CAUSAL_LM", **told.get("options", {})}
    classes = options["task_type"] == "SEQ_CLS"
    where = folder / ("encoder" if classes else "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(where)
    transformers.set_seed(0)
    auto = (
        transformers.AutoModelForSequenceClassification
        if classes
        else transformers.AutoModelForCausalLM
    )
    model = auto.from_pretrained(where, **({"num_labels": 3} if classes else {}))
    model = peft.get_peft_model(model, getattr(peft, f"{told['config']}Config")(**options))
    draw = random.Random(0)
    rows = [text(draw, 20) + " Assistant: " + text(draw, 20) for _ in range(32)]
    data: Any = Dataset.from_dict({"text": rows}).map(
        lambda row: tokenizer(row["text"]), remove_columns="text"
    )
    collator: Any = transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False)
    if classes:
        data = data.add_column("label", [draw.randrange(3) for _ in range(32)])
        collator = transformers.DataCollatorWithPadding(tokenizer)
    checkpointing = told.get("checkpointing", False)
    settings = arguments(
        output, max_steps=8, learning_rate=1e-2, gradient_checkpointing=checkpointing
    )
    trainer = transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(**settings),
        train_dataset=data,
        data_collator=collator,
        processing_class=tokenizer,
    )
    return logged(trainer)
