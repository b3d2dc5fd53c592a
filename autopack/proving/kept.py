"""What twins have shown, kept: in the process, and for later ones in a folder of the user's.

Only of models whose code is all the library's, which the files of the installed packages tell: an answer is kept under
a digest of everything that it may depend on. The folder is `$AUTOPACK_CACHE`, or `autopack` in `$XDG_CACHE_HOME` or
`~/.cache`; `AUTOPACK_CACHE=off` keeps nothing on disk. It can be deleted at any time, and where it cannot be written,
or what it holds cannot be read, the question is answered anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

from autopack import version
from autopack.proving.twin import Kinds

_NAMES = frozenset(("_name_or_path", "name_or_path", "_commit_hash", "transformers_version", "architectures"))
"""Fields of a configuration that say where it came from."""
_FORMAT = 1
"""Of what is kept; another number answers all questions anew."""

_here: dict[str, dict[str, Any]] = {}


def key_of(model: PreTrainedModel, *asked: Any) -> str | None:
    """The digest under which an answer about the twin of a model is kept; None where it has none.

    Equal are the installed packages, file by file, the configuration, field by field, what modules there are and what
    is on them, and what was `asked`.
    """
    packages = _packages()
    if packages is None:
        return None
    told: list[Any] = [_FORMAT, version.__version__, torch.__version__, platform.python_version(), *packages]
    try:
        told += [_fields(model.config), sorted(_modules(model)), [repr(each) for each in asked]]
    except _Unnamed:
        return None
    return hashlib.blake2b(json.dumps(told).encode(), digest_size=20).hexdigest()


def answered(key: str | None, ask: Callable[[], dict[str, Any]]) -> tuple[dict[str, Any], bool]:
    """What is kept under a key, or else what `ask` says, which is kept then; and whether it was before."""
    found = None if key is None else load(key)
    if found is not None:
        return found, True
    found = ask()
    if key is not None:
        store(key, found)
    return found, False


def load(key: str) -> dict[str, Any] | None:
    """What is kept under a key, in this process or on disk; None where nothing is, or nothing that can be read."""
    if key not in _here:
        folder = directory()
        if folder is None:
            return None
        try:
            found = json.loads((folder / f"{key}.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        if not isinstance(found, dict) or found.get("key") != key or not isinstance(found.get("answer"), dict):
            return None
        _here[key] = found["answer"]
    return dict(_here[key])


def store(key: str, answer: Mapping[str, Any]) -> None:
    """Keep an answer, which is made of what JSON knows. A reader finds all of it or nothing."""
    _here[key] = dict(answer)
    folder = directory()
    if folder is None:
        return
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        file, name = tempfile.mkstemp(dir=folder, suffix=".part")
        try:
            with os.fdopen(file, "w", encoding="utf-8") as stream:
                json.dump({"key": key, "answer": dict(answer)}, stream)
            os.replace(name, folder / f"{key}.json")
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise


def forget() -> None:
    """Forget what is kept in this process."""
    _here.clear()


def directory() -> Path | None:
    """The folder on disk, which need not be there; None where nothing is to be kept there."""
    chosen = os.environ.get("AUTOPACK_CACHE", "")
    if chosen.lower() in ("off", "0", "no", "false"):
        return None
    if chosen:
        return Path(chosen).expanduser() / "twins"
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # nobody's home
        return None
    return base / "autopack" / "twins"


class _Unnamed(Exception):
    """Something on a model has no name by which another process would find it."""


@cache
def _packages() -> list[str] | None:
    """By the names, sizes and times of their files, transformers and autopack as they are installed.

    None where a file is younger than this process: what has been imported may be what it was before.
    """
    told, begun = [], _begun() * 1e9
    for root in (Path(str(transformers.__file__)).parent, Path(__file__).parents[1]):
        found = hashlib.blake2b(digest_size=16)
        for path, info in sorted(_sources(str(root))):
            if info.st_mtime_ns > begun:
                return None
            found.update(f"{path} {info.st_size} {info.st_mtime_ns}\n".encode())
        told.append(found.hexdigest())
    return told


_IMPORTED = time.time()


def _begun() -> float:
    """When this process began, in seconds since 1970; where that cannot be read, when this module was imported."""
    try:
        # The tick in which it began; it imports nothing before the next one.
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) + 1
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return _IMPORTED
    return time.time() - age


def _sources(root: str) -> Iterator[tuple[str, os.stat_result]]:
    for folder, _, names in os.walk(root, followlinks=True):
        paths = (os.path.join(folder, name) for name in names if name.endswith((".py", ".json", ".gz")))
        yield from ((path, os.stat(path)) for path in paths)


def _fields(config: Any) -> Any:
    """A configuration as lists of names and values; parts that are configurations are looked into."""
    if hasattr(config, "to_diff_dict") or isinstance(config, Mapping):
        fields = config.items() if isinstance(config, Mapping) else vars(config).items()
        kind = [type(config).__module__, type(config).__qualname__]
        return [kind, sorted(([str(name), _fields(value)] for name, value in fields if name not in _NAMES), key=str)]
    if isinstance(config, (list, tuple)):
        return [_fields(part) for part in config]
    return config if isinstance(config, (bool, int, str, type(None))) else repr(config)


def _modules(model: nn.Module) -> Iterator[str]:
    """A line for every module of a model: its place, its class, and what is on it that its code may ask for."""
    for name, (above, cls, attributes) in Kinds(model).by_name.items():
        on_it = sorted(f"{attribute}={_named(value)}" for attribute, value in attributes)
        loss = vars(model.get_submodule(name)).get("_loss_function")
        yield f"{name}: {_named(above)} {_named(cls)} {' '.join(on_it)} {_named(loss)}"


def _named(value: Any) -> str:
    if isinstance(value, (bool, str, type(None))):
        return repr(value)
    if isinstance(value, (type, FunctionType, BuiltinFunctionType)) and "<" not in value.__qualname__:
        return f"{value.__module__}.{value.__qualname__}"
    raise _Unnamed
