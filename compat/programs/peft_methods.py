"""PEFT: its methods, each by the default of its configuration, on a tiny Llama under the Trainer of transformers.

Methods that put virtual tokens before a row cannot be packed: with them training runs as it did.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

from compat.programs._drivers import save_encoder, write_logs
from compat.programs._words import save_model, text

NAME = "PEFT"
PACKAGE = "peft"
STAND_INS = ()
_LINEAR = {"target_modules": ["q_proj", "v_proj"]}
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "LoRA": ("Lora", {}),
    "LoRA, all linear layers, rsLoRA": ("Lora", {"target_modules": "all-linear", "use_rslora": True}),
    "LoRA, PiSSA": ("Lora", {"init_lora_weights": "pissa"}),
    "LoRA, head and embedding saved": ("Lora", {"modules_to_save": ["embed_tokens", "lm_head"]}),
    "LoRA, new tokens": ("Lora", {"trainable_token_indices": [5, 6, 7]}),
    "LoRA, gradient checkpointing": ("Lora", {}),
    "LoRA, classification": ("Lora", {"task_type": "SEQ_CLS"}),
    "activated LoRA": ("Lora", {"alora_invocation_tokens": [6]}),
    "DoRA": ("Lora", {"use_dora": True}),
    "IA3": ("IA3", {}),
    "AdaLoRA": ("AdaLora", {"total_step": 8, "tinit": 2, "tfinal": 2}),
    "OFT": ("OFT", {}),
    "BOFT": ("BOFT", _LINEAR),
    "VeRA": ("Vera", {}),
    "LoHa": ("LoHa", _LINEAR),
    "LoKr": ("LoKr", _LINEAR),
    "HRA": ("HRA", _LINEAR),
    "FourierFT": ("FourierFT", {"n_frequency": 50}),
    "layer norm tuning": ("LNTuning", {}),
    "RandLoRA": ("RandLora", {}),
    "RoAd": ("Road", {}),
    "MiSS": ("Miss", {"r": 8}),
    "SHiRA": ("Shira", {"r": 4}),
    "trainable tokens": ("TrainableTokens", {"token_indices": [5, 6, 7]}),
    "prompt tuning": ("PromptTuning", {"num_virtual_tokens": 4}),
    "P-tuning": ("PromptEncoder", {"num_virtual_tokens": 4, "encoder_hidden_size": 16}),
    "prefix tuning": ("PrefixTuning", {"num_virtual_tokens": 4}),
}
"""The configuration of each method, and what it says to it."""
APART: frozenset[str] = frozenset()


def prepare(folder: Path) -> None:
    """Write a tiny Llama, and a tiny BERT."""
    save_model(folder / "model", "llama")
    save_encoder(folder / "encoder", "AutoModelForSequenceClassification", num_labels=3)


def command(run: str, folder: Path, output: Path) -> list[str]:
    """This module, as a script."""
    return ["-m", "compat.programs.peft_methods", run, str(folder), str(output)]


def train(run: str, folder: Path, output: Path) -> None:
    """Train by one of the methods, and write what the Trainer logged."""
    import peft
    import transformers
    from datasets import Dataset

    kind, options = RUNS[run]
    classes = options.get("task_type") == "SEQ_CLS"
    where = folder / ("encoder" if classes else "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(where)
    transformers.set_seed(0)
    auto = transformers.AutoModelForSequenceClassification if classes else transformers.AutoModelForCausalLM
    model = auto.from_pretrained(where, num_labels=3) if classes else auto.from_pretrained(where)
    model = peft.get_peft_model(model, getattr(peft, f"{kind}Config")(**{"task_type": "CAUSAL_LM", **options}))
    draw = random.Random(0)
    rows = [text(draw, 20) + " Assistant: " + text(draw, 20) for _ in range(32)]
    data: Any = Dataset.from_dict({"text": rows}).map(lambda row: tokenizer(row["text"]), remove_columns="text")
    collator: Any = transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False)
    if classes:
        data = data.add_column("label", [draw.randrange(3) for _ in range(32)])
        collator = transformers.DataCollatorWithPadding(tokenizer)
    arguments = transformers.TrainingArguments(
        output_dir=str(output),
        per_device_train_batch_size=4,
        max_steps=8,
        logging_steps=1,
        learning_rate=1e-2,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        gradient_checkpointing="checkpointing" in run,
    )
    trainer = transformers.Trainer(
        model=model, args=arguments, train_dataset=data, data_collator=collator, processing_class=tokenizer
    )
    trainer.train()
    write_logs(output, trainer.state.log_history)


if __name__ == "__main__":
    train(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
