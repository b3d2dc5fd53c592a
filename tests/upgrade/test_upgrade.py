"""A script of autopack 0.1 and what that release has left on disk: both still work, and old names say what to write.

`plan.npz`, `state.json` and `printed.json` were made by `script_of_0_1.py FOLDER write` with the code of 0.1.0
(transformers 5.23.0, torch 2.13.0).
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SCRIPT = HERE / "script_of_0_1.py"
THEN = json.loads((HERE / "printed.json").read_text(encoding="utf-8"))


def run(folder: Path, does: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *options, str(SCRIPT), str(folder), does]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.fixture
def left_by_0_1(tmp_path):
    for name in ("plan.npz", "state.json"):
        (tmp_path / name).write_bytes((HERE / name).read_bytes())
    return tmp_path


def test_the_script_runs_as_it_did_and_every_old_name_says_what_to_write(left_by_0_1):
    done = run(left_by_0_1, "read")
    assert done.returncode == 0, done.stderr
    now = json.loads(done.stdout.splitlines()[-1])
    assert now["trained"] == THEN["trained"], "a sampler's state goes on with other batches"
    assert now["rows"] == THEN["rows"]
    # Losses are in float32: a mean of some 60 numbers of order 4, in another order.
    assert now["apart"] < 2e-6
    if version("torch").startswith("2.13"):  # the numbers that a seed draws may be others elsewhere
        assert now["losses"] == pytest.approx(THEN["losses"], rel=1e-5)
    pattern = r"FutureWarning: (\S+) is (?:called )?(\S+) now; the old name goes with autopack 0\.3"
    said = re.findall(pattern, done.stderr)
    assert dict(said) == {
        "max_tokens": "max_length",
        "capacity": "max_length",
        "autopack.Plan": "autopack.packing.Plan",
        "autopack.HostBatch": "autopack.packing.HostBatch",
        "autopack.LeakReport": "autopack.auditing.report.LeakReport",
        "autopack.families": "autopack.registry.families",
        **{
            f"autopack.{name}": f"autopack.errors.{name}"
            for name in ("SiteDrift", "OutsideForward", "UnsupportedVersion")
        },
    }


@pytest.mark.exhaustive
def test_what_it_keeps_now_is_what_0_1_kept(tmp_path):
    done = run(tmp_path, "write", "-W", "ignore")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["rows"] == THEN["rows"]
    assert "capacity is called max_length" not in done.stderr


def test_warnings_made_errors_stop_at_the_first_old_name(left_by_0_1):
    done = run(left_by_0_1, "read", "-W", "error::FutureWarning")
    assert done.returncode == 1
    assert "PackedBatchSampler(lengths, max_tokens=64" in done.stderr
    assert "FutureWarning: max_tokens is called max_length now" in done.stderr
