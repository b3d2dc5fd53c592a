"""Links of the documentation, and names of files in it, lead somewhere."""

import re

import pytest

from tests.support import pages

PATHS = [*sorted(pages.DOCS.rglob("*.md")), pages.DOCS.parent / "README.md"]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("path", PATHS, ids=lambda path: str(path.relative_to(pages.DOCS.parent)))
def test_links_lead_somewhere(path):
    """On GitHub, too: the site's build sees those between its own pages alone."""
    assert list(pages.lost_links(path, path.read_text())) == []


@pytest.mark.parametrize("page", ["design.md", "reading.md"])
def test_files_that_a_page_leads_to_are_there(page):
    named = set(re.findall(r"`(\w+/[\w/]+\.py)`", (pages.DOCS / page).read_text()))
    root = pages.DOCS.parent
    assert len(named) > 20
    assert [each for each in sorted(named) if not ((root / "autopack" / each).exists() or (root / each).exists())] == []


def test_a_lost_link_is_found():
    planted = "[here](trust.md#code-of-your-own) [not there](trust.md#nothing) [nor there](none.md) `[no](link.md)`"
    assert list(pages.lost_links(pages.DOCS / "faq.md", planted)) == ["trust.md#nothing", "none.md"]
