"""The recorded results that the package carries."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from autopack.errors import AutopackError

_PACKAGE = Path(__file__).parents[1]
MEASURED = _PACKAGE / "measured.json"
"""What `python -m compat.exactness` recorded: by task and model type, the worst error of each backend, or a refusal."""
SURVEYED = _PACKAGE / "surveyed.json"
"""What `python -m compat.survey` recorded: by model type, classes and values of fields that were exact."""


def load(path: Path | None = None) -> dict[str, Any]:
    """One of the two, by default `MEASURED`: `with`, the versions that it was made with, and the results."""
    path = MEASURED if path is None else path
    try:
        return dict(json.loads(path.read_text()))
    except FileNotFoundError as error:
        raise AutopackError(
            f"{path} is missing, so this installation of autopack is not complete; install it anew"
        ) from error
