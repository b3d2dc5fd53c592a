"""docs/reliability.md is what the records give; a short soak holds its bounds, and notices a
leak."""

import json

import pytest

from compat import reliability, soak
from compat.common import packages


def test_the_page_is_what_is_generated():
    assert reliability.main(["--check"]) == 0


def test_a_stale_page_is_found_and_a_missing_record_is_said(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(reliability, "RESULTS", tmp_path)
    page = tmp_path / "page.md"
    assert reliability.main(["--check"], page) == 1
    assert "run `python -m compat.reliability`" in capsys.readouterr().out
    assert reliability.main([], page) == 0
    assert reliability.main(["--check"], page) == 0
    assert page.read_text().count("Not recorded yet.") == len(reliability._SECTIONS)
    record = {"with": packages(), "seams": [{"name": "a", "caught": False, "by": "SURVIVES"}]}
    (tmp_path / "seams.json").write_text(json.dumps(record))
    assert reliability.main(["--check"], page) == 1
    assert reliability.main([], page) == 0
    assert (
        "1 named functions of autopack, each broken in turn: its tests notice 0."
        in page.read_text()
    )
    assert "* not noticed: a" in page.read_text()


@pytest.mark.parametrize("kind", soak.KINDS)
def test_a_short_soak(kind):
    assert soak.soak(kind, steps=12, rounds=10, seed=1).wrong == []


def test_a_soak_of_stock_on_packed_rows_is_noticed():
    found = soak.soak("llama", steps=4, rounds=1, seed=1, enabled=False)
    assert found.worst_ratio > 1000 * soak.FACTOR
    assert "yardsticks from padded" in found.wrong[0]


def test_the_command_records_what_it_found(tmp_path, capsys):
    path = tmp_path / "soak.json"
    assert soak.main(["--steps", "3", "--rounds", "1", "--only", "llama", "--json", str(path)]) == 0
    assert "held" in capsys.readouterr().out
    found = json.loads(path.read_text())
    assert found["steps"] == 3
    assert found["models"]["llama"]["wrong"] == []
