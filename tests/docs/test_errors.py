"""What is raised, against docs/errors.md: every message has a section there that says what to do, and says so itself.

A section of that page names its messages in a comment: `<!-- says: WORDS | WORDS -->` by words in them,
`<!-- in: GLOB GLOB -->` by the modules that raise them.
"""

from __future__ import annotations

import ast
import copy
import pickle
import re
import sys
import traceback
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest

import autopack
from autopack import errors, tiny
from autopack.cli import main

ROOT = Path(autopack.__file__).parent
PAGE = ROOT.parent / "docs" / "errors.md"
PUBLIC = [name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)]
WAYS = """
adapt add apply ask build call cast check choose compute convert create declare delete disable doctor drop enable fill
fix fixes follow give install keep leave let load make mend move must name needs number pack pass pip plan point put
raise reload remove rename repair run save set show split start subtract take tokenize trace train try turn undo
uninstall update use wanted write
""".split()
"""Words of which a message has one at least, where it says the way out: what to do, or what is wanted."""
NO_WAY = {
    "takes recordings, of which the auditor has none": "the auditor makes tokens alone",
    "has a head that does not predict its decoder's tokens": "the auditor makes tokens alone",
    "has no single token embedding to draw the auditor's tokens for": "the auditor makes tokens alone",
    "no field of its output can be compared": "the auditor has nothing to say",
    "CannotTell": "never leaves autopack: the watch counts it",
    "there is no file {script}": "what follows is a hint of its own",
    "cannot start {command[0]}": "the system says why",
    "this Python does not know its own executable": "nothing can be run by it",
    "cannot load {name}": "transformers says why",
    "cannot be loaded: {error}": "transformers says why",
    "cannot be read: {error}": "the reader says why",
}
"""Messages without a way out, and why there is none."""


@dataclass(frozen=True)
class Site:
    """A place where an error is made: its module, its class and the nearest public one, and the words in it."""

    module: str
    line: int
    kind: str
    public: str
    text: str

    def __str__(self) -> str:
        return f"{self.module}:{self.line} {self.kind}: {self.text}"


@dataclass(frozen=True)
class Section:
    """What docs/errors.md says of messages of a class."""

    public: str
    title: str
    says: tuple[str, ...]
    modules: tuple[str, ...]

    def covers(self, site: Site) -> bool:
        named = any(words in site.text for words in self.says) or any(fnmatch(site.module, m) for m in self.modules)
        return site.public == self.public and named


def _words(node: ast.expr, module: ast.Module) -> str:
    """The text of an argument as it stands in the source, values in braces; of a name, all texts that it is given."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_words(value, module) for value in node.values)
    if isinstance(node, ast.FormattedValue):
        return f"{{{ast.unparse(node.value)}}}" + (
            _given(node.value.id, module) if isinstance(node.value, ast.Name) else ""
        )
    if isinstance(node, ast.BinOp):
        return _words(node.left, module) + _words(node.right, module)
    return ast.unparse(node) + (_given(node.id, module) if isinstance(node, ast.Name) else "")


def _given(name: str, module: ast.Module) -> str:
    values = [
        node.value
        for node in ast.walk(module)
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets)
    ]
    return "".join(f"<{_words(v, module)}>" for v in values if isinstance(v, (ast.Constant, ast.JoinedStr, ast.BinOp)))


@cache
def sites() -> list[Site]:
    """Every place of the package where an error that derives from `AutopackError` is made."""
    trees = {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in sorted(ROOT.rglob("*.py"))}
    public = {name: name for name in PUBLIC}
    classes = [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    for _ in classes:  # until no class is new
        for node in classes:
            found = [public[base] for base in map(ast.unparse, node.bases) if base in public]
            if found:
                public.setdefault(node.name, found[0])
    return [
        Site(module, node.lineno, kind, public[kind], f"{kind} " + " ".join(_words(each, tree) for each in node.args))
        for module, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and (kind := ast.unparse(node.func).rpartition(".")[2]) in public
    ]


@cache
def sections() -> list[Section]:
    """The sections of the page that name messages, each with the class above it."""
    found, public, title = [], "", ""
    for line in PAGE.read_text().splitlines():
        if line.startswith("## "):
            public = title = line[3:]
        elif line.startswith("### "):
            title = line[4:]
        elif says := re.fullmatch(r"<!-- says: (.*) -->", line):
            found.append(Section(public, title, tuple(says[1].split(" | ")), ()))
        elif modules := re.fullmatch(r"<!-- in: (.*) -->", line):
            found.append(Section(public, title, (), tuple(modules[1].split())))
    return found


def test_there_are_sites_of_every_public_class():
    assert {site.public for site in sites()} == set(PUBLIC)
    assert len(sites()) > 200


def test_every_message_has_a_section_that_says_what_to_do():
    assert [str(site) for site in sites() if not any(section.covers(site) for section in sections())] == []


def test_no_section_speaks_of_messages_that_are_gone():
    for section in sections():
        for words in section.says:
            alone = Section(section.public, section.title, (words,), ())
            assert any(alone.covers(site) for site in sites()), f"{section.title}: no message says {words!r}"
        for glob in section.modules:
            alone = Section(section.public, section.title, (), (glob,))
            assert any(alone.covers(site) for site in sites()), f"{section.title}: {glob} raises none"


def test_a_message_of_a_new_kind_would_be_found():
    new = Site("calls/new.py", 1, "UnsupportedModel", "UnsupportedModel", "UnsupportedModel the moon is in the way")
    assert not any(section.covers(new) for section in sections())


def says_the_way(text: str) -> bool:
    """Whether a message names a way out, itself or in a part that is called so."""
    return (
        any(re.search(rf"\b{word}\b", text, re.I) for word in WAYS)
        or re.search(r"\{\w*(?:way|wanted)s?\}", text) is not None
    )


def is_made_elsewhere(site: Site) -> bool:
    """Whether next to nothing of a message stands at its site: what it hands on was made by another."""
    return len(re.findall(r"\w+", re.sub(r"\{[^}]*\}|\w+\(.*\)", " ", site.text.removeprefix(site.kind)))) < 3


def test_every_message_says_the_way_out():
    silent = [site for site in sites() if not says_the_way(site.text) and not any(w in site.text for w in NO_WAY)]
    assert [str(site) for site in silent if not is_made_elsewhere(site)] == []
    for words in NO_WAY:
        assert any(words in site.text for site in sites()), f"no message says {words!r}"
    assert not says_the_way("InvalidPacking position_ids are odd")


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_error_has_its_section(name):
    kind = getattr(errors, name)
    anchor = kind.guide.rpartition("#")[2]
    assert anchor in [line[3:].lower() for line in PAGE.read_text().splitlines() if line.startswith("## ")]
    assert anchor == name.lower()
    assert kind.guide.rpartition("#")[0].endswith("/docs/errors.md")


def provoke(name: str) -> Exception:
    doings = {
        "UnsupportedModel": lambda: autopack.enable("no model"),
        "InvalidPacking": lambda: autopack.PackingCollator()([]),
        "OutsideForward": lambda: outside(),
    }
    with pytest.raises(getattr(errors, name)) as caught:
        doings[name]()
    return caught.value


def outside() -> None:
    """Call a layer of an enabled Mamba by itself."""
    import torch

    model = tiny.build("mamba")
    with autopack.enable(model):
        model.backbone.layers[0].mixer(torch.zeros(1, 4, model.config.hidden_size))


@pytest.mark.parametrize("name", ["UnsupportedModel", "InvalidPacking", "OutsideForward"])
def test_the_address_is_below_the_message_and_not_in_it(name):
    error = provoke(name)
    assert error.guide not in str(error)
    shown = "".join(traceback.format_exception(error))
    assert (error.guide in shown) == (sys.version_info >= (3, 11))
    for again in (copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert (str(again), again.guide) == (str(error), error.guide)
        assert "".join(traceback.format_exception_only(again)).count(error.guide) <= 1


def test_errors_of_commands_are_described_with_the_base(capsys):
    from autopack.commands.audit import CannotAudit

    assert CannotAudit.guide == errors.AutopackError.guide
    assert main(["audit", "no-such-type-at-all"]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("autopack audit: ")
    assert printed.count("\n") == 1


def test_the_reference_has_every_public_name():
    page = (PAGE.parent / "reference" / "api.rst").read_text()
    named = set(re.findall(r"^\.\. auto\w+:: autopack\.(\w+)$", page, re.M))
    assert named == set(autopack.__all__) - {"__version__"}
