"""`benchmarks.web_scale`: laws are found again, shards that are simulated are those of a plan, and a trial runs."""

import json

import pytest

import autopack
from benchmarks import web_laws, web_scale


def test_laws_are_those_that_points_follow():
    points = [{"n": n, "t": 3e-6 * n**1.1, "m": 100 + 7 * n} for n in (10, 100, 1000)]
    power, line = web_laws.power(points, "n", "t", 1e9), web_laws.line(points, "n", "m", 1e9)
    assert (power["factor"], power["exponent"]) == pytest.approx((3e-6, 1.1))
    assert power["value"] == pytest.approx(3e-6 * 1e9**1.1)
    assert (line["constant"], line["slope"]) == pytest.approx((100, 7))
    assert max(power["residual"], line["residual"]) < 1e-9
    bent = [{**point, "t": point["t"] * (1.5 if point["n"] == 100 else 1)} for point in points]
    assert 0.1 < web_laws.power(bent, "n", "t", 1e9)["residual"] < 0.5


def test_shards_are_planned_by_themselves():
    options = web_scale.parse(["--trial"])
    found = web_scale.simulate(300, 5, options)
    lengths = [web_scale.lengths_of(300, options, (1, shard)) for shard in range(5)]
    plans = [autopack.packing.plan(part, options.max_length, overflow="split") for part in lengths]
    assert found["rows"] == sum(map(len, plans))
    assert found["tokens"] == sum(int(part.sum()) for part in lengths) == sum(int(p.lengths.sum()) for p in plans)
    assert found["padding"] == pytest.approx(1 - found["tokens"] / (found["rows"] * options.max_length))
    assert len({tuple(part) for part in lengths}) == 5


@pytest.mark.exhaustive
def test_a_trial_runs_and_makes_a_page(tmp_path, capsys):
    path = tmp_path / "scale.json"
    web_scale.main(["--trial", "--rounds", "1", "--json", str(path)])
    found = json.loads(path.read_text())
    assert set(found["laws"]) == set(web_laws.laws(found["measured"]))
    assert found["whole"]["documents"] == pytest.approx(100_000, rel=0.1)
    plan = found["measured"]["plan"][-1]
    assert plan["file"] / plan["documents"] == pytest.approx(24, rel=0.1)  # two numbers a piece and those of rows
    assert path.with_suffix(".txt").read_text() in capsys.readouterr().out
    lines = list(web_laws.page(found))
    assert sum(line.startswith("| ") for line in lines) == 10 + len(found["laws"])
    assert "All of it, shard by shard" in lines[-1]
