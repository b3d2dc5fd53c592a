"""Modules that mix tokens in a way of their own, or count them, made to start anew at every document."""

from autopack.family import MixerCall, Way
from autopack.mixers.site import adapt_mixer
from autopack.mixers.ways import (
    ALONE,
    RELATIVE,
    RESTARTING,
    ROWS,
    Alone,
    AtOperations,
    LookingBack,
    OneByOne,
    RelativeBias,
    Restarting,
)

__all__ = [
    "ALONE",
    "RELATIVE",
    "RESTARTING",
    "ROWS",
    "Alone",
    "AtOperations",
    "LookingBack",
    "MixerCall",
    "OneByOne",
    "RelativeBias",
    "Restarting",
    "Way",
    "adapt_mixer",
]
