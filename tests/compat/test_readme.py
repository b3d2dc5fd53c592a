"""README's numbers: they are those of the recorded results, and a stale one is found."""

import re

import pytest

from compat import readme


def test_every_recorded_task_has_a_row_whose_numbers_add_up():
    rows = [line.split(" | ") for line in readme.served().splitlines() if line.startswith("| [")]
    assert len(rows) == len(readme.recorded())
    for (_, types, exact, refused, others), results in zip(
        rows, readme.recorded().values(), strict=True
    ):
        not_run = sum(int(part.split(" (")[0]) for part in others.removesuffix(" |").split("), "))
        # of types that transformers cannot run without them
        alone = re.search(r"(\d+) with images alone", exact)
        found = int(exact.split()[0]) + (0 if alone is None else int(alone[1]))
        assert int(types) == len(results) == found + int(refused.split(":")[0]) + not_run


def test_what_is_stale_is_found_and_written_anew(monkeypatch, tmp_path, capsys):
    stale = tmp_path / "README.md"
    present = readme.README.read_text()
    stale.write_text(present.replace(" of 189 ", " of 188 "))
    assert stale.read_text() != present
    monkeypatch.setattr(readme, "README", stale)
    assert readme.main(["--check"]) == 1
    assert "README.md is not what the records give" in capsys.readouterr().out
    assert readme.main([]) == 0
    assert stale.read_text() == present


def test_a_missing_place_is_named():
    with pytest.raises(
        ValueError, match=r"wants the two lines '<!-- needed: .*' and '<!-- /needed -->' once"
    ):
        readme.written("# autopack\n")
