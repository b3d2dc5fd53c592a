"""Races of benchmarks: arms that do not agree are not timed, and what is timed is written in
words."""

import json

import pytest
import torch

from benchmarks import interleave
from benchmarks.interleave import Race


def arms(**values):
    return {
        name: lambda value=value: (torch.tensor(1.0), [torch.tensor([3.0, 4.0 + value])])
        for name, value in values.items()
    }


def test_arms_that_do_not_agree_are_refused_unless_they_are_wrong_on_purpose():
    apart = Race(arms(first=0.0, same=1e-6, off=0.5), "same", wrong=("off",)).apart()
    assert apart == pytest.approx({"first": 0.0, "same": 2e-8, "off": 0.01}, rel=0.1, abs=1e-12)
    for value in (0.5, float("nan")):
        with pytest.raises(SystemExit, match="off is .* from first, allowed 1e-05"):
            Race(arms(first=0.0, off=value), "off").run(1)


def test_a_program_writes_its_races(tmp_path, capsys):
    path = tmp_path / "found.json"
    made = {
        "small": lambda options: Race(
            arms(stock=0.0, ours=0.0), "ours", {"stock": 1e9}, facts={"tokens": options.tokens}
        )
    }
    interleave.main(
        "some",
        "About.",
        made,
        tokens=7,
        arguments=["--tokens", "9", "--rounds", "2", "--threads", "1", "--json", str(path)],
    )
    found = json.loads(path.read_text())
    assert found["settings"]["tokens"] == 9
    assert set(found["races"]["small"]["seconds"]) == {"stock", "ours"}
    text = path.with_suffix(".txt").read_text()
    assert text in capsys.readouterr().out
    assert "small, tokens 9" in text
    assert "goal 1000000000.0: NOT reached" in text
