"""The page that shows records of benchmarks says what the records say; a stale one is found."""

import json
import shutil

import pytest

from benchmarks import pages


@pytest.fixture
def copied(tmp_path, monkeypatch):
    """A copy of the page and of the records, to be changed."""
    (tmp_path / "docs").mkdir()
    shutil.copy(pages.ROOT / "docs" / "measured.md", tmp_path / "docs")
    shutil.copytree(pages.RESULTS, tmp_path / "results")
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    monkeypatch.setattr(pages, "RESULTS", tmp_path / "results")
    return tmp_path


def test_the_page_is_what_the_records_give():
    assert pages.main(["--check"]) == 0


def test_a_stale_page_is_found_and_written_anew(copied, capsys):
    path = copied / "results" / "paper.json"
    record = json.loads(path.read_text())
    arm = record["data"]["flan"]["arms"]["MiniBatch + PosID"]
    arm["tokens per second"] = 7.77 * record["data"]["flan"]["arms"]["padding"]["tokens per second"]
    record["checks"][0][0] = False
    path.write_text(json.dumps(record))
    assert pages.main(["--check"]) == 1
    assert "docs/measured.md is not what the records give" in capsys.readouterr().out
    assert pages.main([]) == 0
    assert pages.main(["--check"]) == 0
    text = (copied / "docs/measured.md").read_text()
    assert "| MiniBatch + PosID | 200 | 7.77 | 1.89 to 1.96 |" in text
    assert text.count("* DOES NOT HOLD: flan, 200 steps: losses of MiniBatch") == 1


def test_a_record_that_is_missing_is_said(copied):
    shutil.rmtree(copied / "results")
    pages.main([])
    assert (copied / "docs/measured.md").read_text().count("Not recorded yet.") == len(pages.SECTIONS)
