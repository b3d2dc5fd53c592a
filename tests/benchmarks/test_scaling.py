"""`benchmarks.scaling`: it runs at small sizes, fits powers, and leaves out what has no memory."""

import json

import pytest

from benchmarks import scaling


def points(power):
    sizes = (100, 1000, 2000, 4000)
    return [{"tokens": n, "squares": 50 * n, "seconds": {"median": 3e-6 * n**power}} for n in sizes]


@pytest.mark.parametrize("power", [1.0, 2.0])
def test_exponents_are_those_of_a_power(power):
    found = points(power)
    assert scaling.exponents(found, 1000) == pytest.approx({"tokens": power, "squares": power})
    found[0]["seconds"]["median"] = 1e9  # below the rows that are fitted
    assert scaling.exponents(found, 1000) == pytest.approx({"tokens": power, "squares": power})
    assert scaling.exponents(found, 0)["tokens"] != pytest.approx(power)
    assert scaling.exponents(found, 4000) is None


def test_documents_fill_the_row_with_squares_that_grow_as_it_does():
    options = scaling.parse(["--mean", "50"])
    sums = []
    for tokens in (2048, 4096, 8192):
        documents = scaling.documents_of(tokens, options)
        assert sum(documents) == tokens
        sums.append(sum(n * n for n in documents))
    assert sums[2] / sums[0] == pytest.approx(4, rel=0.2)


@pytest.mark.parametrize("backward", [False, True])
def test_it_runs_at_small_sizes(tmp_path, capsys, backward):
    file = tmp_path / "scaling.json"
    arguments = "--tokens 64 128 256 --mean 20 --rounds 1 --threads 1 --memory 0.0003".split()
    scaling.main([*arguments, *(["--backward"] if backward else []), "--json", str(file)])
    found = json.loads(file.read_text())
    assert [p["tokens"] for p in found["arms"][scaling.PACKED]] == [64, 128, 256]
    assert [p["squares"] for p in found["arms"][scaling.SINGLE]] == [64**2, 128**2, 256**2]
    assert [p["tokens"] for p in found["arms"][scaling.STOCK]] == [64, 128]
    assert [line.startswith("stock, dense mask, 256 tokens: needs about") for line in found["left out"]] == [True]
    assert set(found["exponents"][scaling.PACKED]) == {"squares", "tokens"}
    assert file.with_suffix(".txt").read_text() in capsys.readouterr().out
