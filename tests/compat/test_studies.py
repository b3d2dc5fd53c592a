"""Studies: what is recorded of them and the pages of that are up to date, and one that is not is
found."""

import dataclasses
from importlib import import_module

import pytest

from compat import readme, reliability, study

UP_TO_DATE = ("engines", "kernels", "museum", "neighbours", "shared_rows")


@pytest.mark.parametrize("name", UP_TO_DATE)
def test_a_record_and_its_pages_are_up_to_date(name):
    place = name if name == "shared_rows" else f"{name}.__main__"
    assert import_module(f"compat.{place}").STUDY.stale() == []


def test_pages_of_records_are_up_to_date(capsys):
    assert reliability.main(["--check"]) == readme.main(["--check"]) == 0
    assert capsys.readouterr().out == "up to date\nup to date\n"


@pytest.fixture
def of_two(recorded):
    """A study of two cells."""
    verdicts = {"one a": {"status": "exact"}, "two a": {"status": "LEAK"}}
    return study.Study(
        "some",
        "",
        lambda: verdicts,
        lambda names, asked: ((name, verdicts[name]) for name in names),
        pages=lambda cells: {recorded / "page.md": str(cells)},
    )


def test_cells_are_chosen_recorded_and_held_to_the_record(of_two, recorded, capsys):
    assert of_two.stale() == ["one a: not recorded", "two a: not recorded"]
    assert study.main(of_two, ["one", "--record"]) == 0
    assert "1 cells, 0 wrong" in capsys.readouterr().out
    assert study.main(of_two, ["two", "--record"]) == 1
    assert "WRONG: two a" in capsys.readouterr().out
    assert list(of_two.recorded()) == ["one a", "two a"], "what was recorded stays"
    assert study.main(of_two, ["--check"]) == 1
    assert capsys.readouterr().out == "two a: LEAK\n"
    lax = dataclasses.replace(of_two, wrong=lambda name, verdict: None)
    assert lax.stale() == []
    (recorded / "page.md").write_text("another")
    assert lax.stale() == ["page.md is not what the records give"]
    assert study.main(lax, ["--pages"]) == 0
    assert lax.stale() == []
    gone = dataclasses.replace(lax, cells=lambda: ["one a"])
    assert gone.stale() == ["two a: recorded, and no cell"]
    with pytest.raises(SystemExit):
        study.main(of_two, ["three"])


def test_words_are_whole_names_or_parts_of_them_before_they_are_pieces():
    names = ["causal-lm llama", "causal-lm llama4", "seq2seq t5"]
    assert study.chosen(names, ["llama"]) == names[:1]
    assert study.chosen(names, ["causal-lm"]) == names[:2]
    assert study.chosen(names, ["lla"]) == names[:2]
    assert study.chosen(names, []) == names


def test_a_missing_record_is_said(recorded, monkeypatch, tmp_path):
    monkeypatch.setattr(reliability.readme, "served", str)
    assert reliability.page().count("Not recorded yet.") == len(reliability._SECTIONS)
    cells = {"a": {"status": "SURVIVES", "by": "b"}}
    seams = study.Study("seams", "", lambda: cells, lambda *_: ())
    seams.record(cells)
    assert "each broken in turn: its tests notice 0." in reliability.page()
    assert "* not noticed: a" in reliability.page()
