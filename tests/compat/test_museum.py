"""The museum of leaks: the auditor finds the mistakes, raises no alarm on their sound twins, and
the page says so."""

import ast

import pytest
import torch

import autopack
from compat.museum import exhibit, measure, page
from compat.museum.__main__ import STUDY
from compat.museum.models._plain import Attention, Routed, Router, of

NAMES = exhibit.names()
QUICK = (
    "models.positions_restart_alone",  # in results
    "models.recomputed_without_bounds",  # in gradients
    "models.padding_in_the_balance",  # in a loss
    "models.bounds_kept_by_tensor",  # in tensors that an earlier call has had
)


def is_as_recorded(name):
    outcome = measure.measured(name)
    assert measure.objection(name, outcome) is None
    assert outcome == STUDY.recorded()[name]


@pytest.mark.parametrize("name", QUICK)
def test_a_few_exhibits_are_found_and_their_twins_are_not(name):
    is_as_recorded(name)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", NAMES)
def test_every_exhibit_is_found_and_its_twin_is_not(name):
    is_as_recorded(name)


@pytest.mark.parametrize("part", [Attention, Router])
def test_the_museums_own_model_is_sound_in_every_call(part):
    torch.manual_seed(0)
    model = Routed if part is Router else of(part)
    assert autopack.audit(model()).exact


def statements_of(path):
    """How many statements there are beside imports, docstrings, `mistaken` and `sound`."""
    made = [
        node
        for node in ast.parse(path.read_text()).body
        if not ast.unparse(node).startswith(
            (
                "import",
                "from",
                "mistaken =",
                "sound =",
                "stock =",
                "def mistaken",
                "def sound",
                "'",
                '"',
            )
        )
    ]
    every = [each for node in made for each in ast.walk(node) if isinstance(each, ast.stmt)]
    return sum(not isinstance(getattr(each, "value", None), ast.Constant) for each in every)


@pytest.mark.parametrize("name", NAMES)
def test_an_exhibit_is_small_and_of_a_project_that_the_page_can_name(name):
    path = exhibit.Path(exhibit.__file__).parent / f"{name.replace('.', '/')}.py"
    assert statements_of(path) <= exhibit.MOST_STATEMENTS
    assert all("/" in page.project(source) for source in exhibit.load(name).reported), (
        "name it in projects.json"
    )


def test_there_are_enough_of_them_and_of_their_projects():
    assert len([name for name in NAMES if name.startswith("models.")]) >= 28
    assert len(page.projects(NAMES)) >= 15


def test_an_exhibit_says_what_kind_it_is_and_where_it_was_reported():
    assert exhibit.parsed("A\n\nmasks: trl#1, b/c#2\n\nIt\nis.") == (
        "masks",
        ["trl#1", "b/c#2"],
        "It is.",
    )
    with pytest.raises(ValueError, match="kind must be one of"):
        exhibit.parsed("A\n\nothers: trl#1\n\nIt is.")
    with pytest.raises(ValueError, match="a project and a number"):
        exhibit.parsed("A\n\nmasks: trl\n\nIt is.")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"found": None}, "the auditor does not find it"),
        ({"sound": "logits: every call"}, "an alarm on the sound twin"),
        ({"enabled": "logits: every call"}, "enabled, it is not exact"),
    ],
)
def test_what_is_wrong_is_said(change, said):
    outcome = STUDY.recorded()[QUICK[0]]
    assert measure.objection(QUICK[0], outcome) is None
    assert said in measure.objection(QUICK[0], outcome | change)
