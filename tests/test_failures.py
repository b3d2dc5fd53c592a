"""A test that fails takes no other with it."""

import subprocess
import sys
from pathlib import Path

TESTS = """
import pytest
import autopack
from autopack import tiny

def fails():
    model = tiny.build("llama")
    autopack.enable(model)
    assert not autopack.is_enabled(model)

def test_of_a_local_variable():
    fails()

def test_after_it(nothing_left_behind): ...

def test_of_an_error_from_another():
    try:
        fails()
    except AssertionError as error:
        raise ValueError from error

def test_after_both(nothing_left_behind): ...

def test_of_an_error_on_the_way_of_another():
    try:
        fails()
    finally:
        raise ValueError

def test_after_these(nothing_left_behind): ...

@pytest.fixture
def broken():
    fails()

def test_of_a_fixture(broken): ...

def test_after_the_fixture(nothing_left_behind): ...
"""


def test_what_a_failed_test_has_enabled_is_collected(tmp_path):
    (tmp_path / "test_inner.py").write_text(TESTS)
    root = Path(__file__).parents[1]
    command = [sys.executable, "-m", "pytest", "-c", root / "pyproject.toml", "-p", "tests.conftest", "-p", "no:xdist"]
    ran = subprocess.run([*command, tmp_path], cwd=root, capture_output=True, text=True)
    assert "3 failed, 4 passed, 1 error" in ran.stdout.splitlines()[-1], ran.stdout + ran.stderr
