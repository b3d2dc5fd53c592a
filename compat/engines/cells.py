"""Which cells there are, without importing what runs in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from compat.matrix import tomllib

ENGINES: dict[str, dict[str, Any]] = tomllib.loads(
    Path(__file__).with_name("engines.toml").read_text(encoding="utf-8")
)
HEAD = "xlnet:sequence-classification"


def types_of(engine: str) -> list[str]:
    """The types that an engine is run with."""
    return ENGINES[engine].get("types", ["llama", "xlnet", HEAD])


def processes_of(engine: str) -> int:
    """On how many processes an engine runs."""
    return ENGINES[engine].get("processes", 2)
