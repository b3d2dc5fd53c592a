"""What names the version agrees: the package, the changelog, how to cite it, and what old names are said to go with."""

from __future__ import annotations

import re
from pathlib import Path

from packaging.version import Version

from autopack.version import __version__

ROOT = Path(__file__).parents[2]


def test_the_changelog_and_the_citation_are_of_this_version():
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    releases = re.findall(r"^## (\d\S*) - (\d{4}-\d\d-\d\d)$", changelog, re.MULTILINE)
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert releases[0] == (
        re.search(r"^version: (\S+)$", citation, re.MULTILINE)[1],
        re.search(r"^date-released: (\S+)$", citation, re.MULTILINE)[1],
    )
    assert releases[0][0] == __version__
    assert [each for each, _ in releases] == sorted((each for each, _ in releases), key=Version, reverse=True)


def test_old_names_go_with_a_release_that_is_to_come():
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "autopack").rglob("*.py")]
    named = {found for source in sources for found in re.findall(r"the old name goes with autopack (\d+\.\d+)", source)}
    assert named, "where no old name is left, this test goes too"
    assert all(Version(each) > Version(__version__) for each in named)
