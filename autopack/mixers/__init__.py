"""Token mixers other than attention, made to start anew at every document."""

from autopack.mixers.site import adapt_mixer
from autopack.mixers.ways import ROWS, AtOperations, LookingBack, Way

__all__ = ["ROWS", "AtOperations", "LookingBack", "Way", "adapt_mixer"]
