"""Modules that mix tokens in a way of their own, or count them, made to start anew at every document."""

from autopack.mixers.site import MixerCall, adapt_mixer
from autopack.mixers.ways import ALONE, RESTARTING, ROWS, Alone, AtOperations, LookingBack, OneByOne, Restarting, Way

__all__ = [
    "ALONE",
    "RESTARTING",
    "ROWS",
    "Alone",
    "AtOperations",
    "LookingBack",
    "MixerCall",
    "OneByOne",
    "Restarting",
    "Way",
    "adapt_mixer",
]
