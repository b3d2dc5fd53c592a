"""Break autopack on purpose, at one named function at a time, and see that its tests notice.

    python -m compat.seams --record           every seam of compat/seam_table
    python -m compat.seams flex scan:         the seams whose names contain one of these

The tests of all seams run once with wrappers that change nothing, and have to pass. Those of each
seam then run with its break, in a process of its own, and every one has to fail. Nothing on disk
changes. The exit status is 1 where a break survives, where a name is not found, and where tests
fail without a break.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import inspect
import io
import multiprocessing
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from compat import study
from compat.common import Outcomes
from compat.matrix import ROOT
from compat.seam_breaks import Break, Seam, unchanged
from compat.seam_table import SEAMS
from compat.study import Study, Verdict

_BROKEN = "AUTOPACK_COMPAT_SEAM"
"""The environment variable that names the seam to processes which tests spawn."""
_SECONDS = 900
"""Tests that take longer hang, which fails them."""


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


def tested(seams: Sequence[Seam], broken: bool, root: Path) -> tuple[set[str], set[str]]:
    """Run the tests of seams here; return those that ran and those that failed."""
    os.chdir(root)
    reports = Outcomes()
    options = ["-q", "--no-header", "-p", "no:cacheprovider", f"--rootdir={root}"]
    signal.signal(signal.SIGALRM, _hangs)
    signal.alarm(_SECONDS if broken else 0)
    with contextlib.ExitStack() as stack, contextlib.redirect_stdout(io.StringIO()):
        for seam in seams:
            stack.enter_context(put(seam, None if broken else unchanged))
        # Once for all: parameters that are an iterator serve one collection. One test that is not
        # found ends the run, and pytest names it.
        pytest.main(
            [*options, *dict.fromkeys(test for seam in seams for test in seam.tests)],
            plugins=[reports],
        )
    ran, failed = (
        {name for name, found in reports.found.items() if found["outcome"] in which}
        for which in (("passed", "failed"), ("failed",))
    )
    return ran, failed


def _hangs(*_: Any) -> None:
    raise TimeoutError(f"the tests take more than {_SECONDS} s")


def _in_here(back: Connection, table: str, names: Sequence[str], broken: bool, root: Path) -> None:
    sys.path.insert(0, str(root))
    if broken:
        os.environ[_BROKEN] = names[0]
        # Processes that tests spawn import the main module anew: this one breaks the seam there
        # too.
        sys.modules["__main__"] = sys.modules[_in_here.__module__]
    back.send(
        tested(
            [seam for seam in importlib.import_module(table).SEAMS if seam.name in names],
            broken,
            root,
        )
    )


def _in_a_new_process(context: Any, *given: Any) -> tuple[set[str], set[str]]:
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_in_here, args=(theirs, *given))
    process.start()
    theirs.close()
    try:
        ran, failed = ours.recv()
        return ran, failed
    except EOFError:
        return set(), set()  # the process ended without a word
    finally:
        process.join()


def run(
    seams: Sequence[Seam], jobs: int = 1, root: Path = ROOT, table: str = "compat.seam_table"
) -> Iterator[tuple[str, Verdict]]:
    """Try seams of a table, a module with `SEAMS`, `jobs` at a time; yield the name of each, its
    `status`, and `by` which test it is caught or why not."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "transformers.modeling_utils", "pytest"])
    names = [seam.name for seam in seams]
    with ThreadPoolExecutor(jobs) as pool:
        whole = pool.submit(_in_a_new_process, context, table, names, False, root)
        broken = [
            pool.submit(_in_a_new_process, context, table, [name], True, root) for name in names
        ]
        ran, wrong = whole.result()
        for seam, future in zip(seams, broken, strict=True):
            _, failed = future.result()
            unfit = [test for test in seam.tests if _of(test, wrong) or not _of(test, ran)]
            missed = [test for test in seam.tests if not _of(test, failed)]
            if unfit:
                why = "does not pass without it" if _of(unfit[0], wrong) else "does not run"
                found = {"status": "SURVIVES", "by": f"{unfit[0]} {why}"}
            elif missed:
                found = {"status": "SURVIVES", "by": f"SURVIVES {' '.join(missed)}"}
            else:
                found = {"status": "caught", "by": seam.tests[0]}
            yield seam.name, found


def _of(test: str, names: set[str]) -> list[str]:
    """Return those of some names that a test, a class of tests or a file stands for."""
    return [name for name in names if name == test or name.startswith((f"{test}[", f"{test}::"))]


def problems(seams: Iterable[Seam]) -> list[str]:
    """Return what is wrong with seams, in words: names that come twice, functions that are not
    found."""
    counts = Counter(seam.name for seam in seams)
    found = [f"{name}: there are several of this name" for name, n in counts.items() if n > 1]
    for seam in seams:
        try:
            home_of(seam.at)
        except (ImportError, AttributeError, LookupError) as error:
            found.append(f"{seam.name}: {error}")
        found += [] if seam.tests else [f"{seam.name}: it names no tests"]
    return found


def _measured(names: list[str], asked: Any) -> Iterator[tuple[str, Verdict]]:
    seams = [seam for seam in SEAMS if seam.name in names]
    if wrong := problems(seams):
        raise SystemExit("\n".join(wrong))
    yield from run(seams, asked.jobs)


STUDY = Study(
    "seams",
    str(__doc__),
    lambda: [seam.name for seam in SEAMS],
    _measured,
    options={"jobs": {"type": int, "default": 1, "help": "processes at the same time"}},
)

if __name__ == "__mp_main__" and os.environ.get(_BROKEN):
    _held = put(next(seam for seam in SEAMS if seam.name == os.environ[_BROKEN]))
    _held.__enter__()  # for as long as the process lives

if __name__ == "__main__":
    sys.exit(study.main(STUDY))
