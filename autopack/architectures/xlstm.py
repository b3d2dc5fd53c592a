"""xLSTM, whose matrix memory goes on from one document into the next."""

from autopack.family import Family, Tiny
from autopack.mixers import ROWS

FAMILY = Family(
    name="xlstm",
    model_types=frozenset({"xlstm"}),
    how="memory cell on documents as rows",
    attends=False,
    mixers={"xLSTMLayer": ROWS},
    tiny=Tiny(configs={"xlstm": {"autocast_kernel_dtype": "float32"}}),
)
