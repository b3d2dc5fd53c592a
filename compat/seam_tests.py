"""Run the tests of seams in this process, which has one of them broken, or wrappers that change
nothing around all of them:

python -m compat.seam_tests TABLE NAME ...     prints last which tests ran, and whether they failed

Processes that tests spawn import this module anew, and have the same seam broken."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import inspect
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from compat.seam_breaks import Break, Seam, unchanged

BROKEN = "AUTOPACK_COMPAT_SEAM"
"""The environment variable that names the table and the seam that is broken."""


def home_of(at: str) -> tuple[Any, str, Any]:
    """Return the module or class of a seam, its name there, and what stands there, unbound."""
    module, _, path = at.partition(":")
    home: Any = importlib.import_module(module)
    *above, name = path.split(".")
    for each in above:
        home = getattr(home, each)
    if name not in vars(home):
        raise LookupError(
            f"Could not find {at}: {getattr(home, '__name__', home)} has no {name} of its own."
        )
    return home, name, vars(home)[name]


def wrapped(found: Any, breaks: Break) -> Any:
    """Return a function, property, static or class method with a break around it.

    Its code says that it comes from the same file, so that autopack takes it for its own.
    """
    if isinstance(found, property):
        return property(wrapped(found.fget, breaks), found.fset, found.fdel, found.__doc__)
    if isinstance(found, functools.cached_property):
        return functools.cached_property(wrapped(found.func, breaks))
    if isinstance(found, (staticmethod, classmethod)):
        return type(found)(wrapped(found.__func__, breaks))
    broken = breaks(found)

    def seam(*args: Any, **kwargs: Any) -> Any:
        return broken(*args, **kwargs)

    file = inspect.unwrap(found).__code__.co_filename
    seam.__code__ = seam.__code__.replace(co_filename=file)
    return functools.update_wrapper(seam, found)


@contextlib.contextmanager
def put(seam: Seam, breaks: Break | None = None) -> Iterator[None]:
    """Break a seam in this process: at its home, and wherever modules and tables hold it."""
    home, name, found = home_of(seam.at)
    broken = wrapped(found, seam.breaks if breaks is None else breaks)
    if isinstance(broken, functools.cached_property):
        broken.__set_name__(home, name)
    setattr(home, name, broken)
    changed: list[tuple[dict[Any, Any], Any]] = []
    for holder in gc.get_referrers(found):
        held = holder if isinstance(holder, dict) else getattr(holder, "__dict__", None)
        if isinstance(held, dict) and held is not vars(broken):
            keys = [key for key, value in held.items() if value is found]
            held.update(dict.fromkeys(keys, broken))
            changed += [(held, key) for key in keys]
    try:
        yield
    finally:
        setattr(home, name, found)
        for held, key in changed:
            held[key] = found


class _Outcomes:
    """A plugin of pytest that notes of each test that ran whether it failed."""

    def __init__(self) -> None:
        self.found: dict[str, bool] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed or (report.passed and report.when == "call"):
            failed = report.failed or self.found.get(report.nodeid, False)
            self.found[report.nodeid] = failed


def tested(table: str, *names: str) -> None:
    """Run the tests of seams of a table."""
    seams = [each for each in importlib.import_module(table).SEAMS if each.name in names]
    outcomes = _Outcomes()
    # Once for all: parameters that are an iterator serve one collection. One test that is not found
    # ends the run, and pytest names it.
    tests = dict.fromkeys(test for seam in seams for test in seam.tests)
    options = ["-q", "--no-header", "-p", "no:cacheprovider", f"--rootdir={Path.cwd()}"]
    with contextlib.ExitStack() as stack:
        for seam in seams:
            stack.enter_context(put(seam, None if BROKEN in os.environ else unchanged))
        pytest.main([*options, *tests], plugins=[outcomes])
    print(json.dumps(outcomes.found))


if __name__ == "__mp_main__" and BROKEN in os.environ:
    _table, _name = os.environ[BROKEN].split(maxsplit=1)
    _seams = importlib.import_module(_table).SEAMS
    _held = put(next(seam for seam in _seams if seam.name == _name))
    _held.__enter__()  # for as long as the process lives

if __name__ == "__main__":
    tested(*sys.argv[1:])
