"""Configurations of well-known models as their authors have published them in config.json, at full
size.

`python -m compat.published` enables all of them on the meta device, in one or several releases of
transformers.

The fields are written down from memory of the published files, but for those of Ministral 8B,
Codestral Mamba and the layers of Zamba2 (a public benchmark's copies of the files: NX-AI, mlstm
benchmarks) and the long factors of Phi-3 with 128k (tests of diffusers, with two decimals). Values
may differ in what does not matter here (`transformers_version`, rounding)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = json.loads(
    Path(__file__).with_name("configurations.json").read_text()
)
"""By name: the class of transformers that the model is used by, and all fields of its
config.json."""
