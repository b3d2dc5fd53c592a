"""The runner itself: the matrix is sound, pins decide the environment, a run goes on, results say
what happened."""

import json
import re
import sys
from dataclasses import replace

import pytest
from packaging.requirements import Requirement

from compat import environments, run, sample, scenarios, study, tables, torches, workers
from compat.environments import Environment
from compat.matrix import ROOT, CompatError, Release, load_matrix, number, tomllib
from compat.workers import Unit
from tests.support.matrix import ABOUT, MATRIX, MODES, NEW, OLD, cell, result_of

WORKER = """
import json, os, sys, time
print(json.dumps({**%s, "types": {"causal-lm": ["gpt2", "llama"]}}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    for mode in asked["modes"]:
        name = {"task": asked["task"], "type": asked["type"], "mode": mode}
        cell = {**name, "status": "exact", "worst": 2e-6}
        if (asked["type"], mode) == ("mamba", "eager"):
            os._exit(3)
        if (asked["type"], mode) == ("t5", "eager"):
            time.sleep(60)
        if (asked["type"], mode) == ("gpt2", "sdpa"):
            cell = {**name, "status": "refused", "reason": "for a reason"}
        print(json.dumps(cell), flush=True)
"""
"""A worker that answers at once; mamba in eager mode kills it, and t5 takes too long."""


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    """$AUTOPACK_COMPAT_CACHE moves the cache."""
    path = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("AUTOPACK_COMPAT_CACHE", str(path))
    return path


@pytest.fixture
def environment(monkeypatch):
    """An environment whose workers are the script above."""
    plain = workers.Worker.__init__

    def start(self, environ, log, command=()):
        plain(self, environ, log, [sys.executable, "-c", WORKER % ABOUT])

    monkeypatch.setattr(workers.Worker, "__init__", start)
    return Environment(MATRIX, NEW)


def of_new(*options):
    """The command, of one release."""
    return run.main(["--only", "5.0.0", *options])


# matrix.toml as it is.

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_newest_release_is_in_ci():
    assert load_matrix().releases[-1].ci


def test_releases_lie_within_the_declared_dependencies():
    """What CI tests can be installed beside autopack, and the README pins the same torch."""
    bounds = {
        (found := Requirement(line)).name: found.specifier for line in PROJECT["dependencies"]
    }
    matrix = load_matrix()
    assert bounds["torch"].contains(matrix.torch)
    assert all(
        bounds["transformers"].contains(release.transformers)
        for release in matrix.releases
        if release.ci
    )
    readme = (ROOT / "README.md").read_text()
    assert set(re.findall(r"torch==([\d.]+)", readme)) == {matrix.torch}


def test_the_tests_are_installed_with_a_listed_release():
    """A release that comes out must not change what a newcomer's first run of the tests says."""
    lines = PROJECT["optional-dependencies"]["test"]
    wanted = next(found for line in lines if (found := Requirement(line)).name == "transformers")
    (end,) = [each.version for each in wanted.specifier if each.operator == "<"]
    before = [each for each in load_matrix().releases if number(each.transformers) < number(end)]
    assert number(before[-1].minor)[:2] == (number(end)[0], number(end)[1] - 1)


def test_no_minor_release_is_left_out():
    """From 4.44 to 4.57 and from 5.0 on, every line once, in their order."""
    lines = [number(release.minor) for release in load_matrix().releases]
    newest = max(lines)
    assert lines == [(4, minor) for minor in range(44, 58)] + [
        (5, minor) for minor in range(newest[1] + 1)
    ]


def test_selecting():
    """A release goes by its name or its line; a typing error does not run nothing."""
    assert MATRIX.select(["5.0.0"]) == MATRIX.select(["5.0"]) == [NEW]
    with pytest.raises(CompatError, match=r"9\.9\.9 .*lists 4\.9\.0, 5\.0\.0"):
        MATRIX.select(["5.0.0", "9.9.9"])


# Directories are keyed by their pins and complete or absent.


def test_pins_and_what_an_older_hub_needs_are_installed_once(cache, monkeypatch):
    """A second build does nothing, another pin does all; the release comes first, the caller's path
    is left out."""
    asked = []

    def install(python, *arguments, environ=None):
        asked.append(arguments[3:])
        environments.Path(arguments[2]).mkdir()

    monkeypatch.setattr(environments, "pip", install)
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    for version, times in (("3.1", 1), ("3.1", 1), ("3.2", 2)):
        environment = Environment(replace(MATRIX, support={"needed": version}), NEW)
        environment.build()
        assert asked[-1] == (*NEW.pins, f"needed=={version}")
        assert len(asked) == times
    assert [path for path in cache.iterdir() if path.is_dir()] == [environment.path]
    assert (cache / ".gitignore").read_text() == "*\n"
    assert environment.environ()["PYTHONPATH"].split(":") == [str(environment.path), str(ROOT)]


def test_what_cannot_be_installed_is_an_error_and_leaves_nothing(cache):
    """An interrupted build is not taken for ready."""
    with pytest.raises(CompatError, match="no-such-file"):
        environments.directory_of("wrong", ["--no-index", "./no-such-file.whl"])
    assert not any(path.is_dir() for path in cache.iterdir())


def test_python_and_torch_out_of_range_are_refused():
    unfit = Release("4.0.0", "0.1", "0.3", ">=2.7,<3.3")
    with pytest.raises(CompatError, match=r"is listed for Python >=2\.7,<3\.3"):
        Environment(MATRIX, unfit).build()
    with pytest.raises(CompatError, match=r"pip install torch==0\.1"):
        environments.check_interpreter(replace(MATRIX, torch="0.1"))


# Processes that measure, and what becomes of a run when they do not.


@pytest.mark.exhaustive
def test_a_worker_that_dies_or_hangs_is_a_crash_and_the_run_goes_on(environment):
    units = [Unit("causal-lm", name, MODES) for name in ("gpt2", "mamba", "t5")]
    found = [
        (c["type"], c["mode"], c["status"], c.get("reason"))
        for c in workers.measure(environment, units, 2)
    ]
    assert found == [
        ("gpt2", "eager", "exact", None),
        ("gpt2", "sdpa", "refused", "for a reason"),
        ("mamba", "eager", "crash", "the worker ended with status 3"),
        ("mamba", "sdpa", "exact", None),
        ("t5", "eager", "crash", "the worker took longer than 2 s"),
        ("t5", "sdpa", "exact", None),
    ]


def test_a_worker_that_does_not_start_shows_its_log(tmp_path):
    log = tmp_path / "log"
    with pytest.raises(CompatError, match=r"it ended with status 1[\s\S]*no such module"):
        workers.Worker({}, log, [sys.executable, "-c", "raise SystemExit('no such module')"])


# The command line, with environments and workers that need no network.


@pytest.fixture
def offline(environment, recorded, monkeypatch):
    """What the workers are asked for; the release is one of two quick types."""
    asked = []
    ask = workers.Worker.ask

    def note(self, unit):
        asked.append(unit)
        ask(self, unit)

    monkeypatch.setattr(workers.Worker, "ask", note)
    monkeypatch.setattr(run, "load_matrix", lambda: MATRIX)
    monkeypatch.setattr(run, "check_interpreter", lambda matrix: None)
    monkeypatch.setattr(torches, "STUDY", study.Study("none", "", dict, lambda *_: ()))
    monkeypatch.setattr(Environment, "build", lambda self: None)
    passed = {"passed": 5, "skipped": {}, "failed": {}}
    monkeypatch.setattr(scenarios, "run", lambda *args: passed)
    return asked


def test_a_whole_run_is_recorded_and_goes_on(offline, recorded, capsys):
    """All cells and scenarios."""
    assert of_new("--jobs", "2") == 0
    assert "| 5.0.0 | 3 / 1 / 0 / 0 |" in capsys.readouterr().out
    result = json.loads((recorded / "releases" / "5.0.0.json").read_text())
    assert result["cells"]["causal-lm"]["llama"] == ["exact", "exact"]
    assert result["scenarios"]["passed"] == 5
    assert len(offline) == 2
    assert run.main(["--check"]) == 0
    assert "Not recorded yet (1 of 2): 4.9.0" in capsys.readouterr().out


def test_a_leak_fails_the_command_and_is_named(offline, monkeypatch, capsys):
    leak = result_of(NEW, cell("llama", "sdpa", "LEAK", reason="off by 2"))
    monkeypatch.setattr(run, "measure_all", lambda *_: leak)
    assert of_new() == 1
    assert (
        "FAILED transformers 5.0.0: LEAK: llama/causal-lm/sdpa: off by 2" in capsys.readouterr().out
    )
    assert run.main(["--check"]) == 1
    assert run.main(["--only", "9.9.9"]) == 2


def test_some_cells_are_printed_and_ci_records_nothing(offline, recorded, capsys):
    assert of_new("--types", "gpt2") == 0
    assert re.search(r"5\.0\.0 +causal-lm +gpt2 +exact, refused", capsys.readouterr().out)
    assert run.main(["--ci"]) == 0
    assert list((recorded / "releases").iterdir()) == []
    assert of_new("--types", "llama", "--record") == 0
    assert [path.name for path in (recorded / "releases").iterdir()] == ["5.0.0.json"]


def test_a_sample_finds_a_falsified_record(offline, recorded, capsys):
    """A record that says what is measured passes whatever is drawn; one wrong status or
    remark is found."""
    assert of_new() == 0
    asked = len(offline)
    assert of_new("--sample", "9", "--seed", "a") == 0
    assert len(offline) > asked, "recorded cells were not measured anew"
    assert "4 cells of 1 releases, seed a" in capsys.readouterr().out
    path = recorded / "releases" / "5.0.0.json"
    true = path.read_text()
    for old, new, said in (
        (
            '"gpt2": ["exact", "refused ',
            '"gpt2": ["exact", "exact labels=',
            "refused [for a reason]",
        ),
        (
            '"llama": ["exact", ',
            '"llama": ["upstream error", ',
            "is recorded as upstream error, and is exact",
        ),
    ):
        assert old in true
        path.write_text(true.replace(old, new))
        assert of_new("--sample", "4") == 1
        out = capsys.readouterr().out
        assert "1 differ from the record" in out
        assert said in out
    path.write_text(true)
    assert run.main(["--sample", "4"]) == 0, "without --only it is the releases of CI"


def test_samples_differ_and_can_be_drawn_again(recorded):
    """Each release has its share; absent cells are not drawn; what is not recorded is an error."""
    found = [cell(f"t{n}", mode) for n in range(50) for mode in MODES]
    places = [Environment(MATRIX, release) for release in (OLD, NEW)]
    for release in (OLD, NEW):
        tables.record(release, result_of(release, *found, cell("none", "eager", "absent")))
    drawn = [sample.draw(places, 9, seed) for seed in ("a", "a", "b")]
    assert drawn[0] == drawn[1] != drawn[2]
    assert [(place, len(cells)) for place, cells in drawn[0]] == [(places[0], 5), (places[1], 4)]
    ((_, everything),) = sample.draw(places[1:], 1000, "a")
    assert len(everything) == 100
    assert all(each["status"] == "exact" for each in everything)
    tables.path_of(OLD).unlink()
    with pytest.raises(CompatError, match=r"4\.9\.0 has no record of cells by the default call"):
        sample.draw(places, 9, "a")
