"""The size of the package, as bounds that only go down: a fault adds a row, not a layer.

Size is counted in tokens and statements, which no formatting changes. Lower a bound when a change
makes the package smaller; `python -m tests.test_house` prints the figures."""

import ast
import io
import multiprocessing
import os
import sys
import tokenize
from collections import Counter, defaultdict
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

import autopack

ROOT = Path(autopack.__file__).parent
BOUNDS = {
    "tokens": 206_400,
    "statements": 19_100,
    "functions": 1_836,
    "modules": 174,
    "lines over 100 characters": 0,
    "files over 400 lines": 0,
    "class names in two places": 0,
    "docstrings that begin with a question word": 0,
    "places that look at the Python stack": 2,
    "files that a packed call visits": 22,
    "calls of the package in it": 239,
}
"""Wanted: 185,000 tokens, 16,500 statements, 1,700 functions, 140 modules, 18 files and 250 calls;
0 of the rest."""
QUESTIONS = "What Whether How Why Where Which Who When".split()
LAYOUT = {getattr(tokenize, name) for name in "COMMENT NL NEWLINE INDENT DEDENT ENCODING".split()}
SCOPES = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def size_of(texts):
    """Return the figures of a list of modules: tokens without comments, docstrings and layout, and
    the like."""
    count = Counter()
    classes = defaultdict(int)
    for text in texts:
        lines, docstrings = text.splitlines(), set()
        count["modules"] += 1
        count["lines over 100 characters"] += sum(len(line) > 100 for line in lines)
        count["files over 400 lines"] += len(lines) > 400
        for node in ast.walk(ast.parse(text)):
            count["statements"] += isinstance(node, ast.stmt)
            count["functions"] += isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            if isinstance(node, SCOPES) and (words := (ast.get_docstring(node) or "").split()):
                docstrings.add((node.body[0].lineno, node.body[0].col_offset))
                is_question = words[0].rstrip(":,'s") in QUESTIONS
                count["docstrings that begin with a question word"] += is_question
            if isinstance(node, ast.ClassDef):
                classes[node.name.lstrip("_")] += 1
            looks_at_stack = isinstance(node, ast.Attribute) and node.attr == "_getframe"
            count["places that look at the Python stack"] += looks_at_stack
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        count["tokens"] += sum(t.type not in LAYOUT and t.start not in docstrings for t in tokens)
    count["class names in two places"] = sum(number > 1 for number in classes.values())
    return count


def visits(call):
    """Return how many functions of each file of the package a call of a function runs."""
    found, inside = Counter(), str(ROOT) + os.sep

    def note(frame, event, _):
        if event == "call" and (path := frame.f_code.co_filename).startswith(inside):
            found[path.removeprefix(inside)] += 1

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    return found


def walk_of_a_call():
    """Return how many files of the package a packed call of a Llama on SDPA visits, and how many
    calls it makes, in a process that has run nothing else."""
    new = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=new) as process:
        return process.submit(_walk).result()


def _walk():
    import torch
    import transformers.trainer  # noqa: F401  # where it is loaded, calls look for one at work

    from autopack import tiny

    model = tiny.build("llama", attn_implementation="sdpa").eval()
    row = {
        "input_ids": torch.arange(5, 25)[None],
        "position_ids": torch.tensor([[*range(8), *range(12)]]),
    }
    with autopack.enable(model), torch.no_grad():
        for _ in range(9):  # what is done in the first calls alone is no part of the walk
            model(**row)
        visited = visits(lambda: model(**row))
    return Counter({
        "files that a packed call visits": len(visited),
        "calls of the package in it": visited.total(),
    })  # fmt: skip


def figures():
    return size_of([path.read_text() for path in ROOT.rglob("*.py")]) + walk_of_a_call()


@pytest.fixture(scope="module")
def found():
    return figures()


@pytest.mark.parametrize("name", BOUNDS)
def test_the_package_does_not_grow(found, name):
    assert found[name] <= BOUNDS[name]


if __name__ == "__main__":
    for name, number in figures().items():
        print(f"{name:44}{number:8}")
