"""Attacks are counted by kind, and one that fails is named."""

import json

import pytest

from compat import attacks, reliability
from compat.matrix import ROOT

CASES = """
import pytest

@pytest.mark.parametrize("number", [1, 2])
def test_good(number):
    pass

def test_wrong():
    assert False

def test_skipped():
    pytest.skip("not here")

@pytest.mark.exhaustive
def test_left_out_unless_asked_for():
    pass

@pytest.mark.xfail(strict=True)
def test_known():
    assert False
"""


def test_the_kinds_are_of_tests_that_are_there():
    paths = [path for paths in attacks.KINDS.values() for path in paths]
    assert len(set(paths)) == len(paths)
    assert all((ROOT / path).exists() for path in paths)


@pytest.fixture
def cases(monkeypatch):
    path = ROOT / "tests" / "attacks_of_a_test.py"
    path.write_text(CASES)
    monkeypatch.setattr(attacks, "KINDS", {"all": (str(path.relative_to(ROOT)),)})
    yield path
    path.unlink()


def test_outcomes_are_recorded_and_said(cases, tmp_path, capsys, monkeypatch):
    assert attacks.main(["--json", str(tmp_path / "attacks.json")]) == 1
    assert capsys.readouterr().out.startswith("all: ")
    found = json.loads((tmp_path / "attacks.json").read_text())["kinds"]["all"]
    assert found["counts"] == {"passed": 3, "failed": 1, "skipped": 1, "known to fail": 1}
    assert found["failed"] == ["tests.attacks_of_a_test::test_wrong"]
    monkeypatch.setattr(reliability, "RESULTS", tmp_path)
    page = reliability.page()
    assert "| all | 3 | 1 | 1 | 1 |" in page
    assert "* failed: tests.attacks_of_a_test::test_wrong" in page
