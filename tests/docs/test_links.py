"""Links of the documentation, and names of files in it, lead somewhere."""

import re

import pytest
import torch

import autopack
from tests.support import pages
from tests.test_house import visits

PATHS = [*sorted(pages.DOCS.rglob("*.md")), pages.DOCS.parent / "README.md"]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("path", PATHS, ids=lambda path: str(path.relative_to(pages.DOCS.parent)))
def test_links_lead_somewhere(path):
    """On GitHub, too: the site's build sees those between its own pages alone."""
    assert list(pages.lost_links(path, path.read_text())) == []


def test_no_page_has_a_heading_twice():
    """A link to the second of them leads to the first."""
    for path in PATHS:
        headings = re.findall(r"^#+ .+", path.read_text(), re.MULTILINE)
        assert [each for each in set(headings) if headings.count(each) > 1] == [], path


def test_pages_by_hand_are_few_and_short():
    """Beside them stand pages that commands write, and the site's list of them all."""
    written = {"index", "leaks", "measured", "neighbours", "programs", "reliability"}
    sizes = [path.stat().st_size for path in pages.DOCS.rglob("*.md") if path.stem not in written]
    assert len(sizes) <= 14
    assert max(sizes) <= 14_000
    assert sum(sizes) <= 150_000


def files_in(text):
    """Return the files of the package, or of the repository, that a text names."""
    return set(re.findall(r"`([\w/]+\.py)`", text))


def test_files_that_the_page_of_the_design_leads_to_are_there():
    named, root = files_in((pages.DOCS / "design.md").read_text()), pages.DOCS.parent
    assert len(named) > 20
    assert [
        each
        for each in sorted(named)
        if not ((root / "autopack" / each).exists() or (root / each).exists())
    ] == []


def test_the_walk_of_a_call_names_every_file_that_it_visits():
    """The page's walk is of its own block: a packed row whose turn to be checked has not come."""
    (block,) = pages.blocks("design.md#one-call")
    names, page = {}, (pages.DOCS / "design.md").read_text()
    pages.run(block, names, {})
    walk = page.partition("Read these files in this order")[2].partition("\n| plan |")[0]
    with autopack.enable(names["model"]), torch.no_grad():
        for _ in range(2):
            names["model"](**names["row"])
        found = {*visits(lambda: names["model"](**names["row"]))}
    assert found - files_in(walk) == set()
    assert files_in(walk) - found == set()
    assert len(found) > 20


def test_a_lost_link_is_found():
    planted = (
        "[here](trust.md#code-of-your-own) [not there](trust.md#nothing) [nor "
        "there](none.md) `[no](link.md)`"
    )
    assert list(pages.lost_links(pages.DOCS / "design.md", planted)) == [
        "trust.md#nothing",
        "none.md",
    ]
