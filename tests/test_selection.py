"""Which tests run: a sample by default, everything when it is asked for, nothing never."""

import pytest

from tests import conftest
from tests.support.processes import python

CASES = """
import pytest

@pytest.mark.sampled(3)
@pytest.mark.parametrize("number", range(10))
def test_sampled(number): ...

@pytest.mark.exhaustive
def test_slow(): ...

def test_plain(): ...
"""


class Collected:
    """A plugin that keeps the names of the tests that would run."""

    def __init__(self):
        self.names = []

    pytest_addoption = staticmethod(conftest.pytest_addoption)
    pytest_collection_modifyitems = staticmethod(conftest.pytest_collection_modifyitems)

    def pytest_collection_finish(self, session):
        self.names = [item.name for item in session.items]


def selected(*arguments):
    found = Collected()
    pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *arguments], plugins=[found])
    return set(found.names)


def test_what_is_left_out_and_how_to_ask_for_it(tmp_path, capsys):
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    sampled(number): ...\n    exhaustive: ...\n")
    path = tmp_path / "test_cases.py"
    path.write_text(CASES)
    usual, rest = selected(str(path)), selected(str(path), "-m", "exhaustive")
    assert usual == {"test_sampled[0]", "test_sampled[3]", "test_sampled[6]", "test_plain"}
    every = {"test_plain", "test_slow", *(f"test_sampled[{number}]" for number in range(10))}
    assert usual | rest == every
    assert not usual & rest
    assert selected(str(path), "--all") == every
    assert selected(f"{path}::test_slow") == {"test_slow"}
    assert selected(f"{path}::test_sampled") == every - {"test_plain", "test_slow"}
    assert selected(str(path), "-k", "slow") == {"test_slow"}
    capsys.readouterr()


@pytest.mark.exhaustive
def test_every_line_of_the_table_names_a_test():
    done = python("-m", "pytest", "--collect-only", "--all", "-p", "no:cacheprovider", "tests")
    assert conftest._slow().keys() - {line.partition("[")[0] for line in done.stdout.splitlines()} == set()
