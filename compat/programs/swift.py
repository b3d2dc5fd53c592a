"""ms-swift: the data of its command, for each way of fine-tuning and of preferences.

LoRA has no dropout, so that steps can be compared. Its `--packing` and `--padding_free` want flash
attention, and with it a GPU: neither is among the runs."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from compat.programs._words import text


def prepare(folder: Path) -> None:
    """Write data sets of random words."""
    draw = random.Random(0)

    def said(role: str, most: int) -> dict[str, str]:
        return {"role": role, "content": text(draw, most)}

    asked = [{"messages": [said("user", 20), said("assistant", 40)]} for _ in range(64)]
    sets: dict[str, list[dict[str, Any]]] = {
        "toy": asked,
        "texts": [{"messages": [said("assistant", 60)]} for _ in range(64)],
        "pairs": [{**one, "rejected_response": text(draw, 40)} for one in asked],
        "wishes": [{**one, "label": number % 2 == 0} for number, one in enumerate(asked)],
    }
    for name, rows in sets.items():
        (folder / f"{name}.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + "\n")
