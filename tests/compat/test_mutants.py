"""The mutation check: its mutants fit the present code, and it tells those that are noticed from those that are not."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import time

import pytest

from compat import mutants
from compat.mutants import Mutant, load, problems

ADDS = "def add(a: int, b: int) -> int:\n    return a + b\n"
TESTS = (
    "from code_of_sums import add\n\n\ndef test_add():\n    assert add(2, 2) == 4\n\n\ndef test_nothing():\n    pass\n"
)
SUM = Mutant("a sum", "code_of_sums.py", "a + b", "a - b", ("test_sums.py::test_add",))


def test_every_mutant_still_fits():
    found = load()
    assert len(found) >= 40
    assert problems(found) == []


@pytest.fixture
def root(tmp_path):
    (tmp_path / "code_of_sums.py").write_text(ADDS)
    (tmp_path / "test_sums.py").write_text(TESTS)
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\npythonpath = ["."]\n')
    (tmp_path / "compat").mkdir()
    (tmp_path / "compat" / "mutants.toml").write_text(
        "\n".join(
            f'[[mutant]]\nname = "{name}"\nfile = "{SUM.file}"\nbefore = "a + b"\nafter = "a - b"\ntests = ["{test}"]'
            for name, test in (("a sum", SUM.tests[0]), ("survives", "test_sums.py::test_nothing"))
        )
    )
    return tmp_path


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"before": "a * b"}, "found it 0 times"),
        ({"before": "a"}, "times"),
        ({"file": "none.py"}, "none.py"),
        ({"after": "a + b"}, "it changes nothing"),
        ({"tests": ()}, "it names no tests"),
        ({"tests": ("test_sums.py::test_none",)}, "there is no test test_sums.py::test_none"),
        ({"tests": ("none.py",)}, "there is no test none.py"),
    ],
)
def test_one_that_does_not_fit_is_named(root, change, said):
    (found,) = problems([dataclasses.replace(SUM, **change)], root)
    assert said in found
    assert problems([SUM], root) == []
    assert problems([SUM, SUM], root) == ["a sum: there are several of this name"]


@pytest.mark.exhaustive
def test_one_is_caught_one_survives_and_one_is_no_program(root):
    survives = dataclasses.replace(SUM, name="survives", tests=("test_sums.py::test_nothing",))
    broken = dataclasses.replace(SUM, name="broken", after="a +")
    found = {o.mutant.name: o for o in mutants.run([SUM, survives, broken], jobs=2, root=root)}
    assert {name: outcome.caught for name, outcome in found.items()} == {
        "a sum": True,
        "survives": False,
        "broken": False,
    }
    assert found["a sum"].by == "test_sums.py::test_add"
    assert found["survives"].by == "SURVIVES"
    assert "did not run" in found["broken"].by
    assert (root / "code_of_sums.py").read_text() == ADDS


@pytest.mark.exhaustive
def test_the_command(root, capsys):
    report = root / "report.json"
    assert mutants.main(["--only", "sum", "--json", str(report)], root) == 0
    found = json.loads(report.read_text())
    assert found["mutants"] == [{"name": "a sum", "caught": True, "by": "test_sums.py::test_add"}]
    assert set(found["with"]) == {"autopack", "python", "torch", "transformers"}
    assert mutants.main([], root) == 1
    assert "!! SURVIVES" in capsys.readouterr().out
    (root / "code_of_sums.py").write_text(ADDS.replace("+", "*"))
    assert mutants.main(["--only", "sum"], root) == 1
    assert "found it 0 times" in capsys.readouterr().out


def test_tests_that_fail_by_themselves_prove_nothing(root, capsys):
    (root / "test_sums.py").write_text(TESTS.replace("== 4", "== 5"))
    assert mutants.main(["--only", "sum"], root) == 1
    assert "!! the tests do not pass without it (test_sums.py::test_add)" in capsys.readouterr().out


@pytest.mark.exhaustive
def test_tests_that_hang_are_ended_with_what_they_have_started(root, monkeypatch):
    """However long they take without the break, which nothing ends."""
    monkeypatch.setattr(mutants, "_PATIENCE", 0.0)
    monkeypatch.setattr(mutants, "_TIMES", 2.0)
    held = root / "held"
    waits = f"import fcntl, time; file = open({str(held)!r}, 'a'); fcntl.flock(file, fcntl.LOCK_EX); time.sleep(3600)"
    hangs = f"__import__('subprocess').run([__import__('sys').executable, '-c', {waits!r}]) and a + b"
    (found,) = mutants.run([dataclasses.replace(SUM, after=hangs)], jobs=1, root=root)
    assert found.caught
    assert "the tests hang: they took" in found.by
    assert (root / "code_of_sums.py").read_text() == ADDS
    with held.open("a") as file:
        for _ in range(600):
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            time.sleep(0.1)
    pytest.fail("what the tests had started still runs")
