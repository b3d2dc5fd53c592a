"""The runner itself: the matrix is sound, pins decide the environment, results and tables say what happened."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version as Number

from compat import environments, run, tables
from compat.environments import Environment, Interpreter, environment_name
from compat.matrix import ROOT, CompatError, Matrix, Version, load_matrix, python_in_range, tomllib

HERE = Interpreter(sys.executable, sys.version_info[:2])
OLD = Version("4.0.0", ("tokenizers==0.1",), ">=3.10,<3.99", absent=("qwen3",))
NEW = Version("5.0.0", ("tokenizers==0.2",), ">=3.10,<3.99", absent=("qwen3/sdpa",), ci=True)
MATRIX = Matrix("2.13.0", ("numpy<3",), ("pytest>=8",), ("llama", "qwen3"), ("eager", "sdpa"), (OLD, NEW))

REPORT = """<testsuites><testsuite name="pytest">
<testcase name="test_audit[eager-llama]"><properties><property name="check" value="audit"/>
  <property name="model" value="llama"/><property name="mode" value="eager"/>
  <property name="worst" value="3.14159e-07"/></properties></testcase>
<testcase name="test_control[eager-llama]"><properties><property name="check" value="control"/>
  <property name="model" value="llama"/><property name="mode" value="eager"/></properties>
  <skipped message="exact upstream"/></testcase>
<testcase name="test_audit[sdpa-llama]"><properties><property name="check" value="audit"/>
  <property name="model" value="llama"/><property name="mode" value="sdpa"/>
  <property name="worst" value="0.85"/></properties><failure message="AssertionError: leak&#10;more"/></testcase>
</testsuite></testsuites>"""


def result_of(version: Version, matrix: Matrix = MATRIX, worst: float = 3e-7) -> dict[str, Any]:
    """A result in which everything that the matrix lists passed."""
    checks = {
        "audit": {"outcome": "passed", "worst": worst},
        "gradients, reentrant": {"outcome": "passed", "worst": 1e-6},
        "gradients, not reentrant": {"outcome": "passed", "worst": 2e-6},
        "control": {"outcome": "passed", "worst": 0.85},
    }
    names = [cell.split("/") for cell in matrix.cells_of(version)]
    cells = [{"model": model, "mode": mode, "checks": checks} for model, mode in names]
    return {"transformers": version.transformers, "requirements": matrix.requirements(version), "cells": cells}


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory in the place of compat/results."""
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(tables, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(tables, "TABLE", tmp_path / "results" / "README.md")
    monkeypatch.setattr(run, "TABLE", tmp_path / "results" / "README.md")
    return tmp_path / "results"


class TestMatrix:
    """matrix.toml as it is, and what the parser refuses."""

    def test_versions_ascend_and_ci_covers_the_newest(self) -> None:
        """The table reads from old to new, and the newest release is always in CI."""
        versions = load_matrix().versions
        numbers = [Number(version.transformers) for version in versions]
        assert numbers == sorted(numbers)
        assert versions[-1].ci

    def test_versions_lie_within_the_declared_dependencies(self) -> None:
        """What is tested can be installed beside autopack, and the lower bound of transformers is tested."""
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        bounds = {(found := Requirement(line)).name: found.specifier for line in project["dependencies"]}
        matrix = load_matrix()
        assert bounds["torch"].contains(matrix.torch)
        assert all(bounds["transformers"].contains(version.transformers) for version in matrix.versions)
        lowest = next(bound.version for bound in bounds["transformers"] if bound.operator == ">=")
        assert matrix.versions[0].transformers.startswith(lowest)

    def test_requirements_name_torch_first_and_are_readable(self) -> None:
        """pip gets valid requirements; torch comes first because it is installed alone first."""
        matrix = load_matrix()
        for version in matrix.versions:
            names = [Requirement(line).name for line in matrix.requirements(version)]
            assert names[:2] == ["torch", "transformers"]
            assert len(set(names)) == len(names)

    def test_readme_pins_the_same_torch(self) -> None:
        """The commands of the README and the matrix test with one torch."""
        readme = (ROOT / "README.md").read_text(encoding="utf-8")
        assert set(re.findall(r"torch==([\d.]+)", readme)) == {load_matrix().torch}

    def test_absent_cells_are_left_out(self) -> None:
        """A version tests all model types in all modes, less its absent ones."""
        assert MATRIX.cells_of(OLD) == ["llama/eager", "llama/sdpa"]
        assert MATRIX.cells_of(NEW) == ["llama/eager", "llama/sdpa", "qwen3/eager"]

    @pytest.mark.parametrize(
        ("installed", "nearest"), [("3.9.1", OLD), ("4.99.0", OLD), ("5.0.0", NEW), ("5.10.0.dev0", NEW)]
    )
    def test_nearest(self, installed: str, nearest: Version) -> None:
        """An unlisted transformers is tested as the listed one before it."""
        assert MATRIX.nearest(installed) is nearest

    def test_selecting_an_unlisted_version_names_the_listed_ones(self) -> None:
        """A typing error does not run nothing."""
        assert MATRIX.select(["5.0.0"]) == [NEW]
        with pytest.raises(CompatError, match=r"9\.9\.9 .*lists 4\.0\.0, 5\.0\.0"):
            MATRIX.select(["5.0.0", "9.9.9"])

    @pytest.mark.parametrize(
        ("old", "new", "message"),
        [
            ('torch = "2.13.0"\n', "", "lacks torch"),
            ("ci = true", "ci = 1", "ci has to be a bool, found 1"),
            ("ci = true", "nightly = true", "unknown key 'nightly'"),
            ('absent = ["qwen3"]', 'absent = ["qwen9"]', "absent names qwen9"),
            ('python = ">=3.10,<3.14"', 'python = "~=3.10"', "Python bound '~=3.10'"),
            ('transformers = "4.48.3"', 'transformers = "4.53.3"', "twice"),
        ],
    )
    def test_mistakes_are_named(self, tmp_path: Path, old: str, new: str, message: str) -> None:
        """Every mistake in the file is an error that says where it is."""
        text = (ROOT / "compat" / "matrix.toml").read_text(encoding="utf-8")
        assert old in text
        path = tmp_path / "matrix.toml"
        path.write_text(text.replace(old, new, 1), encoding="utf-8")
        with pytest.raises(CompatError, match=message):
            load_matrix(path)

    @pytest.mark.parametrize(("found", "fits"), [((3, 9), False), ((3, 10), True), ((3, 13), True), ((3, 14), False)])
    def test_python_bounds(self, found: tuple[int, int], fits: bool) -> None:
        """The lower bound is inclusive, the upper one is not."""
        assert python_in_range(">=3.10, <3.14", found) is fits


class TestEnvironment:
    """Environments are keyed by their pins and complete or absent."""

    def test_name_changes_with_pins_only(self) -> None:
        """Another pin is another environment; what is tested in it does not matter."""
        name = environment_name(MATRIX, OLD, (3, 11))
        repinned = Version(OLD.transformers, ("tokenizers==0.2",), OLD.python)
        assert name.startswith("4.0.0-py311-")
        assert environment_name(MATRIX, repinned, (3, 11)) != name
        assert environment_name(MATRIX, OLD, (3, 12)) != name
        assert environment_name(MATRIX, Version(OLD.transformers, OLD.pins, OLD.python, ci=True), (3, 11)) == name

    @pytest.fixture
    def commands(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """Records the commands of a build in the place of running them."""
        ran: list[str] = []

        def note(self: Environment, command: Sequence[str]) -> None:
            self.path.mkdir(parents=True, exist_ok=True)
            ran.append(" ".join(command))

        monkeypatch.setattr(Environment, "_logged", note)
        return ran

    def test_build_installs_torch_first_and_once(self, tmp_path: Path, commands: list[str]) -> None:
        """A second build does nothing; the cache hides itself from git; environments of older pins go."""
        (tmp_path / "4.0.0-py{}{}-stale".format(*HERE.version)).mkdir()
        Environment(MATRIX, OLD, HERE, tmp_path).build()
        installs = [command.partition(" install --disable-pip-version-check ")[2] for command in commands]
        assert next(text for text in installs if text) == "torch==2.13.0"
        assert installs[-1].endswith(f"--editable {ROOT}")
        assert (tmp_path / ".gitignore").read_text(encoding="utf-8") == "*\n"
        assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == [
            environment_name(MATRIX, OLD, HERE.version)
        ]
        count = len(commands)
        Environment(MATRIX, OLD, HERE, tmp_path).build()
        assert len(commands) == count
        Environment(MATRIX, OLD, HERE, tmp_path).build(rebuild=True)
        assert len(commands) == 2 * count

    def test_interrupted_build_is_redone(
        self, tmp_path: Path, commands: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """An environment whose installation failed is not taken for ready."""
        environment = Environment(MATRIX, OLD, HERE, tmp_path)

        def fail(self: Environment, *arguments: str) -> None:
            raise CompatError("no network")

        with monkeypatch.context() as broken:
            broken.setattr(Environment, "_pip", fail)
            with pytest.raises(CompatError, match="no network"):
                environment.build()
        assert environment.path.is_dir()
        assert not environment.ready
        environment.build()
        assert environment.ready

    def test_failing_command_shows_the_end_of_its_log(self, tmp_path: Path) -> None:
        """The error names the command, its status and the log."""
        environment = Environment(MATRIX, OLD, HERE, tmp_path)
        with pytest.raises(CompatError, match=r"status 3[\s\S]*no such wheel"):
            environment._logged([sys.executable, "-c", "print('no such wheel'); raise SystemExit(3)"])

    def test_python_out_of_range_is_refused(self, tmp_path: Path, commands: list[str]) -> None:
        """Nothing is installed for a Python that the version is not listed for."""
        with pytest.raises(CompatError, match="--python"):
            Environment(MATRIX, OLD, Interpreter("python3.9", (3, 9)), tmp_path).build()
        assert commands == []

    def test_cache_directory_follows_the_environment(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """$AUTOPACK_COMPAT_CACHE moves the cache; otherwise it lies beside the runner."""
        monkeypatch.delenv("AUTOPACK_COMPAT_CACHE", raising=False)
        assert environments.cache_directory() == ROOT / "compat" / ".envs"
        monkeypatch.setenv("AUTOPACK_COMPAT_CACHE", str(tmp_path))
        assert environments.cache_directory() == tmp_path.resolve()


class TestTables:
    """From pytest's report to the generated table."""

    def test_report_is_read_by_cell(self) -> None:
        """Outcomes and rounded numbers are sorted by model type and mode."""
        cells = tables.parse_report(REPORT)
        assert cells == [
            {
                "model": "llama",
                "mode": "eager",
                "checks": {
                    "audit": {"outcome": "passed", "worst": 3.1e-7},
                    "control": {"outcome": "skipped", "message": "exact upstream"},
                },
            },
            {
                "model": "llama",
                "mode": "sdpa",
                "checks": {"audit": {"outcome": "failed", "worst": 0.85, "message": "AssertionError: leak"}},
            },
        ]
        assert tables.failures({"cells": cells}) == ["llama/sdpa audit: AssertionError: leak"]

    def test_collection_errors_are_not_lost(self) -> None:
        """An error that belongs to no test is a failure too."""
        case = '<testcase name="test_absent"><skipped message="got empty parameter set"/></testcase>'
        case += '<testcase name="tests.compat.test_exact"><error message="collection failure"/></testcase>'
        result = {"cells": tables.parse_report(f"<testsuite>{case}</testsuite>")}
        assert tables.failures(result) == ["tests.compat.test_exact: collection failure"]
        assert tables.missing_cells(MATRIX, OLD, result) == ["llama/eager", "llama/sdpa"]

    def test_cells_say_what_happened(self) -> None:
        """Exact only where the audit passed; a failed check is named; an absent type is not there."""
        result = {"cells": tables.parse_report(REPORT)}
        assert tables.cell_text(OLD, result, "llama", "eager") == "exact, 3e-07"
        assert tables.cell_text(OLD, result, "llama", "sdpa") == "failed: audit"
        assert tables.cell_text(OLD, result, "qwen3", "eager") == "not there"
        assert tables.cell_text(NEW, result, "qwen3", "eager") == "not run"
        assert tables.cell_text(NEW, result, "qwen3", "sdpa") == "not there"
        assert tables.cell_text(NEW, None, "llama", "eager") == "not run"

    def test_markdown(self) -> None:
        """One row per version and model type, and the versions that are only planned."""
        planned = Matrix(**{**vars(MATRIX), "planned": (("3.0.0", "too old"),)})
        text = tables.markdown(planned, {"4.0.0": result_of(OLD)})
        assert "| 4.0.0 | llama | exact, 3e-07 | exact, 3e-07 | 2e-06 / 2e-06 | 8e-01 / 8e-01 |\n" in text
        assert "| 4.0.0 | qwen3 | not there | not there | - | - |\n" in text
        assert "| 5.0.0 | llama | not run | not run | - | - |\n" in text
        assert text.endswith("* transformers 3.0.0: too old\n")

    def test_stale_records_are_found(self, recorded: Path) -> None:
        """Missing, failed, differently pinned and left-over records, and a table that does not follow from them."""
        recorded.mkdir()
        assert len(tables.stale(MATRIX)) == 3
        for version in MATRIX.versions:
            tables.record(version, result_of(version))
        (recorded / "README.md").write_text(tables.markdown(MATRIX, tables.load_results(MATRIX)), encoding="utf-8")
        assert tables.stale(MATRIX) == []

        (recorded / "1.0.0.json").write_text("{}", encoding="utf-8")
        repinned = Matrix(**{**vars(MATRIX), "pins": ("numpy<4",)})
        assert [line.partition(" ")[0] for line in tables.stale(MATRIX)] == ["1.0.0.json"]
        assert len(tables.stale(repinned)) == 3
        tables.record(NEW, result_of(NEW, worst=4e-7))
        assert any("README.md is not what" in line for line in tables.stale(MATRIX))
        tables.record(NEW, {**result_of(NEW), "cells": tables.parse_report(REPORT)})
        assert any("no recorded result for qwen3/eager." in line for line in tables.stale(MATRIX))


class TestRun:
    """The command line, with the tests of each version replaced by a ready result."""

    @pytest.fixture
    def answers(self, recorded: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
        """What goes wrong per version; nothing to begin with."""
        wrong: dict[str, list[str]] = {}

        def answer(matrix: Matrix, version: Version, *rest: Any) -> tuple[dict[str, Any], list[str]]:
            return result_of(version, matrix), wrong.get(version.transformers, [])

        monkeypatch.setattr(run, "load_matrix", lambda path: MATRIX)
        monkeypatch.setattr(run, "run_derived_tests", answer)
        monkeypatch.setattr(Environment, "build", lambda self, rebuild: None)
        return wrong

    def test_all_versions_are_recorded(
        self, answers: dict[str, list[str]], recorded: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """A plain run records every version, writes the table, prints it, and --check is content."""
        assert run.main(["--jobs", "2"]) == 0
        assert "5.0.0         qwen3       exact, 3e-07" in capsys.readouterr().out
        assert json.loads((recorded / "4.0.0.json").read_text(encoding="utf-8"))["transformers"] == "4.0.0"
        assert run.main(["--check"]) == 0
        (recorded / "README.md").write_text("edited", encoding="utf-8")
        assert run.main(["--check"]) == 1
        assert run.main(["--table"]) == 0
        assert run.main(["--check"]) == 0

    def test_ci_runs_its_versions_and_records_nothing(
        self, answers: dict[str, list[str]], recorded: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """CI leaves the working tree as it found it."""
        assert run.main(["--ci"]) == 0
        out = capsys.readouterr().out
        assert "5.0.0: passed" in out
        assert "4.0.0" not in out
        assert not recorded.exists()

    def test_any_failure_is_the_exit_status(
        self, answers: dict[str, list[str]], capsys: pytest.CaptureFixture[str]
    ) -> None:
        """One failing version fails the run and is named; an unknown version runs nothing."""
        answers["5.0.0"] = ["llama/sdpa audit: leak"]
        assert run.main(["--only", "4.0.0"]) == 0
        assert run.main([]) == 1
        assert "FAILED transformers 5.0.0: llama/sdpa audit: leak" in capsys.readouterr().out
        assert run.main(["--only", "9.9.9"]) == 2

    def test_list(self, answers: dict[str, list[str]], capsys: pytest.CaptureFixture[str]) -> None:
        """The listing shows versions, and what is made and recorded."""
        assert run.main(["--list"]) == 0
        assert "4.0.0         2 cells  no   not made     no" in capsys.readouterr().out

    def test_environ_selects_what_the_matrix_lists(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The derived tests get their selection, and nothing that would change what they import."""
        monkeypatch.setenv("PYTHONPATH", "elsewhere")
        environ = run.derived_environ(MATRIX, OLD)
        assert environ[run.CELLS_VARIABLE] == "llama/eager,llama/sdpa"
        assert environ[run.ABSENT_VARIABLE] == "qwen3"
        assert environ["OMP_NUM_THREADS"] == "1"
        assert "PYTHONPATH" not in environ
