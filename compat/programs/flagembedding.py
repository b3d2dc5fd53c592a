"""FlagEmbedding: its commands for embedders and rerankers with their defaults, on random words.

    python3 -m venv ENV && ENV/bin/pip install "torch==2.13.0" "FlagEmbedding==1.4.2" "transformers==5.23.0"
    ENV/bin/pip install -e .

The tiny encoders have no dropout, so that steps can be compared.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from compat.programs._encoder import save_encoder
from compat.programs._words import save_model, text

NAME = "FlagEmbedding"
PACKAGE = "FlagEmbedding"
STAND_INS = ()
_EMBEDDER = "embedder.encoder_only.base"
_LORA = {"use_lora": True, "lora_rank": 8, "lora_alpha": 16, "target_modules": "q_proj v_proj", "lora_dropout": 0}
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "embedder": (_EMBEDDER, {"model_name_or_path": "bert"}),
    "embedder, mean pooling, sub-batches": (
        _EMBEDDER,
        {"model_name_or_path": "bert", "sentence_pooling_method": "mean", "sub_batch_size": 4},
    ),
    "embedder, M3, unified": (
        "embedder.encoder_only.m3",
        {"model_name_or_path": "roberta", "unified_finetuning": True, "use_self_distill": True},
    ),
    "embedder, decoder, LoRA": (
        "embedder.decoder_only.base",
        {"model_name_or_path": "mistral", "sentence_pooling_method": "last_token", **_LORA},
    ),
    "reranker": ("reranker.encoder_only.base", {"model_name_or_path": "reranker", "max_len": 128}),
    "reranker, decoder, LoRA": (
        "reranker.decoder_only.base",
        {"model_name_or_path": "causal", "model_type": "decoder", "max_len": 128, **_LORA},
    ),
}
"""The command of each run, and what it says beside the arguments that all have."""
APART: frozenset[str] = frozenset()


def prepare(folder: Path) -> None:
    """Write tiny models of the types that its examples train, and queries with texts that answer them and do not."""
    save_encoder(folder / "bert")
    save_encoder(folder / "roberta", "xlm-roberta", max_position_embeddings=514)
    save_encoder(folder / "reranker", "xlm-roberta", "AutoModelForSequenceClassification", num_labels=1)
    save_model(folder / "mistral", "mistral", "AutoModel", num_key_value_heads=2)
    save_model(folder / "causal", "mistral", num_key_value_heads=2)
    draw = random.Random(0)
    rows = [
        {"query": text(draw, 20), "pos": [text(draw, 80)], "neg": [text(draw, 80) for _ in range(5)], "prompt": "w1"}
        for _ in range(16)
    ]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")


def command(run: str, folder: Path, output: Path) -> list[str]:
    """One of its modules, as its documentation has it after `torchrun`."""
    module, said = RUNS[run]
    settings = {
        "train_data": folder / "data.jsonl",
        "cache_path": output / "cache",
        "train_group_size": 4,
        "query_max_len": 64,
        "passage_max_len": 128,
        "pad_to_multiple_of": 8,
        "output_dir": output / "out",
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-3,
        "max_steps": 4,
        "logging_steps": 1,
        "save_steps": 4,
        "dataloader_drop_last": True,
        "dataloader_num_workers": 0,
        "report_to": "none",
        "use_cpu": True,
        **said,
    }
    settings["model_name_or_path"] = folder / str(settings["model_name_or_path"])
    parts = [part for name, value in settings.items() for part in (f"--{name}", *str(value).split(" "))]
    return ["-m", f"FlagEmbedding.finetune.{module}", *parts]
