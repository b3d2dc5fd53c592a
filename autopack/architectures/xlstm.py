"""xLSTM, whose matrix memory goes on from one document into the next."""

from autopack.family import Family
from autopack.mixers import ROWS

__all__ = ["FAMILY"]

FAMILY = Family(
    name="xlstm",
    model_types=frozenset({"xlstm"}),
    path="memory cell on documents as rows",
    attends=False,
    mixers={"xLSTMLayer": ROWS},
)
