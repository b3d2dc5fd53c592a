"""The examples: they run, with the line and without it to the same losses; the notebook is kept with its outputs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate", reason="transformers' Trainer needs it")
pytest.importorskip("ipykernel")
pytest.importorskip("matplotlib")
pytest.importorskip("nbclient")
nbformat: Any = pytest.importorskip("nbformat")

TREE = Path(__file__).parents[1]
NOTEBOOK = TREE / "examples" / "trainer.ipynb"
STEPS = 4


def run(program: str, *arguments: str) -> str:
    command = [sys.executable, f"examples/{program}", *arguments]
    finished = subprocess.run(command, cwd=TREE, capture_output=True, text=True, timeout=600)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def plain_loop(*arguments: str) -> str:
    return run("plain_loop.py", "--steps", str(STEPS), "--threads", "1", *arguments)


def losses(printed: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^step +\d+  loss (\S+)$", printed, re.MULTILINE)]


def text(notebook: Any, name: str) -> str:
    """What the cell of this name put out, as plain text."""
    (cell,) = [cell for cell in notebook.cells if cell.id == name]
    return "".join(o.text if o.output_type == "stream" else o.data.get("text/plain", "") for o in cell.outputs)


@pytest.fixture(scope="module")
def kept() -> Any:
    return nbformat.read(NOTEBOOK, as_version=4)


def test_plain_loop_prints_the_same_losses_with_the_line_and_without():
    stock, enabled = plain_loop("--stock"), plain_loop()
    assert len(losses(stock)) == STEPS
    assert losses(enabled) == pytest.approx(losses(stock), rel=1e-4)
    assert losses(stock)[-1] < losses(stock)[0]
    assert "tokens per second" in stock
    assert "autopack" not in stock
    assert f"{STEPS} padded batches packed inside" in enabled


def test_notebook_runs_and_its_losses_agree(tmp_path):
    path = tmp_path / "executed.ipynb"
    run("refresh.py", "--output", str(path))  # fails where a cell does
    notebook = nbformat.read(path, as_version=4)
    rows = re.findall(r"^ *\d+  (\S+)  (\S+) +\S+$", text(notebook, "losses"), re.MULTILINE)
    assert len(rows) == 20
    stock, enabled = (list(map(float, column)) for column in zip(*rows, strict=True))
    assert enabled == pytest.approx(stock, rel=1e-4)
    assert stock[-1] < stock[0]
    assert "20 padded batches packed inside" in text(notebook, "handle")
    assert "enabled by autopack, sdpa, float32: exact" in text(notebook, "audit")
    assert text(notebook, "remove") == "False"


def test_notebook_is_kept_with_its_outputs_and_little_else(kept):
    nbformat.validate(kept)
    cells = [cell for cell in kept.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [o for o in outputs if o.output_type == "error" or o.get("name") == "stderr"]
    assert sum("image/png" in o.get("data", {}) for o in outputs) == 3
    assert "20 padded batches packed inside" in text(kept, "handle")
    assert NOTEBOOK.stat().st_size < 300_000
    assert kept.metadata.keys() == {"kernelspec", "language_info"}
    assert not any(cell.metadata for cell in kept.cells)
