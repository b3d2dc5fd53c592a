"""Content of HTML pages, and a check that they refer to nothing outside of them."""

import html.parser
import re

VOID = {"meta"}


class Page(html.parser.HTMLParser):
    """Content of an HTML page: tags with attributes, texts, and the cells of its tables."""

    def __init__(self, text):
        super().__init__()
        self.tags = []
        self.open = []
        self.texts = []
        self.tables = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)
        if {"td", "th"} & set(self.open):
            self.tables[-1][-1][-1] += data

    @property
    def drawn(self):
        """Number of the page's SVG figures."""
        return sum(tag == "svg" for tag, _ in self.tags)


def check_self_contained(text):
    """Return a page, parsed; raise `AssertionError` if it refers to anything outside of it."""
    page = Page(text)
    forbidden = "script link img image iframe object embed base"
    assert {tag for tag, _ in page.tags}.isdisjoint(forbidden.split())
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    for tag, attributes in page.tags:
        assert not any(name.startswith("on") or name == "src" for name in attributes), (
            tag,
            attributes,
        )
        for name, value in attributes.items():
            if name == "href":
                assert str(value).removeprefix("#") in ids, value
            assert {each[1:] for each in re.findall(r"url\(([^)]*)\)", value or "")} <= set(ids)
    assert not re.search(r"(https?:)?//\w|data:|@import", text)
    return page
