"""List the public names of autopack with their signatures, so that a change of one is seen in review.

python -m compat.public_api            write compat/public_api.txt anew
python -m compat.public_api --check    exit with 1 where it says something else, and print the difference; write nothing

Public is what `__all__` names in `autopack` and its modules for users, and of classes what has no
underscore. See CONTRIBUTING.md for what may change.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import inspect
import sys
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import autopack
from autopack import errors, packing, registry
from autopack.auditing import report
from autopack.enabling import handle
from compat.matrix import ROOT

LISTED = ROOT / "compat" / "public_api.txt"


def lines() -> Iterator[str]:
    """One line for each function, class, property and method, in order of names."""
    for name, found in public().items():
        if inspect.isclass(found):
            bases = ", ".join(base.__name__ for base in found.__bases__ if base is not object)
            yield f"class {name}({bases})"
            yield from (f"    {line}" for line in members(found))
        elif callable(found):
            yield f"{name}{signature(found)}"
        else:
            yield f"{name}: {type(found).__name__}"


def public() -> dict[str, Any]:
    """What is public, by its name: all of `autopack`, and of its modules for users what is not there."""
    found = {f"autopack.{name}": getattr(autopack, name) for name in autopack.__all__}
    for module in (packing, registry, errors, handle, report):
        names = [name for name in module.__all__ if name not in autopack.__all__]
        found |= {f"{module.__name__}.{name}": getattr(module, name) for name in names}
    return found


def members(cls: type) -> Iterator[str]:
    """The lines of a class: how it is made, and what of its own or of a base of autopack's has no underscore."""
    if not issubclass(cls, BaseException):
        yield f"__init__{signature(cls.__init__)}"
    for name, found in sorted(public_members(cls).items()):
        if isinstance(found, property | cached_property):
            yield f"{name}: {_annotation(found.fget if isinstance(found, property) else found.func)}"
        elif callable(getattr(cls, name, None)):
            kind = {staticmethod: "static ", classmethod: "class "}.get(type(found), "")
            yield f"{kind}{name}{signature(getattr(cls, name))}"
    fields = dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()
    yield from (f"{field.name}: {field.type}" for field in fields if not field.name.startswith("_"))


def public_members(cls: type) -> dict[str, Any]:
    """Functions and properties of a class, and of those bases of it that are autopack's own."""
    own = [base for base in reversed(cls.__mro__) if base.__module__.startswith("autopack.")]
    found = {name: value for base in own for name, value in vars(base).items() if not name.startswith("_")}
    return {name: value for name, value in found.items() if _is_code(value)}


def signature(function: Any) -> str:
    """Parameters and result as they are annotated in the source."""
    found = inspect.signature(function)
    parameters = [each.replace(annotation=_as_written(each.annotation)) for each in found.parameters.values()]
    result = _as_written(found.return_annotation)
    return str(found.replace(parameters=parameters, return_annotation=result))


class _Written(str):
    """An annotation that is shown without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return self.replace('"', "").replace("'", '"')


def _as_written(annotation: Any) -> Any:
    return _Written(annotation) if isinstance(annotation, str) else annotation


def _is_code(value: Any) -> bool:
    kinds = property | cached_property | staticmethod | classmethod
    return inspect.isfunction(value) or isinstance(value, kinds)


def _annotation(function: Any) -> str:
    return repr(_as_written(inspect.get_annotations(function).get("return", "?")))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare only")
    options = parser.parse_args()
    text = "\n".join(lines()) + "\n"
    if not options.check:
        LISTED.write_text(text, encoding="utf-8")
        return 0
    difference = list(
        difflib.unified_diff(LISTED.read_text(encoding="utf-8").splitlines(), text.splitlines(), lineterm="")
    )
    if difference:
        print(
            *difference,
            "",
            "The public API has changed: run `python -m compat.public_api`, and tell it in CHANGELOG.md.",
            sep="\n",
        )
    return int(bool(difference))


if __name__ == "__main__":
    sys.exit(main())
