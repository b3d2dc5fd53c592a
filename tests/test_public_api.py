"""What users may rely on: the public names are listed, annotated and documented; a type checker can read them."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

import autopack
from autopack import version
from compat import public_api

PUBLIC = {name: found for name, found in public_api.public().items() if name != "autopack.__version__"}


def test_the_list_is_that_of_the_code():
    listed = public_api.LISTED.read_text(encoding="utf-8")
    assert listed == "\n".join(public_api.lines()) + "\n", (
        "run `python -m compat.public_api`, and tell it in CHANGELOG.md"
    )


def test_a_changed_signature_is_another_line():
    def one(model, *, backend: str = "auto") -> None: ...

    def other(model, *, backend: str | None = "auto") -> None: ...

    def without(model, *, backend: str) -> None: ...

    assert public_api.signature(one) == "(model, *, backend: str = 'auto') -> None"
    assert len({public_api.signature(each) for each in (one, other, without)}) == 3


@pytest.mark.parametrize("name", PUBLIC)
def test_parameters_and_results_are_annotated(name):
    found = PUBLIC[name]
    if isinstance(found, type) and issubclass(found, (BaseException, dict)):
        return  # made as their bases are
    for function in _functions(found):
        signature = inspect.signature(function)
        bare = [n for n, p in signature.parameters.items() if p.annotation is p.empty and n not in ("self", "cls")]
        assert not bare, f"{function.__qualname__}: {bare} have no annotation"
        told = function.__name__ == "__init__" or signature.return_annotation is not signature.empty
        assert told, f"{function.__qualname__} does not say what it returns"


def test_what_is_required_is_imported():
    sources = [path.read_text(encoding="utf-8") for path in Path(autopack.__file__).parent.rglob("*.py")]
    nodes = [node for source in sources for node in ast.walk(ast.parse(source))]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
    assert set(version.MINIMUM) <= {name.partition(".")[0] for name in names}


@pytest.mark.parametrize("name", PUBLIC)
def test_each_has_a_docstring(name):
    found = PUBLIC[name]
    undocumented = [function.__qualname__ for function in _functions(found, made=False) if not function.__doc__]
    assert found.__doc__, name
    assert not undocumented


def _functions(found, made=True):
    if not inspect.isclass(found):
        return [found]
    members = [
        getattr(value, "fget", None) or getattr(value, "func", None) or getattr(value, "__func__", value)
        for value in public_api.public_members(found).values()
    ]
    return [*members, *([found.__init__] if made and inspect.isfunction(found.__init__) else [])]


def test_few_names_are_at_the_top():
    assert len(autopack.__all__) <= 16
