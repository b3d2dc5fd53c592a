"""The page that shows records of benchmarks shows what they say; a stale one is found."""

import shutil

from benchmarks import pages


def test_the_page_is_what_the_records_give():
    assert pages.main(check=True) == 0


def test_a_stale_page_is_found_and_written_anew(tmp_path, capsys):
    for folder in ("docs", "benchmarks/results"):
        shutil.copytree(pages.ROOT / folder, tmp_path / folder)
    record = tmp_path / "benchmarks" / "results" / "paper_ranks.txt"
    record.write_text(record.read_text().replace("5.30", "7.77"))
    assert pages.main(tmp_path, check=True) == 1
    assert "docs/measured.md is not what the records give" in capsys.readouterr().out
    assert pages.main(tmp_path) == 0
    assert "7.77" in (tmp_path / "docs" / "measured.md").read_text()
    assert pages.main(tmp_path, check=True) == 0
