"""Places in transformers where autopack installs a function, and their restoration.

A site is data. Installing it finds the place with wrapt, checks that the function there has the
parameters that the replacement relies on, and sets a *plain function*: torch.compile traces through
a `wrapt.FunctionWrapper` as if it were not there, but follows a plain function and its undoing. All
enabled models of the process share sites, which count their users; the last one to leave restores
the original by identity.
"""

from __future__ import annotations

import inspect
import os
import sys
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from types import FunctionType
from typing import Any

import wrapt

from autopack.errors import SiteDrift

_SUPPORTED = "Run `autopack doctor` to see which versions are supported."


@dataclass(frozen=True)
class Site:
    """A function of transformers that autopack replaces while a model is enabled.

    `path` is a dotted path in `module`; with `key` it names a mapping, and the function is its
    value under that key. `adapter` takes the original and the site and returns the replacement,
    which must be inert for models that are not enabled. `parameters` are the names that the adapter
    relies on. `soft`: documents are kept apart without it too, so others may replace it.
    """

    module: str
    path: str
    adapter: Callable[[Callable[..., Any], Site], Callable[..., Any]]
    key: str | None = None
    parameters: tuple[str, ...] = ()
    soft: bool = False

    def __str__(self) -> str:
        return f"{self.module}.{self.path}" + (f"[{self.key!r}]" if self.key is not None else "")

    def present(self) -> Callable[..., Any]:
        """Return the function that is at the site now; raise `SiteDrift` if there is none."""
        try:
            value: Any = wrapt.resolve_path(import_module(self.module), self.path)[2]
            return value[self.key] if self.key is not None else value
        except (ImportError, AttributeError, KeyError) as error:
            raise SiteDrift(
                f"autopack expects a function at {self}; the installed transformers has none "
                f"({error!r}). {_SUPPORTED}",
                code="site-drift",
            ) from error

    def check_takes(self, function: Callable[..., Any], parameters: tuple[str, ...]) -> None:
        """Raise `SiteDrift` if a function for the site lacks one of these parameters."""
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError) as error:
            raise SiteDrift(
                f"autopack expects {self} to take {', '.join(parameters) or 'arguments'}; the "
                f"installed one does not say what it takes ({error}). {_SUPPORTED}",
                code="site-drift",
            ) from error
        missing = [name for name in parameters if name not in signature.parameters]
        if missing:
            raise SiteDrift(
                f"autopack expects {self} to take {', '.join(parameters)}; the installed one lacks "
                f"{', '.join(missing)}: {signature}. {_SUPPORTED}",
                code="site-drift",
            )

    def _set(self, function: Callable[..., Any] | None) -> None:
        """Put a function at the site; None deletes the attribute, which shows an inherited one."""
        parent, attribute, value = wrapt.resolve_path(import_module(self.module), self.path)
        if self.key is not None:
            mapping: Any = value
            mapping[self.key] = function
        elif function is None:
            delattr(parent, attribute)
        else:
            wrapt.apply_patch(parent, attribute, function)

    def _install(self) -> None:
        """Replace the function at this site by its adapter's result; note both in `_installed`."""
        self._restore_abandoned()
        original = self.present()
        if not callable(original):
            raise SiteDrift(
                f"autopack expects a function at {self}; found {type(original).__name__}. "
                f"{_SUPPORTED}",
                code="site-drift",
            )
        self.check_takes(original, self.parameters)
        parent, attribute, _ = wrapt.resolve_path(import_module(self.module), self.path)
        inherited = self.key is None and attribute not in vars(parent)
        replacement: Any = self.adapter(original, self)
        replacement.autopack_original = original
        if replacement is not original:
            _beneath[replacement] = None if inherited else original
        # Noted before it is done: what is interrupted here has no user, and is put back.
        _installed[self] = replacement
        self._set(replacement)

    def _restore_abandoned(self) -> None:
        """Put the original back if the site has a replacement of autopack's that no model uses.

        Other code covered it while models left, and then undid that. It still follows layouts, so a
        replacement of it would have a module keep documents apart twice.
        """
        held = set(map(id, _installed.values()))
        while (
            id(standing := self.present()) not in held
            and isinstance(standing, FunctionType)
            and standing in _beneath  # autopack put it in place of another one
        ):
            self._set(_beneath[standing])


_installed: dict[Site, Callable[..., Any]] = {}
"""The replacement at each installed site."""
_users: Counter[Site] = Counter()
"""Number of models that need each replacement."""
_beneath: weakref.WeakKeyDictionary[Callable[..., Any], Callable[..., Any] | None] = (
    weakref.WeakKeyDictionary()
)
"""The function beneath each replacement ever made; None if it was inherited."""
_abandoned: deque[list[Site]] = deque()
_lock = threading.Lock()


def install(sites: Iterable[Site], held: list[Site] | None = None) -> list[Site]:
    """Install all sites and return them, added to `held` if given; undo all and raise if one fails.

    `held` lists all held sites at any time, also after an interrupt.
    """
    held = [] if held is None else held
    with _lock:
        try:
            for site in sites:
                if site in _installed:
                    _check_unwrapped(site)
                else:
                    site._install()
                # An interrupt comes before or after both: Python looks for none between them.
                _users[site] += 1
                held.append(site)
        except BaseException:
            _release(held)
            raise
        _release_abandoned()
    return held


def uninstall(held: list[Site]) -> None:
    """Release the sites and empty the list; restore the originals where no other model uses a site.

    Raises `SiteDrift` at the end if one cannot be restored. After an interrupt, it can be called
    again.
    """
    with _lock:
        stuck = _release(held)
        _release_abandoned()
    if stuck:
        raise stuck[0]


def abandon(held: list[Site]) -> None:
    """Release the sites of a garbage-collected model, now or later; never wait and never raise.

    The collector may call this at any point, in the middle of `install` too; then the running call
    does it at its end. A compilation has read the functions at the sites and will look there again,
    so in its middle this is left to the next model that is enabled, disabled or collected.
    """
    _abandoned.append(held)
    guards = sys.modules.get("torch._guards")
    if guards is not None and guards.TracingContext.try_get() is not None:
        return
    if _lock.acquire(blocking=False):
        try:
            _release_abandoned()
        finally:
            _lock.release()


def _release_abandoned() -> None:
    """Release the sites of all garbage-collected models in `_abandoned`, and empty it."""
    while _abandoned:
        _release(_abandoned[0])
        del _abandoned[0]


def _release(held: list[Site]) -> list[SiteDrift]:
    """Release sites and empty the list, restore unused ones, and return the errors in restoring.

    Sites that an interrupt left without users are restored too.
    """
    stuck: list[SiteDrift] = []
    while held:
        _users[held[-1]] -= 1
        del held[-1]
    for site in reversed([site for site in _installed if not _users[site]]):
        replacement = _installed[site]
        try:
            # What it replaced may stand there again, or still.
            if site.present() is not getattr(replacement, "autopack_original", None):
                _check_unwrapped(site)
                if _is_in_place(site):
                    site._set(_beneath[replacement])
        except SiteDrift as error:
            # An entry of a mapping that is gone has taken autopack's with it.
            if site.key is None or error.code != "site-drift":
                stuck.append(error)
        del _installed[site]
    return stuck


def _is_in_place(site: Site) -> bool:
    """Return True if the function at an installed site is still autopack's."""
    return site.present() is _installed[site]


def _check_unwrapped(site: Site) -> None:
    """Raise `SiteDrift` if other code has replaced autopack's function at a non-soft site."""
    if not site.soft and not _is_in_place(site):
        raise SiteDrift(
            f"somebody replaced {site} after autopack did (now {site.present()!r}), so autopack no "
            "longer stands there and will not overwrite the newcomer. Undo that replacement, then "
            "call this again.",
            code="site-replaced",
        )


def check_intact(sites: Iterable[Site]) -> None:
    """Raise `SiteDrift` if other code has replaced autopack's function at one of these sites."""
    for site in sites:
        if not site.soft and site in _installed and site.present() is not _installed[site]:
            _check_unwrapped(site)


class SiteLease:
    """Sites that one model holds installed, for its attention implementations.

    `needed` lists the sites for given implementations. Copies and pickles of a lease hold nothing;
    they install their sites at their first `follow`. A collected lease leaves its sites by itself.
    """

    _implementations: tuple[str, ...] | None = None
    _sites: list[Site] = []  # noqa: RUF012
    _finalizer: weakref.finalize | None = None

    def __init__(self, needed: Callable[[tuple[str, ...]], list[Site]]):
        self.needed = needed

    def __getstate__(self) -> dict[str, Any]:
        return {"needed": self.needed}

    def follow(self, implementations: tuple[str, ...]) -> None:
        """Install the sites for implementations that changed, and release the earlier ones."""
        if self._implementations != implementations:
            with _following.held():
                if self._implementations == implementations:
                    return  # another thread was first
                sites: list[Site] = []
                finalizer = weakref.finalize(self, abandon, sites)
                finalizer.atexit = False
                try:
                    install(self.needed(implementations), sites)
                    self.release()
                except BaseException:
                    finalizer()
                    raise
                self._sites, self._finalizer, self._implementations = (
                    sites,
                    finalizer,
                    implementations,
                )

    def renew(self, needed: Callable[[tuple[str, ...]], list[Site]]) -> None:
        """Take another function that lists the needed sites; the next `follow` installs them."""
        self.needed, self._implementations = needed, None

    def release(self) -> None:
        """Release all sites. Raises `SiteDrift` if one cannot be restored.

        After an interrupt, call it again.
        """
        if self._finalizer is not None:
            finalizer, self._implementations = self._finalizer, None
            try:
                uninstall(self._sites)
            except SiteDrift:
                self._finalizer = None
                raise
            finally:
                if not self._sites:
                    finalizer.detach()
            self._finalizer = None

    def check(self) -> None:
        """Raise `SiteDrift` if other code has replaced autopack's function at one of the sites."""
        check_intact(self._sites)


class ProcessLock:
    """Lock of the whole process, which is free again in a forked child.

    Objects that are copied and pickled share it, since they cannot hold a lock. In the child, a
    lock that another thread of the parent holds would have no holder.
    """

    def __init__(self) -> None:
        self._renew()
        if _FORKS:
            os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        """Make a new lock that is free, as in a forked process."""
        self._lock = threading.Lock()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock within a `with` block; waits until it is free."""
        with self._lock:
            yield


_FORKS = hasattr(os, "register_at_fork")  # not on Windows
_following = ProcessLock()
if _FORKS:
    # What stands at the sites and what is counted are not taken along half done.
    os.register_at_fork(
        before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release
    )
