"""The version of this package, read by the build too, and the oldest versions of what it needs."""

from __future__ import annotations

from functools import cache

__version__ = "0.1.0"

MINIMUM = {"torch": "2.4", "transformers": "4.48", "wrapt": "1.16", "packaging": "23", "numpy": "1.26"}
"""Packages that autopack needs, with the oldest version that it works with."""


def problem(name: str, installed: str | None) -> str | None:
    """What is wrong with the installed version of a package that autopack needs, and the way out, or None."""
    remedy = f"pip install '{name}>={MINIMUM[name]}'"
    if installed is None:
        return f"{name} is not installed; autopack needs {MINIMUM[name]} or later: {remedy}"
    try:
        from packaging.version import Version

        # Vendors' builds of 2.4 call themselves 2.4.0a0+something, which counts as older than 2.4.
        too_old = Version(Version(installed).base_version) < Version(MINIMUM[name])
    except ImportError:  # is a problem of its own
        return None
    except ValueError:
        return f"{name} has the version {installed!r}, which cannot be read; autopack needs {MINIMUM[name]}: {remedy}"
    return f"{name} {installed} is too old; autopack needs {MINIMUM[name]} or later: {remedy}" if too_old else None


@cache
def refuse_old() -> None:
    """Raise `UnsupportedVersion` where a package is installed in a version too old; asked once for a process."""
    from importlib.metadata import PackageNotFoundError, version

    from autopack.errors import UnsupportedVersion

    for name in MINIMUM:
        try:
            found = problem(name, version(name))
        except PackageNotFoundError:  # its import says so, or it is there without its metadata
            continue
        if found is not None:
            raise UnsupportedVersion(f"{found} (`autopack doctor` looks at the others too)")
