"""Dictionaries of transformers of which a model uses one entry or the other, by its configuration or its class."""

from __future__ import annotations

TABLES: dict[str, tuple[str, str]] = {
    "attention": ("transformers.modeling_utils", "AttentionInterface._global_mapping"),
    "mask": ("transformers.masking_utils", "AttentionMaskInterface._global_mapping"),
    "experts": ("transformers.integrations.moe", "ExpertsInterface._global_mapping"),
    "loss": ("transformers.loss.loss_utils", "LOSS_MAPPING"),
}
"""By what they are for, the module and the piece that is such a dictionary; their entries are pieces of their own."""


def entry(table: str, key: str) -> tuple[str, str]:
    """The module and the name of the piece that an entry of a table is."""
    module, piece = TABLES[table]
    return module, f"{piece}['{key}']"


def root_of_entry(table: str, key: str) -> str:
    """The name under which the code that an entry runs is recorded."""
    return f"{table} {key}"
