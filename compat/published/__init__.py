"""Configurations of well-known models as their authors have published them in config.json, at full size.

`python -m compat.published` enables all of them on the meta device, in one or several releases of transformers.

The fields are written down from memory of the published files; where another source was used, a comment at the
configuration names it. Values may differ in what does not matter here (`transformers_version`, rounding of long lists).
"""

from __future__ import annotations

from compat.published.decoders import DECODERS
from compat.published.encoder_decoders import ENCODER_DECODERS
from compat.published.encoders import ENCODERS
from compat.published.llamas import LLAMAS, Configurations
from compat.published.mixtures import MIXTURES

PUBLISHED: Configurations = {**LLAMAS, **DECODERS, **MIXTURES, **ENCODERS, **ENCODER_DECODERS}
"""By name: the class of transformers that the model is used by, and all fields of its config.json."""
