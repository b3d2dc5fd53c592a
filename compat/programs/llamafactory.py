"""LLaMA-Factory: the data of its command, for each stage.

Its data loader imports torchaudio, whose builds each want one release of torch: where it cannot be
imported, an empty module stands in for it, which nothing here calls."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from compat.programs._words import text


def prepare(folder: Path) -> None:
    """Write data sets of random words, and what describes them."""
    written = folder / "model" / "config.json"
    # TRL's head of values has dropout where a configuration says nothing of it, and steps are to be
    # compared.
    written.write_text(json.dumps({**json.loads(written.read_text()), "summary_dropout_prob": 0.0}))
    draw = random.Random(0)
    asked = [
        {"instruction": text(draw, 20), "input": "", "output": text(draw, 40)} for _ in range(64)
    ]
    texts = [{"text": text(draw, 60)} for _ in range(64)]
    pairs = [
        {
            "instruction": text(draw, 20),
            "input": "",
            "chosen": text(draw, 40),
            "rejected": text(draw, 40),
        }
        for _ in range(64)
    ]
    wishes = [{**one, "kto_tag": number % 2 == 0} for number, one in enumerate(asked)]
    columns = {"prompt": "instruction", "query": "input"}
    compared = {"ranking": True, "columns": {**columns, "chosen": "chosen", "rejected": "rejected"}}
    sets: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
        "toy": (asked, {}),
        "texts": (texts, {"columns": {"prompt": "text"}}),
        "pairs": (pairs, compared),
        "wishes": (wishes, {"columns": {**columns, "response": "output", "kto_tag": "kto_tag"}}),
    }
    (folder / "data").mkdir()
    for name, (rows, _) in sets.items():
        (folder / "data" / f"{name}.json").write_text(json.dumps(rows))
    described = {name: {**about, "file_name": f"{name}.json"} for name, (_, about) in sets.items()}
    (folder / "data" / "dataset_info.json").write_text(json.dumps(described))
