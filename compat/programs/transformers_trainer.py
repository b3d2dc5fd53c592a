"""The Trainer of transformers: the tasks of its documentation and examples, and the options that touch batches.

Everything is the default of `TrainingArguments`, but for what a run says, on tiny models without dropout, as unpadded
batches draw other random numbers. bf16 is left out: what it rounds differs by more than 1e-5 between rows of another
order.
"""

from __future__ import annotations

import itertools
import random
import sys
from pathlib import Path
from typing import Any

from compat.programs._drivers import save_encoder, write_logs
from compat.programs._words import save_model, text

NAME = "transformers, Trainer"
PACKAGE = "accelerate"
STAND_INS = ()
_LM: dict[str, Any] = {"task": "causal"}
RUNS: dict[str, dict[str, Any]] = {
    "causal LM": _LM,
    "causal LM, blocks of texts": {"task": "blocks"},
    "causal LM, DataCollatorWithFlattening": {"task": "flattening"},
    "causal LM, padded left": {"task": "causal", "padding_side": "left"},
    "causal LM, gradient accumulation, grouped by length": {
        **_LM,
        "gradient_accumulation_steps": 2,
        "train_sampling_strategy": "group_by_length",
    },
    "causal LM, gradient checkpointing": {**_LM, "gradient_checkpointing": True},
    "causal LM, label smoothing": {**_LM, "label_smoothing_factor": 0.1},
    "causal LM, NEFTune": {**_LM, "neftune_noise_alpha": 5},
    "causal LM, LoRA": {**_LM, "peft": True},
    "causal LM, torch.compile": {**_LM, "torch_compile": True, "torch_compile_backend": "aot_eager"},
    "causal LM, evaluation, last batch dropped": {
        **_LM,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "dataloader_drop_last": True,
    },
    "causal LM, batch size found, tokens counted": {
        **_LM,
        "auto_find_batch_size": True,
        "include_num_input_tokens_seen": "non_padding",
    },
    "causal LM, own loss function": {"task": "own loss"},
    "masked LM, BERT": {"task": "masked", "model": "bert"},
    "masked LM, ModernBERT": {"task": "masked", "model": "modernbert"},
    "sequence classification, BERT": {"task": "classes", "eval_strategy": "epoch"},
    "sequence classification, class weights": {"task": "weighted classes"},
    "sequence classification, several labels": {"task": "several classes"},
    "sequence classification, Llama": {"task": "classes", "model": "llama"},
    "regression": {"task": "regression"},
    "token classification": {"task": "tokens", "eval_strategy": "epoch"},
    "question answering": {"task": "answers"},
    "multiple choice": {"task": "choices"},
    "seq2seq, T5": {"task": "seq2seq", "model": "t5", "predict_with_generate": True, "eval_strategy": "epoch"},
    "seq2seq, BART, label smoothing": {"task": "seq2seq", "model": "bart", "label_smoothing_factor": 0.1},
}
"""The task of each run, and what it says to `TrainingArguments`."""
APART = frozenset(("causal LM, padded left",))
_ROWS = 32
_T5 = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
_BART: dict[str, Any] = {
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "max_position_embeddings": 128,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "classifier_dropout": 0.0,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": 2,
}
_HEADS = {
    "masked": "AutoModelForMaskedLM",
    "classes": "AutoModelForSequenceClassification",
    "weighted classes": "AutoModelForSequenceClassification",
    "several classes": "AutoModelForSequenceClassification",
    "regression": "AutoModelForSequenceClassification",
    "tokens": "AutoModelForTokenClassification",
    "answers": "AutoModelForQuestionAnswering",
    "choices": "AutoModelForMultipleChoice",
    "seq2seq": "AutoModelForSeq2SeqLM",
}
_PROBLEMS: dict[str, dict[str, Any]] = {
    "classes": {"num_labels": 3},
    "weighted classes": {"num_labels": 3},
    "several classes": {"num_labels": 3, "problem_type": "multi_label_classification"},
    "regression": {"num_labels": 1},
    "tokens": {"num_labels": 5},
}


def prepare(folder: Path) -> None:
    """Write tiny models of the types that are trained, each with a tokenizer of words."""
    save_model(folder / "llama", "llama")
    save_encoder(folder / "bert")
    modern = {"attention_dropout": 0.0, "mlp_dropout": 0.0, "embedding_dropout": 0.0, "classifier_dropout": 0.0}
    numbers = {"cls_token_id": 1, "sep_token_id": 2, "global_attn_every_n_layers": 2, "local_attention": 16}
    save_encoder(folder / "modernbert", "AutoModelForMaskedLM", "modernbert", **modern, **numbers)
    save_model(folder / "t5", "t5", "AutoModelForSeq2SeqLM", **_T5, decoder_start_token_id=0)
    save_model(folder / "bart", "bart", "AutoModelForSeq2SeqLM", **_BART)


def command(run: str, folder: Path, output: Path) -> list[str]:
    """This module, as a script."""
    return ["-m", "compat.programs.transformers_trainer", run, str(folder), str(output)]


def train(run: str, folder: Path, output: Path) -> None:
    """Train one of the runs, and write what its Trainer logged."""
    import transformers

    told = dict(RUNS[run])
    task, kind = told.pop("task"), told.pop("model", "bert")
    kind = "llama" if task in ("causal", "blocks", "flattening", "own loss") else kind
    side, adapted = told.pop("padding_side", "right"), told.pop("peft", False)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / kind, padding_side=side)
    transformers.set_seed(0)
    auto = getattr(transformers, _HEADS.get(task, "AutoModelForCausalLM"))
    model = auto.from_pretrained(folder / kind, **_PROBLEMS.get(task, {}))
    if adapted:
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM"))
    data, collator = _data(task, tokenizer, model)
    seq2seq = "Seq2Seq" if task == "seq2seq" else ""
    arguments = getattr(transformers, f"{seq2seq}TrainingArguments")(
        output_dir=str(output),
        per_device_train_batch_size=4,
        max_steps=9,
        logging_steps=1,
        learning_rate=1e-3,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        **told,
    )
    more: dict[str, Any] = {"compute_loss_func": _own_loss} if task == "own loss" else {}
    if "eval_strategy" in told and not seq2seq:
        more["compute_metrics"] = _accuracy
    trainer_class = _weighted() if task == "weighted classes" else getattr(transformers, f"{seq2seq}Trainer")
    trainer = trainer_class(
        model=model,
        args=arguments,
        train_dataset=data,
        eval_dataset=data.select(range(10)) if "eval_strategy" in told else None,
        data_collator=collator,
        processing_class=tokenizer,
        **more,
    )
    trainer.train()
    write_logs(output, trainer.state.log_history)


def _data(task: str, tokenizer: Any, model: Any) -> tuple[Any, Any]:
    """The data set of a task as its example makes it, and its collator."""
    import transformers
    from datasets import Dataset

    draw = random.Random(0)
    texts = Dataset.from_dict({"text": [text(draw, 40) for _ in range(_ROWS)]})
    asked = Dataset.from_dict({"text": [text(draw, 12) for _ in range(_ROWS)], "other": texts["text"]})
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
        labels = [[-100, *(draw.randrange(5) for _ in row[2:]), -100] for row in tokens["input_ids"]]
        return tokens.add_column("labels", labels), transformers.DataCollatorForTokenClassification(tokenizer)
    if task == "answers":
        pairs = asked.map(lambda rows: tokenizer(rows["text"], rows["other"], max_length=64, padding="max_length"))
        pairs = pairs.remove_columns(["text", "other"])
        starts = [draw.randrange(1, 4) for _ in range(_ROWS)]
        pairs = pairs.add_column("start_positions", starts).add_column("end_positions", [one + 2 for one in starts])
        return pairs, transformers.default_data_collator
    if task == "choices":
        choices = [[text(draw, 15) for _ in range(4)] for _ in range(_ROWS)]
        rows = [tokenizer([one] * 4, four) for one, four in zip(asked["text"], choices, strict=True)]
        labelled = [{**row, "label": draw.randrange(4)} for row in rows]
        return Dataset.from_list(labelled), transformers.DataCollatorForMultipleChoice(tokenizer)
    pairs = asked.map(
        lambda rows: tokenizer(rows["other"], text_target=rows["text"]), remove_columns=["text", "other"], batched=True
    )
    return pairs, transformers.DataCollatorForSeq2Seq(tokenizer, model=model)


def _blocks(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """`group_texts` of transformers' run_clm.py."""
    size = 32
    together = {name: list(itertools.chain(*columns)) for name, columns in rows.items()}
    total = len(together["input_ids"]) // size * size
    cut = {name: [column[at : at + size] for at in range(0, total, size)] for name, column in together.items()}
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
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            weights = torch.tensor([1.0, 2.0, 3.0])
            loss = torch.nn.functional.cross_entropy(outputs.logits, labels, weight=weights)
            return (loss, outputs) if return_outputs else loss

    return Weighted


def _accuracy(predicted: Any) -> dict[str, float]:
    logits, labels = predicted
    found = logits.argmax(-1)
    if found.ndim == 2 and found.shape == labels.shape and (labels == -100).any():
        counted = labels != -100
        return {"accuracy": float((found[counted] == labels[counted]).mean())}
    return {"accuracy": float((found == labels).mean())}


if __name__ == "__main__":
    train(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
