"""Evolla: its text attends to proteins across, through layers of their own; text alone is served."""

from autopack.family import Family

FAMILY = Family(
    name="evolla",
    model_types=frozenset({"evolla"}),
    how="attention site, document by document; text alone",
    refused_arguments={
        "protein_input_ids": "its text attends to proteins across, so every document of a row would see those of all"
    },
)
