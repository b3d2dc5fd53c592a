"""GLiNER: `train_model` with its defaults, on each of its architectures over tiny encoders.

    python3 -m venv ENV && ENV/bin/pip install "torch==2.13.0" "gliner==0.2.29" "transformers==5.16.1" accelerate
    ENV/bin/pip install -e .

Its own heads and the encoders have no dropout, so that steps can be compared.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

from compat.programs._encoder import save_encoder
from compat.programs._watched import driven, watched
from compat.programs._words import SPECIAL, WORDS

NAME = "GLiNER"
PACKAGE = "gliner"
STAND_INS = ()
_DEBERTA: dict[str, Any] = {"model_name": "deberta"}
RUNS: dict[str, dict[str, Any]] = {
    "spans, DeBERTa": _DEBERTA,
    "spans, BERT": {"model_name": "bert"},
    "spans, ModernBERT": {"model_name": "modernbert"},
    "token level": {**_DEBERTA, "span_mode": "token_level"},
    "two encoders": {**_DEBERTA, "labels_encoder": "bert"},
    "relations": {**_DEBERTA, "relations_layer": "dot"},
}
"""What each run's configuration says beside sizes."""
APART: frozenset[str] = frozenset()


def prepare(folder: Path) -> None:
    """Write the encoders: GLiNER's default DeBERTa-v2, and two others that its users train.

    Each has as many embeddings as GLiNER's tokens need: new ones would be drawn with a covariance, which is not
    the same to the last bit in every process.
    """
    relative: dict[str, Any] = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 32}
    relative["max_relative_positions"] = -1
    size = len(SPECIAL) + len(WORDS) + 3
    save_encoder(folder / "deberta", "deberta-v2", pooler_dropout=0.0, vocab_size=size, **relative)
    save_encoder(folder / "bert", vocab_size=size)
    none: dict[str, Any] = {"attention_dropout": 0.0, "embedding_dropout": 0.0, "mlp_dropout": 0.0}
    save_encoder(folder / "modernbert", "modernbert", vocab_size=size, cls_token_id=1, sep_token_id=2, **none)


def command(run: str, folder: Path, output: Path) -> list[str]:
    """This module, which makes a model of a configuration and trains it."""
    return driven("gliner_", run, folder, output)


def _rows(relations: bool) -> list[dict[str, Any]]:
    draw = random.Random(0)
    rows = []
    for _ in range(32):
        words = draw.choices(WORDS, k=draw.randrange(5, 60))
        starts = sorted(draw.sample(range(len(words) - 1), 2))
        spans = [[start, start + draw.randrange(2), draw.choice(["person", "place"])] for start in starts]
        rows.append(
            {"tokenized_text": words, "ner": spans, **({"relations": [[0, 1, "lives in"]]} if relations else {})}
        )
    return rows


def _train(run: str, folder: Path, output: Path) -> None:
    from gliner import GLiNER, GLiNERConfig

    said = {
        name: str(folder / value) if "model" in name or "encoder" in name else value
        for name, value in RUNS[run].items()
    }
    model = GLiNER.from_config(GLiNERConfig(**said, hidden_size=64, dropout=0.0, name="tiny"))
    model.train_model(
        train_dataset=_rows(relations="relations_layer" in said),
        eval_dataset=None,
        output_dir=str(output / "out"),
        max_steps=4,
        learning_rate=1e-3,
        use_cpu=True,
        dataloader_num_workers=0,
        save_strategy="no",
    )


if __name__ == "__main__":
    with watched(Path(sys.argv[3])):
        _train(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
