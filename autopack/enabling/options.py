"""The options of `enable` and their values, for Python, the command line and the environment alike.

Imports neither torch nor transformers, so that a command can offer the options at once.
"""

from __future__ import annotations

import os
import pkgutil
from collections.abc import Mapping, Sequence

from autopack.attention import backends

CHOICES = {
    "backend": ("auto", *(module.name for module in pkgutil.iter_modules(backends.__path__))),
    "unpad": ("auto", "always", "never"),
    "verify": ("auto", "always", "full", "never"),
    "share": ("auto", "always", "never"),
}
"""The values that each option takes, its default first."""

WATCH_ACTIONS = ("raise", "log")
"""What becomes of a leak that a watched training call shows, the default first."""


def check(**given: str) -> None:
    """Raise `ValueError` where an option has a value that it does not take."""
    for name, value in given.items():
        if value not in CHOICES[name]:
            # transformers' names of attention implementations hold those of backends: flash_attention_2.
            meant = next((choice for choice in CHOICES[name] if choice in str(value)), None)
            hint = "" if meant is None else f". Did you mean {meant!r}?"
            raise ValueError(f"{name} must be one of {', '.join(CHOICES[name])}; found {value!r}{hint}")


def read_names(given: Sequence[str]) -> tuple[str, ...]:
    """Names of fields; a single one is a list of one. Raises `ValueError` for what are no names."""
    names = (given,) if isinstance(given, str) else tuple(given)
    if not all(isinstance(name, str) and name.isidentifier() for name in names):
        raise ValueError(f"leave_out must be names of fields of the model's output; found {given!r}")
    return names


def read_watch(every: int | None, action: str | None, environment: Mapping[str, str] | None = None) -> tuple[int, str]:
    """How often training calls are checked (0: never), and what becomes of a leak; None leaves it to the environment.

    The variables are AUTOPACK_WATCH and AUTOPACK_WATCH_ACTION. Raises `ValueError` for values that are none.
    """
    environment = os.environ if environment is None else environment
    name = "watch"
    found: int | str | None = every
    if every is None:
        name, text = "AUTOPACK_WATCH", environment.get("AUTOPACK_WATCH", "").strip() or "0"
        found = int(text) if text.isdecimal() else text
    if isinstance(found, bool) or not isinstance(found, int) or found < 0:
        raise ValueError(f"{name} must be a number of training calls, 0 for none; found {found!r}")
    name = "watch_action" if action is not None else "AUTOPACK_WATCH_ACTION"
    if action is None:
        action = environment.get(name, "").strip().lower() or WATCH_ACTIONS[0]
    if action not in WATCH_ACTIONS:
        raise ValueError(f"{name} must be one of {', '.join(WATCH_ACTIONS)}; found {action!r}")
    return found, action
