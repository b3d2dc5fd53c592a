"""The version of this package, read by the build too, and the oldest versions of what it needs."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from functools import cache

__version__ = "0.2.0"

MINIMUM = {
    "torch": "2.4",
    "transformers": "4.44",
    "wrapt": "1.16",
    "packaging": "23",
    "numpy": "1.26",
}
"""Packages that autopack needs, with the oldest version that it works with."""


def problem(name: str, installed: str | None) -> str | None:
    """Return a message if a package's installed version is missing or too old, else None."""
    what = "is not installed"
    if installed is not None:
        try:
            from packaging.version import Version

            # Vendors' builds of 2.4 call themselves 2.4.0a0+something, which counts as older.
            if Version(Version(installed).base_version) >= Version(MINIMUM[name]):
                return None
            what = f"{installed} is too old"
        except ImportError:  # is a problem of its own
            return None
        except ValueError:
            what = f"has the version {installed!r}, which cannot be read"
    needed = f"autopack needs {MINIMUM[name]} or later: pip install '{name}>={MINIMUM[name]}'"
    return f"{name} {what}; {needed}"


def mismatch(torch: str, transformers: str, requirements: Iterable[str]) -> str | None:
    """Return a message if an installed transformers will not use an installed torch, else None.

    With one that is too old it turns its models off, and says no more than a line of its log. Of
    one that is newer than it names (2.7 for 4.52) it takes no notice.
    """
    try:
        from packaging.requirements import Requirement
        from packaging.version import Version

        found = Version(Version(torch).base_version)
        wanted = [
            need
            for need in map(Requirement, requirements)
            if need.name == "torch"
            and (need.marker is None or need.marker.evaluate({"extra": "torch"}))
        ]
    except (ImportError, ValueError):  # is a problem of its own
        return None
    least = [bound for need in wanted for bound in need.specifier if bound.operator in (">", ">=")]
    unmet = next((bound for bound in least if not bound.contains(found, prereleases=True)), None)
    if unmet is None:
        return None
    return (
        f"transformers {transformers} needs torch{unmet} and leaves its models out with torch "
        f"{torch}: pip install 'torch{unmet}', or install an older transformers"
    )


@cache
def refuse_old() -> None:
    """Raise `UnsupportedVersion` if an installed package is too old; success is cached."""
    from importlib.metadata import PackageNotFoundError, requires, version

    from autopack.errors import UnsupportedVersion

    problems = []
    for name in MINIMUM:
        # its import says so, or it is there without its metadata
        with suppress(PackageNotFoundError):
            problems.append(problem(name, version(name)))
    with suppress(PackageNotFoundError):
        problems.append(
            mismatch(version("torch"), version("transformers"), requires("transformers") or ())
        )
    for found in filter(None, problems):
        raise UnsupportedVersion(f"{found} (`autopack doctor` looks at the others too)")
