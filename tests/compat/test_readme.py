"""README's numbers: they are those of the recorded results, and a stale one is found."""

import pytest

from compat import readme


def test_every_recorded_task_has_a_row_whose_numbers_add_up():
    rows = [line.strip("| ").split(" | ") for line in readme.served().splitlines()]
    rows = [[int(number) for number in row[1:]] for row in rows if row[0].startswith("[")]
    assert [row[0] for row in rows] == [len(found) for found in readme.recorded().values()]
    for types, exact, with_images, refused, leaking, not_run in rows:
        assert types == exact + refused + leaking + not_run
        assert with_images <= exact
        assert not leaking


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
