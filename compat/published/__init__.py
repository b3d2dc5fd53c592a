"""Configurations of well-known models as their authors have published them in config.json, at full
size; tests/proving enables each on the meta device.

The fields are written down from memory of the published files, but for those of Ministral 8B,
Codestral Mamba and the layers of Zamba2 (a public benchmark's copies of the files: NX-AI, mlstm
benchmarks) and the long factors of Phi-3 with 128k (tests of diffusers, with two decimals). Values
may differ in what does not matter here (`transformers_version`, rounding)."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = json.loads(
    Path(__file__).with_name("configurations.json").read_text()
)
"""By name: the class of transformers that the model is used by, and all fields of its
config.json."""


def build(name: str) -> Any:
    """The model at full size on the meta device, in its published dtype, of a configuration that
    `from_pretrained` reads from the published file."""
    import torch
    import transformers

    cls, fields = PUBLISHED[name]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(fields), encoding="utf-8")
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    with torch.device("meta"):
        return getattr(transformers, cls)._from_config(config)


def absent(name: str) -> bool:
    """Whether the installed release has no such type or class."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    cls, fields = PUBLISHED[name]
    return fields["model_type"] not in CONFIG_MAPPING or not hasattr(transformers, cls)
