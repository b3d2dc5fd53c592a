"""GIT, text alone. Its loss drops as many tokens of a row as an image has, so calls with labels are refused."""

from autopack.family import Family
from autopack.mixers import ALONE

FAMILY = Family(
    name="git",
    model_types=frozenset({"git"}),
    how="the model's own attention, documents alone; no labels",
    attends=False,
    mixers={"GitSelfAttention": ALONE},
    refused_arguments={
        "labels": "its loss leaves out as many tokens at the start of a row as an image has",
        "pixel_values": "its image stands before the row and not before a document",
    },
)
