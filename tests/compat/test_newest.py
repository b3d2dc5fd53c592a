"""A release beyond the recorded ones, made of the installed one: what of it is proven or refused is said."""

import importlib.util
import re
import shutil
from importlib.metadata import distribution, version
from pathlib import Path

import pytest
import transformers
from packaging.requirements import Requirement

from compat import newest, run, tables
from compat.environments import Environment
from compat.matrix import Matrix, Release, Selection

NAME = "99.0.0"
HERE = Release(transformers.__version__, version("tokenizers"), version("huggingface-hub"), ">=3.10,<3.99")
BEYOND = Release(NAME, HERE.tokenizers, HERE.hub, HERE.python)
TYPES = ("bert", "distilbert", "electra")
MATRIX = Matrix("2.13.0", ("masked-lm",), ("eager",), ("llama",), Selection(("masked-lm",), ("eager",), TYPES), (HERE,))


@pytest.fixture
def fabricated(tmp_path, monkeypatch):
    """A copy of the installed release under another number, which the index has; returns what changes its code."""
    spec = importlib.util.find_spec("transformers")
    assert spec is not None
    assert spec.origin is not None
    environment = Environment(MATRIX, BEYOND, tmp_path / "cache")
    package = environment.path / "transformers"
    shutil.copytree(Path(spec.origin).parent, package)
    about = environment.path / f"transformers-{NAME}.dist-info"
    about.mkdir()
    text = distribution("transformers").read_text("METADATA")
    assert text is not None
    (about / "METADATA").write_text(text.replace(f"\nVersion: {HERE.transformers}", f"\nVersion: {NAME}", 1))
    environment.stamp.write_text("{}")

    def change(where, old, new):
        path = package / where
        found = path.read_text()
        assert old in found
        path.write_text(found.replace(old, new))

    change("__init__.py", f'__version__ = "{HERE.transformers}"', f'__version__ = "{NAME}"')
    for name, value in {"RESULTS": "releases", "TABLE": "README.md"}.items():
        monkeypatch.setattr(tables, name, tmp_path / value)
    known = [
        {"task": "masked-lm", "type": name, "mode": "eager", "status": "exact", "proof": "recorded"} for name in TYPES
    ]
    tables.record(HERE, tables.compact(HERE, {"types": {}}, known, "before"))
    monkeypatch.setattr(newest, "cache_directory", lambda: tmp_path / "cache")
    monkeypatch.setattr(newest, "find", lambda name, pre: BEYOND)
    monkeypatch.setattr(run, "load_matrix", lambda path: MATRIX)
    monkeypatch.setattr(run, "check_interpreter", lambda matrix: None)
    return change


@pytest.mark.exhaustive
def test_what_is_proven_and_refused_is_in_the_table(fabricated, capsys):
    """Nothing but the number changed in BERT, nothing that matters in DistilBERT; ELECTRA now mixes tokens."""
    modeling = "models/distilbert/modeling_distilbert.py"
    fabricated(
        modeling, "class DistilBertSelfAttention(nn.Module):", "class DistilBertSelfAttention(nn.Module):\n    a_b = 1"
    )
    embeddings = "embeddings = self.LayerNorm(embeddings)"
    mixed = embeddings.replace("(embeddings)", "(embeddings + embeddings.roll(1, 1))")
    fabricated("models/electra/modeling_electra.py", embeddings, mixed)
    assert run.main(["--newest", "--types", *TYPES]) == 1
    out = capsys.readouterr().out
    assert f"transformers=={NAME}" in out
    lines = [line for line in out.splitlines() if line.startswith(("task  ", "masked-lm  "))]
    numbers = dict(zip(*(re.split(" {2,}", line.strip()) for line in lines[:2]), strict=True))
    names = ("refused", "LEAK", "crash", "not proven", "proven by a twin")
    assert [numbers[name] for name in names] == ["1", "0", "0", "0", "2"]
    lost = out.partition("and no more\n")[2].partition("\n\n")[0]
    assert "electra/masked-lm/eager" in lost
    assert "distilbert" not in lost
    assert "standard deviation" in lost


def test_nothing_beyond_what_is_listed_is_said(monkeypatch, capsys):
    monkeypatch.setattr(newest, "find", lambda name, pre: HERE)
    monkeypatch.setattr(Environment, "build", lambda self, rebuild=False: pytest.fail("nothing has to be measured"))
    assert newest.run(MATRIX, MATRIX.ci, None, pre=True, jobs=1, limit=60.0) == 0
    assert f"no release beyond {HERE.transformers}" in capsys.readouterr().out


def test_the_newest_is_what_pip_would_install(monkeypatch):
    """With the newest tokenizers and hub that its metadata allows; pre-releases count where they are asked for."""
    asked = []

    def report(requirement, pre=False):
        asked.append((requirement, pre))
        name = Requirement(requirement).name
        needs = ["tokenizers>=0.22,<0.24", "huggingface-hub>=2.0", "torch>=2.6; extra == 'torch'"]
        return {"version": {"transformers": NAME, "tokenizers": "0.23.3"}.get(name, "2.4.0"), "requires_dist": needs}

    monkeypatch.setattr(newest, "_report", report)
    found = newest.find(None, pre=True)
    assert found.pins == [f"transformers=={NAME}", "tokenizers==0.23.3", "huggingface-hub==2.4.0"]
    assert asked[0] == ("transformers", True)
