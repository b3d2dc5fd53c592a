"""The Python code of the documentation, page by page, as it stands there.

A block is fenced by ```python. A comment `<!-- not run: REASON -->` in the line before it says why
no test runs it, and a block fenced by ```text below it, after an empty line, shows what it prints.
"""

import contextlib
import io
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
_BLOCK = re.compile(
    r"^(?:<!-- not run: (?P<reason>[^\n]*) -->\n)?(?P<indent> "
    r"*)```python\n(?P<code>.*?)^(?P=indent)```\n"
    r"(?:\n```text\n(?P<printed>.*?)^```\n)?",
    re.S | re.M,
)
_NUMBER = re.compile(r"[-+]?\d+\.\d+(?:e[-+]?\d+)?|[-+]?\d+e[-+]\d+")
_LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")
_FILE = re.compile(r"# (\w+\.py)\n")


@dataclass(frozen=True)
class Block:
    """Block of a page: section, first line, code, why it is not run, and what it prints."""

    page: str
    section: str
    line: int
    code: str
    reason: str | None
    printed: str | None

    def __str__(self):
        return f"docs/{self.page}, line {self.line}"


def pages():
    """Return all pages with Python code, by their path in docs/."""
    found = (str(path.relative_to(DOCS)) for path in sorted(DOCS.rglob("*.md")))
    return [page for page in found if any(blocks(page))]


def blocks(page):
    """Yield the Python blocks of a page, or of one section of it (`page.md#anchor`), in order."""
    page, _, wanted = page.partition("#")
    text = (DOCS / page).read_text()
    for match in _BLOCK.finditer(text):
        line = text.count("\n", 0, match.start("code")) + 1
        section = (sections(text[: match.start()]) or [""])[-1]
        if wanted in ("", section):
            yield Block(
                page,
                section,
                line,
                textwrap.dedent(match["code"]),
                match["reason"],
                match["printed"],
            )


def lost_links(path, text):
    """Yield links of a Markdown page to files or headings that do not exist."""
    for target, anchor in _LINK.findall(re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.S)):
        there = path.parent / target if target else path
        if not there.exists() or (anchor and anchor not in anchors(there.read_text())):
            yield f"{target}#{anchor}" if anchor else target


def anchors(text):
    """Return the anchors that GitHub makes of the headings of a page, as a set."""
    return {*sections(text, "#+")}


def sections(text, level="##"):
    """Return the anchors of a page's headings of a level, in order."""
    headings = re.findall(
        rf"^{level} (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.S | re.M), re.M
    )
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


def run(block, names, instead):
    """Run a block with these names as its globals, and return its printed text.

    A traceback names the page and the line.

    `instead` says by which words others are replaced. A block that begins with `# name.py` becomes
    that file in the working directory.
    """
    code = block.code
    for words, others in instead.items():
        code = code.replace(words, others)
    if file := _FILE.match(code):
        Path(file[1]).write_text(code)
        return ""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile("\n" * (block.line - 1) + code, str(DOCS / block.page), "exec"), names)
    return printed.getvalue()


def same_text(found, shown, within):
    """Return True if two texts agree, but for spaces and numbers that are near each other.

    Only numbers with a point or an exponent may differ.

    Numbers below 1e-4 are rounding: of those, only that they are so small is compared.
    """
    numbers = [[float(number) for number in _NUMBER.findall(text)] for text in (found, shown)]
    words = [_NUMBER.sub("#", text).split() for text in (found, shown)]
    return words[0] == words[1] and all(
        abs(a - b) <= within * max(abs(a), abs(b)) or max(abs(a), abs(b)) < 1e-4
        for a, b in zip(*numbers, strict=True)
    )
