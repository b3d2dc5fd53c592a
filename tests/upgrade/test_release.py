"""What names the version agrees: the package, the changelog, and how to cite it."""

import re

from packaging.version import Version

from autopack.version import __version__
from tests.support.processes import ROOT


def test_the_changelog_and_the_citation_are_of_this_version():
    changelog = (ROOT / "CHANGELOG.md").read_text()
    releases = re.findall(r"^## (\d\S*) - (\d{4}-\d\d-\d\d)$", changelog, re.MULTILINE)
    citation = (ROOT / "CITATION.cff").read_text()
    assert releases[0] == (
        re.search(r"^version: (\S+)$", citation, re.MULTILINE)[1],
        re.search(r"^date-released: (\S+)$", citation, re.MULTILINE)[1],
    )
    assert releases[0][0] == __version__
    assert [each for each, _ in releases] == sorted(
        (each for each, _ in releases), key=Version, reverse=True
    )
