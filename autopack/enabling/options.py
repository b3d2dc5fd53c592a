"""The options of `enable` and their values, for Python, the command line and the environment alike.

Imports neither torch nor transformers, so that a command can offer the options at once.
"""

from __future__ import annotations

CHOICES = {
    "backend": ("auto", "flash", "varlen", "flex", "sdpa", "eager"),
    "unpad": ("auto", "always", "never"),
    "verify": ("auto", "always", "never"),
}
"""The values that each option takes, its default first."""


def check(**given: str) -> None:
    """Raise `ValueError` where an option has a value that it does not take."""
    for name, value in given.items():
        if value not in CHOICES[name]:
            raise ValueError(f"{name} must be one of {', '.join(CHOICES[name])}; found {value!r}")
