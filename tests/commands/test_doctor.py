"""The doctor, on this installation as it is and on installations with something broken put in front
of it."""

import json
import os
import re

import pytest
import torch
import transformers

from autopack.attention.choose import availability
from autopack.cli import main
from autopack.options import CHOICES
from autopack.version import MINIMUM, mismatch, problem
from tests.support.processes import ROOT, python


def install(site, name, version):
    """Make `site` claim that a distribution of this version is installed."""
    directory = site / f"{name.replace('-', '_')}-{version}.dist-info"
    directory.mkdir(parents=True)
    (directory / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    )


def run_with(site, *arguments, status=None):
    """What Python does with these arguments and this installation before the real one."""
    return python(*arguments, status=status, PYTHONPATH=os.pathsep.join([str(site), str(ROOT)]))


def broken(site, *said):
    """Want the doctor to find something broken and to say all of this."""
    finished = run_with(site, "-m", "autopack", "doctor", status=1)
    assert "Traceback" not in finished.stderr
    told = finished.stdout[finished.stdout.index("BROKEN:") :]
    for part in said:
        assert part in told
    return finished.stdout


def test_healthy_installation(capsys):
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert printed.rstrip().endswith("Nothing is broken.")
    assert re.search(rf"torch +{re.escape(torch.__version__)}\n", printed)
    assert re.search(rf"transformers +{re.escape(transformers.__version__)}\n", printed)
    for backend, (available, reason) in availability().items():
        assert re.search(
            rf"{backend} +{'yes' if available else 'no'}: {re.escape(reason)}\n", printed
        )


def test_json_says_the_same(capsys):
    assert main(["doctor", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["packages"]["torch"] == torch.__version__
    assert data["problems"] == []
    assert set(data["backends"]) == {*CHOICES["backend"]} - {"auto"}
    assert (data["choices"]["sdpa on cpu"], data["choices"]["eager on cpu"]) == ("sdpa", "eager")


@pytest.mark.parametrize(
    ("name", "error", "also"),
    [
        (
            "flash-attn",
            "ImportError('undefined symbol: _ZN3c105Error')",
            "undefined symbol: _ZN3c105Error",
        ),
        # All else is still said.
        ("torch", "OSError('libcudart.so.12: cannot open')", "OSError: libcudart.so.12"),
    ],
)
def test_a_package_that_cannot_be_imported_is_broken(name, error, also, tmp_path):
    install(tmp_path, name, "2.8.0")
    module = name.replace("-", "_")
    (tmp_path / f"{module}.py").write_text(f"raise {error}")
    assert "numpy" in broken(
        tmp_path, f"{name} 2.8.0 is installed, but `import {module}` fails", also
    )


@pytest.mark.parametrize(
    "version", ["2.4.0a0+3bcc3cddb5.nv24.07", "2.13.0+cpu", "3.0.0.dev20300101"]
)
def test_builds_of_vendors_are_not_too_old(version):
    assert problem("torch", version) is None


@pytest.mark.parametrize(("name", "version"), [("transformers", "4.43.4"), ("torch", "2.1.2")])
def test_a_release_that_is_too_old_is_refused_in_the_words_of_the_doctor(name, version, tmp_path):
    install(tmp_path, name, version)
    least = MINIMUM[name]
    said = (
        f"{name} {version} is too old; autopack needs {least} or later: pip install "
        f"'{name}>={least}'"
    )
    broken(tmp_path, said)
    for part in ("enable", "audit", "estimate", "pack"):
        finished = run_with(tmp_path, "-c", f"import autopack; autopack.{part}")
        assert f"autopack.errors.UnsupportedVersion: {said}" in finished.stderr
    finished = run_with(tmp_path, "-m", "autopack", "run", "script.py", status=2)
    assert finished.stderr.startswith(f"autopack run: {said}")


def test_minimum_versions_are_those_of_the_package():
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert [f"{name}>={version}" for name, version in MINIMUM.items()] == project["dependencies"]


def test_a_torch_that_transformers_does_not_take_is_said(tmp_path):
    install(tmp_path, "torch", "2.5.1")
    install(tmp_path, "transformers", "5.23.0")
    metadata = next(tmp_path.glob("transformers-*")) / "METADATA"
    metadata.write_text(metadata.read_text() + "Requires-Dist: torch>=2.6; extra == 'torch'\n")
    said = (
        "transformers 5.23.0 needs torch>=2.6 and leaves its models out with torch 2.5.1: pip "
        "install 'torch>=2.6'"
    )
    broken(tmp_path, said)
    finished = run_with(tmp_path, "-c", "import autopack; autopack.enable")
    assert f"autopack.errors.UnsupportedVersion: {said}" in finished.stderr


@pytest.mark.parametrize(
    "torch", ["2.6.0", "2.6.0a0+ecf3bae40a.nv25.01", "2.15.0+cu132", "3.0.0.dev20300101"]
)
def test_a_torch_that_transformers_takes_is_no_problem(torch):
    needs = ["numpy>=1.17", "torch>=2.6; extra == 'torch'", "torch>=9; extra == 'of-the-future'"]
    assert mismatch(torch, "5.23.0", needs) is None
    assert mismatch("2.5.1", "5.23.0", needs) is not None, "negative control"
    # transformers 4.52, which runs with any later one
    bounded = ["torch<2.7,>=2.1; extra == 'torch'"]
    assert mismatch(torch if torch != "2.6.0" else "2.13.0", "4.52.4", bounded) is None
    assert mismatch("2.0.1", "4.52.4", bounded) is not None, "negative control"


_BROKEN = {
    "the operator cannot be registered": (
        "def refuse(*args, **kwargs): raise ValueError('infer_schema: unsupported type Tensor')\n"
        "torch.library.custom_op = refuse",
        "importing autopack's parts fails with ValueError: infer_schema: unsupported type Tensor",
    ),
    "padded batches have no place in the graph": (
        "del torch._C._will_engine_execute_node",
        "a tiny Llama with sdpa attention fails with AttributeError: module 'torch._C' has no "
        "attribute '_will_engine_execute_node'",
    ),
    "attention is not exact": (
        "plain = torch.nn.functional.scaled_dot_product_attention\n"
        "def noisy(query, *args, **kwargs): return plain(query, *args, **kwargs) + 1e-2 * "
        "torch.randn(())\n"
        "torch.nn.functional.scaled_dot_product_attention = noisy",
        "a tiny Llama with sdpa attention fails with ArithmeticError: ",
    ),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize(("change", "said"), _BROKEN.values(), ids=_BROKEN)
def test_a_torch_with_which_autopack_does_not_work_is_broken(tmp_path, change, said):
    (tmp_path / "sitecustomize.py").write_text(f"import torch\n{change}\n")
    broken(tmp_path, f"autopack was tried, and {said}")
