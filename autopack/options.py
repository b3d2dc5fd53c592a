"""The options of `enable` and their values, for Python, the command line and the environment alike.

Imports neither torch nor transformers, so that a command can offer the options at once.
"""

from __future__ import annotations

import os
import pkgutil
from dataclasses import dataclass
from typing import Any, Literal

CHOICES: dict[str, tuple[Any, ...]] = {
    "backend": (
        "auto",
        *(m.name for m in pkgutil.iter_modules([os.path.join(os.path.dirname(__file__), "attention", "backends")])),
    ),
    "unpad": (True, False),
    "share": (True, False),
    "verify": (True, False, "strict"),
}
"""The values that each option takes, its default first."""

INSTEAD = {
    ("unpad", "always"): "unpad=True; evaluation without labels unpads with use_cache=False in the call",
    ("verify", "always"): "verify=True; autopack.audit(model) audits this very model",
    ("verify", "full"): "verify=True; autopack.audit(model) audits this very model",
    **{(name, "always"): f"{name}=True" for name in ("share",)},
    **{(name, "auto"): f"{name}=True" for name in ("unpad", "share", "verify")},
    **{(name, "never"): f"{name}=False" for name in ("unpad", "share", "verify")},
}
"""What is written in place of values that options no longer take."""


@dataclass(frozen=True)
class Options:
    """What the user asked for: see `autopack.enable`."""

    backend: str = "auto"
    unpad: bool = True
    share: bool = True
    verify: bool | Literal["strict"] = True
    check_every: int | None = None
    sequence_parallel: Any = None

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            value = getattr(self, name)
            # 1 equals True, and a list has no hash.
            if not any(type(value) is type(choice) and value == choice for choice in choices):
                wanted = ", ".join(map(repr, choices[:-1])) + f" or {choices[-1]!r}"
                raise ValueError(f"{name} must be {wanted}; found {value!r}{_hint(name, value)}")
        every = self.check_every
        if every is not None and (type(every) is not int or every < 0):
            raise ValueError(
                f"check_every must be None or a number of training calls, 0 for no checks; found {every!r}"
            )


def _hint(name: str, value: Any) -> str:
    if not isinstance(value, str):
        return ""
    if (name, value) in INSTEAD:
        return f" (write {INSTEAD[name, value]})"
    # transformers' names of attention implementations hold those of backends: flash_attention_2.
    meant = next((choice for choice in CHOICES[name] if isinstance(choice, str) and choice in value), None)
    return "" if meant is None else f". Did you mean {meant!r}?"
