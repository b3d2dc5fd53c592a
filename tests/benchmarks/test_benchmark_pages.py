"""Pages that show records of benchmarks say what the records say; a stale one is found."""

import json
import shutil

import pytest

from benchmarks import pages


@pytest.fixture
def copied(tmp_path, monkeypatch):
    """A copy of the pages and of the records, to be changed."""
    for page in {path for path, *_ in pages.BLOCKS}:
        (tmp_path / page).parent.mkdir(exist_ok=True)
        shutil.copy(pages.ROOT / page, tmp_path / page)
    shutil.copytree(pages.RESULTS, tmp_path / "results")
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    monkeypatch.setattr(pages, "RESULTS", tmp_path / "results")
    return tmp_path


def test_pages_are_what_the_records_give():
    assert pages.main(["--check"]) == 0


def test_a_stale_page_is_found_and_written_anew(copied, capsys):
    path = copied / "results" / "paper.json"
    record = json.loads(path.read_text())
    arm = record["data"]["flan"]["arms"]["MiniBatch + PosID"]
    arm["tokens per second"] = 7.77 * record["data"]["flan"]["arms"]["padding"]["tokens per second"]
    record["checks"][0][0] = False
    path.write_text(json.dumps(record))
    assert pages.main(["--check"]) == 1
    assert "docs/paper.md is not what the records give" in capsys.readouterr().out
    assert pages.main([]) == 0
    assert pages.main(["--check"]) == 0
    text = (copied / "docs/paper.md").read_text()
    assert "| MiniBatch + PosID | 200 | 7.77 | 1.89 to 1.96 |" in text
    assert text.count("* DOES NOT HOLD: flan, 200 steps: losses of MiniBatch") == 1


def test_a_record_that_is_missing_is_said(copied):
    shutil.rmtree(copied / "results")
    pages.main([])
    assert (
        sum((copied / page).read_text().count("Not recorded yet.") for page in {path for path, *_ in pages.BLOCKS}) == 6
    )


def test_a_page_without_the_place_is_an_error(copied):
    (copied / "docs/scale.md").write_text("# nothing\n")
    with pytest.raises(ValueError, match="docs/scale.md wants the two lines '<!-- web_scale"):
        pages.main([])
