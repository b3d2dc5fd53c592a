"""Which tests run: a sample by default, everything when it is asked for, nothing never."""

from tests import conftest
from tests.support.processes import python


def test_every_line_of_the_table_names_a_test():
    done = python("-m", "pytest", "--collect-only", "--all", "-p", "no:cacheprovider", "tests")
    assert (
        conftest._slow().keys() - {line.partition("[")[0] for line in done.stdout.splitlines()}
        == set()
    )
