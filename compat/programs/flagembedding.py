"""FlagEmbedding: the data of its commands for embedders and rerankers."""

from __future__ import annotations

import json
import random
from pathlib import Path

from compat.programs._words import text


def prepare(folder: Path) -> None:
    """Write queries with texts that answer them and do not."""
    draw = random.Random(0)
    rows = [
        {
            "query": text(draw, 20),
            "pos": [text(draw, 80)],
            "neg": [text(draw, 80) for _ in range(5)],
            "prompt": "w1",
        }
        for _ in range(16)
    ]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
