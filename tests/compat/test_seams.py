"""The seams: each is there, its break is put in place and taken back, and survivors are told."""

import dataclasses

import pytest

from compat import seam_tests, seams, study
from compat.seam_breaks import Seam, never, result, returns, skipped, stale, unchanged
from compat.seam_table import SEAMS
from tests.support.processes import python

SUMS = """import functools


def add(a, b):
    return a + b


class Numbers:
    @staticmethod
    def static(a):
        return a

    @classmethod
    def of(cls, a):
        return a

    @property
    def one(self):
        return 1

    @functools.cached_property
    def two(self):
        return 2


TABLE = {"add": add}
"""
TESTS = """from code_of_sums import TABLE, add


def test_add():
    assert TABLE["add"](2, 2) == add(2, 2) == 4


def test_nothing():
    pass


def test_false():
    assert False
"""
TABLE = """from compat.seam_breaks import Seam, returns

SEAMS = tuple(
    Seam(test, "code_of_sums:add", returns(0), (f"test_sums.py::{test}",))
    for test in ("test_add", "test_nothing", "test_false")
)
"""


@pytest.fixture
def root(tmp_path, monkeypatch):
    for name, text in (("code_of_sums", SUMS), ("test_sums", TESTS), ("table_of_sums", TABLE)):
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_every_seam_is_there():
    assert 40 <= len(SEAMS) <= 90
    assert seams.problems(SEAMS) == []


def test_every_test_of_a_seam_is_collected():
    tests = dict.fromkeys(test for seam in SEAMS for test in seam.tests)
    python("-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *tests)


@pytest.mark.parametrize("seam", SEAMS, ids=lambda seam: seam.name)
def test_a_break_is_put_in_place_and_taken_back(seam):
    _, name, before = seam_tests.home_of(seam.at)
    with seam_tests.put(seam, unchanged):
        home, _, broken = seam_tests.home_of(seam.at)
        assert broken is not before
        assert type(broken) is type(before) or callable(broken)
    assert vars(home)[name] is before


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"at": "code_of_sums:subtract"}, "has no subtract of its own"),
        ({"at": "code_of_sums:Numbers.three"}, "has no three of its own"),
        ({"at": "code_of_nothing:add"}, "No module named 'code_of_nothing'"),
        ({"tests": ()}, "it names no tests"),
    ],
)
def test_one_that_is_not_there_is_named(root, change, said):
    seam = Seam("a sum", "code_of_sums:add", skipped, ("test_sums.py::test_add",))
    (found,) = seams.problems([dataclasses.replace(seam, **change)])
    assert said in found
    assert seams.problems([seam, seam]) == ["a sum: there are several of this name"]


@pytest.mark.parametrize(
    ("name", "breaks", "ask", "before", "after"),
    [
        ("add", returns(7), lambda sums: sums.add(1, 2), 3, 7),
        ("add", result(lambda found: -found), lambda sums: sums.TABLE["add"](1, 2), 3, -3),
        ("add", never(lambda a, b: b), lambda sums: sums.add(1, 2), 3, 2),
        ("add", stale, lambda sums: [sums.add(1, b) for b in (1, 2)], [2, 3], [2, 2]),
        ("Numbers.static", skipped, lambda sums: sums.Numbers().static(1), 1, None),
        ("Numbers.of", skipped, lambda sums: sums.Numbers.of(1), 1, None),
        ("Numbers.one", skipped, lambda sums: sums.Numbers().one, 1, None),
        ("Numbers.two", skipped, lambda sums: sums.Numbers().two, 2, None),
    ],
)
def test_each_kind_of_function_and_break(root, name, breaks, ask, before, after):
    import code_of_sums as sums

    assert ask(sums) == before
    with seam_tests.put(Seam("a sum", f"code_of_sums:{name}", breaks, ())):
        assert ask(sums) == after
    assert ask(sums) == before


def test_one_is_caught_one_survives_and_one_fails_by_itself(root):
    import table_of_sums

    assert dict(seams.run(table_of_sums.SEAMS, 1, root, "table_of_sums")) == {
        "test_add": {"status": "caught", "by": "test_sums.py::test_add"},
        "test_nothing": {"status": "SURVIVES", "by": "SURVIVES test_sums.py::test_nothing"},
        "test_false": {
            "status": "SURVIVES",
            "by": "test_sums.py::test_false does not pass without it",
        },
    }


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seam", SEAMS, ids=lambda seam: seam.name)
def test_the_tests_of_a_seam_notice(seam):
    ((_, found),) = seams.run([seam])
    assert found["status"] == "caught", found["by"]


def test_the_command(capsys):
    assert study.main(seams.STUDY, ["scan: state"]) == 0
    assert "1 cells, 0 wrong {'caught': 1}" in capsys.readouterr().out
