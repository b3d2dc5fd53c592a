"""The order of the package's rooms: imports go downward only, those for type checkers and inside
functions too."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import autopack

ROOT = Path(autopack.__file__).parent
LAYERS = """
errors
options version
pages
inspection
layout patching
family
runtime
integrations attention
mixers
architectures
registry
calls
packing tiny
auditing
proving
watching steps
enabling
launch bench testing
commands
demo
cli
__main__
"""
"""Rooms and top-level modules, the lowest first. Each may import what stands in the lines above its
own."""
HIDDEN = {"calls": {"family", "attention", "mixers", "architectures", "registry", "integrations"}}
"""Rooms that another one, although it stands above them, does not know."""
TOP = set("__init__ __main__ cli demo errors options version patching family registry".split())


def sources():
    """The text of every module, by its dotted name without `autopack.`; a package goes by its own
    name."""
    found = {}
    for path in ROOT.rglob("*.py"):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        found[name] = path.read_text()
    return found


def imports(name, text, known):
    """The modules of the package that a module imports, anywhere in its text."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} imports by a relative name"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for dotted in names:
            if dotted.partition(".")[0] != "autopack":
                continue
            inner = dotted.removeprefix("autopack").removeprefix(".")
            # A name that is no module is one that its module holds; one of `autopack` itself is
            # public.
            yield inner if inner in known else inner.rpartition(".")[0] or "__init__"


def edges(texts):
    return {name: set(imports(name, text, set(texts))) - {name} for name, text in texts.items()}


def wrong_imports(texts):
    """Imports that go upward or sideways between rooms."""
    height = {
        room: number for number, line in enumerate(LAYERS.split("\n")) for room in line.split()
    }
    # Whoever uses the public names may stand nowhere below what they come from.
    height["__init__"] = height["enabling"]
    wrong = []
    for name, targets in edges(texts).items():
        room = name.partition(".")[0]
        for target in targets if name != "__init__" else ():
            other = target.partition(".")[0]
            if other != room and (height[other] >= height[room] or other in HIDDEN.get(room, ())):
                wrong.append(f"{name} imports {target}")
    return wrong


def test_imports_go_downward():
    assert wrong_imports(sources()) == []


@pytest.mark.parametrize(
    ("module", "planted"),
    [
        (
            "inspection.masks",
            "if TYPE_CHECKING:\n    from autopack.layout.packed import PackedLayout",
        ),
        ("attention.site", "def late():\n    import autopack.mixers.operations"),
        ("calls.hooks", "from autopack.attention import choose"),
        ("layout.packed", "import autopack"),
    ],
)
def test_an_import_against_the_order_is_found(module, planted):
    texts = sources()
    texts[module] += f"\n{planted}\n"
    assert len(wrong_imports(texts)) == 1


def test_no_modules_import_each_other_in_a_circle():
    TopologicalSorter(edges(sources())).prepare()


def test_a_circle_is_found():
    texts = sources()
    texts["layout.packed"] += "\ndef late():\n    from autopack.layout import token_map\n"
    with pytest.raises(CycleError, match="circle|cycle"):
        TopologicalSorter(edges(texts)).prepare()


def test_only_what_belongs_there_lies_at_the_top():
    assert {path.stem for path in ROOT.glob("*.py")} == TOP
