"""What is raised, against docs/errors.md: every error has a code, and every code a section."""

import ast
import copy
import inspect
import pickle
import re
import sys
import traceback
from pathlib import Path

import pytest
from torch._utils import ExceptionWrapper

import autopack
from autopack import errors
from autopack.cli import main

ROOT = Path(autopack.__file__).parent
PAGE = ROOT.parent / "docs" / "errors.md"
KINDS = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, errors.AutopackError)
]
TREES = {
    path.relative_to(ROOT).as_posix(): ast.parse(path.read_text())
    for path in sorted(ROOT.rglob("*.py"))
}
NAMED = r"(\w+) = partial\((\w+), code='([a-z-]+)'\)$"
"""A class with a code, which has a name of its own."""


def name_of(node):
    return ast.unparse(node).rpartition(".")[2]


def classes():
    """The code of each class, and of each name of a class with a code; "" where each error brings
    its own."""
    found = {kind.__name__: kind.code for kind in KINDS}
    for tree in TREES.values():
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.ClassDef)
                and node.name not in found
                and {*map(name_of, node.bases)} & {*found}
            ):
                given = [each.value for each in node.body if isinstance(each, ast.Assign)]
                found[node.name] = ast.literal_eval(given[0]) if given else ""
            elif isinstance(node, ast.Assign) and (named := re.match(NAMED, ast.unparse(node))):
                found[named[1]] = named[3]
    return found


def raised(trees):
    """Where an error is made, its code ("" for one that has none), and the source of its
    message."""
    kinds = classes()
    for module, tree in trees.items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or (kind := name_of(node.func)) not in kinds:
                continue
            given = next(
                (each.value for each in node.keywords if each.arg == "code"),
                ast.Constant(kinds[kind]),
            )
            handed_on = ast.unparse(given) in ("error.code", "found['code']")
            for each in (given.body, given.orelse) if isinstance(given, ast.IfExp) else (given,):
                code = (
                    "handed on"
                    if handed_on
                    else each.value
                    if isinstance(each, ast.Constant)
                    else ""
                )
                yield f"{module}:{node.lineno}", str(code), " ".join(map(ast.unparse, node.args))


def test_every_error_has_a_code():
    assert [place for place, code, _ in raised(TREES) if not code] == []
    new = "raise UnsupportedModel('Train it')\nraise UnsupportedModel('Train it', code=code)"
    assert [code for _, code, _ in raised({"new.py": ast.parse(new)})] == ["", ""]
    with pytest.raises(TypeError, match="wanted a code"):
        errors.UnsupportedModel("the moon is in the way")


def test_every_code_has_a_section_and_every_section_a_raise():
    sections = re.findall(r"^### (.*)$", PAGE.read_text(), re.M)
    assert len(sections) == len({*sections})
    assert {code for _, code, _ in raised(TREES)} - {"handed on"} == {*sections}


def test_every_public_error_is_on_the_page():
    titles = re.findall(r"^## (.*)$", PAGE.read_text(), re.M)
    assert {*titles} == {kind.__name__ for kind in KINDS}


def leak():
    raise errors.LeakDetected(errors.Leak("Llama", 0, 0, (0, 4), "logits", 0.5, 1e-4, 7))


def old():
    raise errors.UnsupportedVersion("Could not start: found torch 1.0. Install torch 2.")


@pytest.mark.parametrize(
    ("provoke", "kind", "code"),
    [
        (lambda: autopack.enable("no model"), errors.UnsupportedModel, "which-model"),
        (lambda: autopack.PackingCollator()([]), errors.InvalidPacking, "no-examples"),
        (leak, errors.LeakDetected, "leak-detected"),
        (old, errors.UnsupportedVersion, "version-too-old"),
    ],
)
def test_the_code_is_at_the_end_and_the_address_below_and_workers_hand_it_on(provoke, kind, code):
    """Workers of a loader make a new error of the class, of the text of the traceback alone."""
    with pytest.raises(kind) as caught:
        provoke()
    error = caught.value
    assert error.code == code
    assert error.guide.endswith(f"/docs/errors.md#{code}")
    assert str(error) == f"{error.message} [{code}]"
    assert (error.guide in "".join(traceback.format_exception(error))) == (
        sys.version_info >= (3, 11)
    )
    for again in (copy.copy(error), copy.deepcopy(error), pickle.loads(pickle.dumps(error))):
        assert (type(again), str(again), again.code) == (type(error), str(error), code)
        assert vars(again).keys() == vars(error).keys()
        assert "".join(traceback.format_exception_only(again)).count(error.guide) <= 1
    with pytest.raises(kind) as handed_on:
        ExceptionWrapper((kind, error, error.__traceback__)).reraise()
    assert handed_on.value.code == code


def test_commands_print_the_code_once(capsys):
    assert main(["audit", "no-such-type-at-all"]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("autopack audit: ")
    assert printed.endswith(" [model-unavailable]\n")
    assert printed.count("\n") == printed.count("[model-unavailable]") == 1


def test_the_reference_has_every_public_name():
    page = (PAGE.parent / "reference" / "api.rst").read_text()
    named = set(re.findall(r"^\.\. auto\w+:: autopack\.(\w+)$", page, re.M))
    assert named == set(autopack.__all__) - {"__version__"}
