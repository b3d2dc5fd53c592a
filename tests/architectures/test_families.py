"""`autopack families`: every family, its mixers, and the figures of the recorded table."""

import json

import pytest

from autopack import registry
from autopack.cli import main
from autopack.family import Family
from autopack.mixers import ROWS


def printed(capsys, *arguments):
    status = main(["families", *arguments])
    return status, capsys.readouterr().out


def test_every_family_is_listed_with_its_types(capsys):
    status, text = printed(capsys)
    assert status == 0
    for family in registry.families():
        if family.model_types:
            assert f"{family.name}: {family.how}" in text
            assert all(name in text for name in family.model_types)
    assert max(map(len, text.splitlines())) <= 120


def test_as_json_every_mixer_has_its_way(capsys):
    found = json.loads(printed(capsys, "--json")[1])["families"]
    assert [each["mixers"].keys() for each in found] == [
        family.mixers.keys() for family in registry.families()
    ]
    (state_space,) = (each["mixers"] for each in found if each["name"] == "state_space")
    assert state_space["Mamba2Mixer"] == "AtOperations"


def test_named_types(capsys):
    status, text = printed(capsys, "mamba2", "llama", "bert", "deberta-v2")
    assert status == 0
    said = " ".join(text.split())
    assert (
        "mamba2: served: convolution and scan by documents; attention document by document (family"
        in said
    )
    assert "llama: served: attention site, document by document (family attention)" in said
    assert max(map(len, text.splitlines())) <= 120
    status, text = printed(capsys, "mamba2", "--json")
    assert [row["family"] for row in json.loads(text)] == ["state_space"]


@pytest.mark.parametrize(("name", "what"), [
    ("gemma4_assistant", "refused: it is a drafter that takes the states of a target model"),
    ("udop", "refused: its encoder puts the patches of an image behind all text of the row"),
    ("lilt", "try `autopack audit lilt`"),
    ("qwen33", "no family lists it; did you mean qwen3 or qwen"),
])  # fmt: skip
def test_what_is_refused_or_not_listed_says_so(capsys, name, what):
    status, text = printed(capsys, name)
    assert status == 1
    assert what in " ".join(text.split())


def test_a_family_of_ones_own_comes_first(capsys, monkeypatch):
    own = Family(
        name="mine",
        model_types=frozenset({"toy"}),
        how="rows",
        mixers={"ToyMixer": ROWS},
    )
    monkeypatch.setattr(registry, "_registered", [own])
    assert printed(capsys)[1].startswith("mine: rows\n  toy\n")
    assert printed(capsys, "toy")[1].splitlines() == ["toy: served: rows (family mine)"]


@pytest.mark.parametrize("family", registry.families(), ids=lambda family: family.name)
def test_a_family_serves_what_it_does_not_refuse(family):
    assert not family.model_types & family.refused_types.keys()
    served = family.model_types | {"vision-encoder-decoder"}  # as its decoder is
    assert all(types <= served for types in (family.dense_types, *family.media_types.values()))
    assert family.tiny.not_alone <= family.refused_types.keys()
