"""`autopack families`: every family, its mixers and paths, and the figures of the recorded table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autopack import registry, tiny
from autopack.architectures import Family
from autopack.cli import main
from autopack.commands import families
from autopack.mixers import ROWS
from compat.exactness import RESULTS


def printed(capsys, *arguments: str) -> tuple[int, str]:
    status = main(["families", *arguments])
    return status, capsys.readouterr().out


def test_every_family_is_listed_with_its_types_mixers_and_paths(capsys):
    status, text = printed(capsys)
    assert status == 0
    for family in registry.families():
        if family.model_types:
            assert f"{family.name}: {family.path}" in text
            assert all(name in text for name in (*family.model_types, *family.mixers))
    assert "causal_conv1d told by seq_idx, fla told by cu_seqlens where installed, else as on CPU" in text
    assert max(map(len, text.splitlines())) <= 120


def test_as_json_every_mixer_has_a_path_for_every_device(capsys):
    found = json.loads(printed(capsys, "--json")[1])
    assert found["transformers"]
    for family in found["families"]:
        for mixers in family["mixers"]:
            assert set(mixers["paths"]) in ({"any"}, {"CPU", "CUDA"})
        assert family["attention"] or family["mixers"] or not family["model_types"]


def test_what_is_shipped_is_what_was_recorded():
    recorded = json.loads((RESULTS / "exactness.json").read_text())
    shipped = families.load()["types"]
    for name, cells in recorded.items():
        exact = {backend: cell["worst"] for backend, cell in cells.items() if cell["status"] == "exact"}
        assert shipped[name].get("errors", {}) == {b: float(f"{error:.0e}") for b, error in exact.items()}
    served = {name for family in registry.families() for name in family.model_types}
    assert served & set(tiny.causal_lm_types()) <= shipped.keys()


def test_named_types(capsys):
    status, text = printed(capsys, "mamba2", "llama")
    assert status == 0
    mamba, llama = text.splitlines()
    assert mamba.startswith("mamba2: convolution and scan by documents")
    assert llama.endswith("exact: eager 0, sdpa 0, flex 2e-06, flash 2e-06")
    status, text = printed(capsys, "mamba2", "gemma4_assistant", "no_such_type")
    assert status == 1
    _, drafter, unknown = text.splitlines()
    assert drafter == "gemma4_assistant: refused, since it is a drafter that takes the states of a target model"
    assert unknown.startswith("no_such_type: no family has it")
    status, text = printed(capsys, "mamba2", "--json")
    assert [row["family"] for row in json.loads(text)] == ["state_space"]


def test_a_family_of_ones_own_comes_first(capsys, monkeypatch):
    own = Family(name="mine", model_types=frozenset({"toy"}), path="rows", mixers={"ToyMixer": ROWS}, attends=False)
    monkeypatch.setattr(registry, "_registered", [own])
    assert printed(capsys)[1].startswith("mine: rows\n  toy\n  ToyMixer\n    any   the mixer itself, on documents as")
    assert printed(capsys, "toy")[1].strip() == "toy: rows (family mine); not measured by its own name"


def test_an_incomplete_installation_says_so(capsys, monkeypatch, tmp_path: Path):
    monkeypatch.setattr(families, "MEASURED", tmp_path / "measured.json")
    assert main(["families"]) == 2
    assert "measured.json is missing" in capsys.readouterr().err


@pytest.mark.parametrize("family", registry.families(), ids=lambda family: family.name)
def test_a_family_serves_what_it_does_not_refuse(family):
    assert not family.model_types & family.refused_types.keys()
    assert family.attends or family.mixers or not family.model_types
