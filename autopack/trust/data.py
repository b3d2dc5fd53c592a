"""The recorded results that the package carries."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from packaging.version import Version

from autopack.errors import AutopackError

_PACKAGE = Path(__file__).parents[1]
MEASURED = _PACKAGE / "measured.json"
"""What `python -m compat.exactness` recorded: by task and model type, the worst error of each backend, or a refusal."""
SURVEYS = _PACKAGE / "surveyed"
"""What `python -m compat.survey` recorded, a file per release of transformers: by model type, classes and values of
fields that were exact. Beside each is what `python -m compat.content` recorded: the code that they ran."""


def load(path: Path | None = None) -> dict[str, Any]:
    """Recorded results, by default `MEASURED`: `with`, the versions that they were made with, and the results."""
    path = MEASURED if path is None else path
    try:
        return dict(json.loads(gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_text()))
    except FileNotFoundError as error:
        raise AutopackError(
            f"{path} is missing, so this installation of autopack is not complete; install it anew",
            code="broken-installation",
        ) from error


def survey_of(release: str) -> Path:
    """The file of the survey of a release."""
    return SURVEYS / f"{release}.json"


def content_of(release: str) -> Path:
    """Where the code of a release is that its survey ran."""
    return SURVEYS / f"{release}.content.json.gz"


def surveyed() -> list[str]:
    """The releases of transformers that have been surveyed, the newest first."""
    found = [path.stem for path in SURVEYS.glob("*.json")]
    if not found:
        raise AutopackError(
            f"{SURVEYS} has no survey, so this installation of autopack is not complete; install it anew",
            code="broken-installation",
        )
    return sorted(found, key=Version, reverse=True)


def nearest(release: str) -> list[str]:
    """The releases that have been surveyed, the one that is nearest to another first.

    Neighbours in the order of releases come first, and of two the one with the nearer number: 6.0.0 is next to the last
    of 5, whose number is not.
    """
    known, wanted = sorted(map(Version, surveyed())), Version(release)
    before = sum(version < wanted for version in known)

    def distance(place: int) -> tuple[int, ...]:
        found = known[place]
        pairs = zip((found.major, found.minor, found.micro), (wanted.major, wanted.minor, wanted.micro), strict=True)
        return (before - place - 1 if place < before else place - before, *(abs(a - b) for a, b in pairs))

    return [str(known[place]) for place in sorted(range(len(known)), key=distance)]
