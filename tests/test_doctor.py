"""The doctor, on this installation as it is and on installations with something broken put in front of it."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

from autopack.attention.choose import availability
from autopack.cli import main
from autopack.enabling.options import CHOICES
from autopack.version import MINIMUM, problem

TREE = Path(__file__).parents[1]


def install(site: Path, name: str, version: str) -> None:
    """Make `site` claim that a distribution of this version is installed."""
    directory = site / f"{name.replace('-', '_')}-{version}.dist-info"
    directory.mkdir(parents=True)
    (directory / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def doctor_with(site: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(site)}
    command = [sys.executable, "-m", "autopack", "doctor"]
    return subprocess.run(command, cwd=TREE, env=environment, capture_output=True, text=True, timeout=120)


def test_healthy_installation(capsys):
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert printed.rstrip().endswith("Nothing is broken.")
    assert re.search(rf"torch +{re.escape(torch.__version__)}\n", printed)
    assert re.search(rf"transformers +{re.escape(transformers.__version__)}\n", printed)
    for backend, (available, reason) in availability().items():
        assert re.search(rf"{backend} +{'yes' if available else 'no'} +{re.escape(reason)}\n", printed)


def test_json_says_the_same(capsys):
    assert main(["doctor", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["packages"]["torch"] == torch.__version__
    assert data["problems"] == []
    assert set(data["backends"]) == {*CHOICES["backend"]} - {"auto"}
    on_cpu = {
        (row["attn_implementation"], row["dtype"]): row["backend"] for row in data["choices"] if row["device"] == "cpu"
    }
    assert on_cpu["sdpa", "float32"] == on_cpu["sdpa", "bfloat16"] == "sdpa"
    assert on_cpu["eager", "float32"] == "eager"


def test_flash_attention_that_cannot_be_imported_is_broken(tmp_path):
    install(tmp_path, "flash-attn", "2.7.4")
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").write_text("raise ImportError('undefined symbol: _ZN3c105Error')")
    finished = doctor_with(tmp_path)
    assert finished.returncode == 1, finished.stderr
    broken = finished.stdout[finished.stdout.index("BROKEN:") :]
    assert "flash-attn 2.7.4 is installed, but `import flash_attn` fails" in broken
    assert "undefined symbol: _ZN3c105Error" in broken


@pytest.mark.parametrize(("name", "version"), [("transformers", "4.40.0"), ("torch", "2.1.2")])
def test_version_that_is_too_old_is_broken(tmp_path, name, version):
    install(tmp_path, name, version)
    finished = doctor_with(tmp_path)
    assert finished.returncode == 1, finished.stderr
    assert f"{name} {version} is too old; autopack needs {MINIMUM[name]} or later" in finished.stdout
    assert f"pip install '{name}>={MINIMUM[name]}'" in finished.stdout


def test_torch_that_cannot_be_imported_is_broken_and_all_else_is_still_said(tmp_path):
    install(tmp_path, "torch", "2.8.0")
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so.12: cannot open shared object file')")
    finished = doctor_with(tmp_path)
    assert finished.returncode == 1, finished.stderr
    assert "torch 2.8.0 is installed, but `import torch` fails: OSError: libcudart.so.12" in finished.stdout
    assert "Traceback" not in finished.stderr
    assert "numpy" in finished.stdout


@pytest.mark.parametrize("version", ["2.4.0a0+3bcc3cddb5.nv24.07", "2.13.0+cpu", "3.0.0.dev20300101"])
def test_builds_of_vendors_are_not_too_old(version):
    assert problem("torch", version) is None


def test_a_release_that_is_too_old_is_refused_in_the_words_of_the_doctor(tmp_path):
    install(tmp_path, "transformers", "4.47.1")
    said = "transformers 4.47.1 is too old; autopack needs 4.48 or later: pip install 'transformers>=4.48'"
    assert said in doctor_with(tmp_path).stdout
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(TREE)])}
    run = functools.partial(subprocess.run, env=environment, capture_output=True, text=True)
    for name in ("enable", "audit", "families", "pack"):
        finished = run([sys.executable, "-c", f"import autopack; autopack.{name}"])
        assert f"autopack.errors.UnsupportedVersion: {said}" in finished.stderr
    finished = run([sys.executable, "-m", "autopack", "run", "script.py"])
    assert finished.returncode == 2
    assert finished.stderr.startswith(f"autopack run: {said}")
    finished = run([sys.executable, "-c", "import autopack; print(autopack.UnsupportedVersion.__mro__[2].__name__)"])
    assert finished.stdout.strip() == "ImportError", finished.stderr


def test_minimum_versions_are_those_of_the_package():
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((TREE / "pyproject.toml").read_text())["project"]
    assert [f"{name}>={version}" for name, version in MINIMUM.items()] == project["dependencies"]
