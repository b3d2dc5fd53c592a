"""The runner itself: the matrix is sound, pins decide the environment, a run goes on, results say what happened."""

import json
import re
import sys
from dataclasses import replace

import pytest
from packaging.requirements import Requirement

from compat import environments, finished, newest, run, sample, scenarios, tables, workers
from compat.environments import Environment
from compat.finished import Finished
from compat.matrix import ROOT, CompatError, Release, load_matrix, number, tomllib
from compat.workers import Unit
from tests.support.matrix import ABOUT, MATRIX, MODES, NEW, OLD, cell, result_of

WORKER = """
import json, os, sys, time
print(json.dumps({**%s, "types": {"causal-lm": ["gpt2", "llama", "mamba", "t5"]}}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    for mode in asked["modes"]:
        name = {"task": asked["task"], "type": asked["type"], "mode": mode}
        cell = {**name, "status": "exact", "worst": 2e-6, "proof": "twin"}
        if (asked["type"], mode) == ("mamba", "eager"):
            os._exit(3)
        if (asked["type"], mode) == ("t5", "eager"):
            time.sleep(60)
        if (asked["type"], mode) == ("gpt2", "sdpa"):
            cell = {**name, "status": "refused", "reason": "for a reason"}
        print(json.dumps(cell), flush=True)
"""
"""A worker that answers at once; mamba in eager mode kills it, and t5 takes too long."""


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """An environment whose workers are the script above."""
    plain = workers.Worker.__init__

    def start(self, environ, log, command=()):
        plain(self, environ, log, [sys.executable, "-c", WORKER % ABOUT])

    monkeypatch.setattr(workers.Worker, "__init__", start)
    found = Environment(MATRIX, NEW, tmp_path / "cache")
    found.path.mkdir(parents=True)
    return found


def of_new(*options):
    """The command, of one release."""
    return run.main(["--only", "5.0.0", *options])


# matrix.toml as it is, and what the parser refuses.

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_newest_release_is_in_ci():
    assert load_matrix().releases[-1].ci


def test_releases_lie_within_the_declared_dependencies():
    """What CI tests can be installed beside autopack, and the README pins the same torch."""
    bounds = {(found := Requirement(line)).name: found.specifier for line in PROJECT["dependencies"]}
    matrix = load_matrix()
    assert bounds["torch"].contains(matrix.torch)
    assert all(bounds["transformers"].contains(release.transformers) for release in matrix.releases if release.ci)
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
    """From 4.44 to 4.57 and from 5.0 on, every line."""
    lines = [number(release.minor) for release in load_matrix().releases]
    newest_line = max(lines)
    wanted = [(4, minor) for minor in range(44, 58)] + [(5, minor) for minor in range(newest_line[1] + 1)]
    assert lines == wanted


def test_selecting():
    """A release goes by its name or its line; a typing error does not run nothing."""
    assert MATRIX.select(["5.0.0"]) == MATRIX.select(["5.0"]) == [NEW]
    with pytest.raises(CompatError, match=r"9\.9\.9 .*lists 4\.9\.0, 5\.0\.0"):
        MATRIX.select(["5.0.0", "9.9.9"])


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('torch = "2.13.0"\n', "", "lacks torch"),
        (", ci = true", ", ci = 1", "ci has to be a bool, found 1"),
        (", ci = true", ", nightly = true", "unknown key 'nightly'"),
        ('modes = ["eager"', 'modes = ["fast"', "modes names fast"),
        ('python = ">=3.10,<3.13"', 'python = "~=3.10"', "Python bound '~=3.10'"),
        ('"4.45.2" =', '"4.44.1" =', "two releases of 4.44"),
        ('"4.44.2" =', '"4.99.2" =', "have to ascend"),
    ],
)
def test_mistakes_are_named(tmp_path, old, new, message):
    """Every mistake in the file is an error that says where it is."""
    text = (ROOT / "compat" / "matrix.toml").read_text()
    assert old in text
    path = tmp_path / "matrix.toml"
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(CompatError, match=message):
        load_matrix(path)


# Directories are keyed by their pins and complete or absent.


@pytest.fixture
def installs(monkeypatch):
    """Records what pip would install, and makes the metadata of it."""
    asked = []

    def install(self, target, requirements):
        asked.extend(requirements)
        for requirement in requirements:
            name, _, version = requirement.partition("==")
            about = target / f"{name.replace('-', '_')}-{version}.dist-info"
            about.mkdir(parents=True)
            needs = "Requires-Dist: autopack-needs>=3\n" if name == "transformers" else ""
            (about / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n{needs}")

    monkeypatch.setattr(Environment, "_install", install)
    return asked


def supported(version):
    return replace(MATRIX, support={"autopack-needs": version})


def test_what_is_missing_is_installed_too_and_once(tmp_path, installs):
    """The pins, and what they need and the interpreter lacks; a second build does nothing, another pin does all."""
    environment = Environment(supported("3.1"), NEW, tmp_path)
    environment.build()
    assert installs == [*NEW.pins, "autopack-needs==3.1"]
    assert environment.ready
    assert (tmp_path / ".gitignore").read_text() == "*\n"
    Environment(supported("3.1"), NEW, tmp_path).build()
    assert len(installs) == 4
    again = Environment(supported("3.2"), NEW, tmp_path)
    again.build()
    assert len(installs) == 8
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == [again.path]


def test_what_nothing_pins_is_an_error_and_leaves_nothing(tmp_path, installs):
    """An interrupted build is not taken for ready."""
    environment = Environment(MATRIX, NEW, tmp_path)
    with pytest.raises(CompatError, match=r"needs autopack-needs, .* Pin it in \[support\]"):
        environment.build()
    assert not environment.ready
    assert not any(path.is_dir() for path in tmp_path.iterdir())


def test_python_and_torch_out_of_range_are_refused(tmp_path, installs):
    unfit = Release("4.0.0", "0.1", "0.3", ">=2.7,<3.3")
    with pytest.raises(CompatError, match=r"is listed for Python >=2\.7,<3\.3"):
        Environment(MATRIX, unfit, tmp_path).build()
    with pytest.raises(CompatError, match=r"pip install torch==0\.1"):
        environments.check_interpreter(replace(MATRIX, torch="0.1"))
    assert installs == []


def test_environ(tmp_path, monkeypatch):
    """The release comes first, and nothing of the caller's shadows it; $AUTOPACK_COMPAT_CACHE moves the cache."""
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    environment = Environment(MATRIX, NEW, tmp_path)
    assert environment.environ()["PYTHONPATH"].split(":") == [str(environment.path), str(ROOT)]
    monkeypatch.setenv("AUTOPACK_COMPAT_CACHE", str(tmp_path))
    assert environments.cache_directory() == tmp_path.resolve()


# Processes that measure, and what becomes of a run when they do not.


@pytest.mark.exhaustive
def test_a_worker_that_dies_or_hangs_is_a_crash_and_the_run_goes_on(environment):
    units = [Unit("causal-lm", name, MODES) for name in ("gpt2", "mamba", "t5")]
    found = [(c["type"], c["mode"], c["status"], c.get("reason")) for c in workers.measure(environment, units, 2)]
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


def test_types_are_asked_for_once(environment, monkeypatch):
    about = workers.introduction(environment)
    assert about["types"]["causal-lm"][0] == "gpt2"
    monkeypatch.setattr(workers, "Worker", lambda *args: pytest.fail("a worker was started"))
    assert workers.introduction(environment) == about


def test_finished_cells(tmp_path):
    """The last line of a cell counts, of this code alone unless asked; a line cut short is no cell."""
    old, new = Finished(tmp_path, "5.0.0", "before"), Finished(tmp_path, "5.0.0", "now")
    old.add([cell("llama", "eager"), cell("gpt2", "eager")])
    new.add([cell("llama", "eager", "refused", reason="why")])
    with new.path.open("a") as file:
        file.write('{"task": "causal')
    new.add([cell("llama", "sdpa")])
    assert {key[1:]: found["status"] for key, found in new.load().items()} == {
        ("llama", "eager"): "refused",
        ("llama", "sdpa"): "exact",
    }
    assert len(new.load(of_older_code=True)) == 3


def test_the_digest_follows_the_code(monkeypatch):
    before = finished.code_digest()
    assert before == finished.code_digest()
    monkeypatch.setattr(finished, "_MEASURING", ("cells.py",))
    assert finished.code_digest() != before


# The command line, with environments and workers that need no network.


@pytest.fixture
def offline(environment, recorded, monkeypatch):
    """What the workers are asked for; the release is one of three quick types."""
    asked = []
    ask = workers.Worker.ask

    def note(self, unit):
        asked.append(unit)
        ask(self, unit)

    quick = {**ABOUT, "types": {"causal-lm": ["gpt2", "llama"]}}
    monkeypatch.setattr(workers.Worker, "ask", note)
    monkeypatch.setattr(workers, "introduction", lambda environment: quick)
    monkeypatch.setattr(run, "load_matrix", lambda path: MATRIX)
    monkeypatch.setattr(run, "cache_directory", lambda: environment.cache)
    monkeypatch.setattr(run, "check_interpreter", lambda matrix: None)
    monkeypatch.setattr(Environment, "build", lambda self, rebuild=False: None)
    passed = {"passed": 5, "skipped": {}, "failed": {}}
    monkeypatch.setattr(scenarios, "run", lambda *args: passed)
    return asked


def test_a_whole_run_is_recorded_and_goes_on(offline, recorded, capsys):
    """All cells and scenarios; what is finished is not measured again."""
    assert of_new("--jobs", "2") == 0
    assert "5.0.0         3 / 1 / 0 / 0" in capsys.readouterr().out
    result = json.loads((recorded / "releases" / "5.0.0.json").read_text())
    assert result["cells"]["causal-lm"]["llama"] == ["exact", "exact"]
    assert result["scenarios"]["passed"] == 5
    assert len(offline) == 2
    assert of_new() == 0
    assert len(offline) == 2
    assert of_new("--fresh") == 0
    assert len(offline) == 4
    assert run.main(["--check"]) == 0
    assert "Not recorded yet (1 of 2): 4.9.0" in capsys.readouterr().out


def test_a_stopped_run_goes_on_with_what_is_left(offline, environment):
    Finished(environment.cache, "5.0.0", finished.code_digest()).add([cell("gpt2", "eager"), cell("gpt2", "sdpa")])
    Finished(environment.cache, "5.0.0", "other code").add([cell("llama", "eager")])
    assert of_new() == 0
    assert offline == [Unit("causal-lm", "llama", MODES)]
    assert of_new("--keep", "--types", "llama") == 0
    assert len(offline) == 1


def test_a_leak_fails_the_command_and_is_named(offline, environment, capsys):
    digest = finished.code_digest()
    Finished(environment.cache, "5.0.0", digest).add([cell("llama", "sdpa", "LEAK", reason="off by 2")])
    assert of_new() == 1
    assert "FAILED transformers 5.0.0: LEAK: llama/causal-lm/sdpa: off by 2" in capsys.readouterr().out
    assert run.main(["--check"]) == 1
    assert run.main(["--only", "9.9.9"]) == 2


def test_some_cells_are_printed_and_ci_records_nothing(offline, recorded, capsys):
    assert of_new("--types", "gpt2") == 0
    assert re.search(r"5\.0\.0 +causal-lm +gpt2 +exact +refused", capsys.readouterr().out)
    assert run.main(["--ci"]) == 0
    assert list((recorded / "releases").iterdir()) == []
    assert of_new("--types", "llama", "--record") == 0
    assert [path.name for path in (recorded / "releases").iterdir()] == ["5.0.0.json"]


def test_a_sample_finds_a_falsified_record(offline, recorded, capsys):
    """A record that says what is measured passes whatever is drawn; one wrong status, proof or remark is found."""
    assert of_new() == 0
    asked = len(offline)
    assert of_new("--sample", "9", "--seed", "a") == 0
    assert len(offline) > asked, "finished cells were not measured anew"
    assert "4 cells of 1 releases, seed a" in capsys.readouterr().out
    path = recorded / "releases" / "5.0.0.json"
    true = path.read_text()
    for old, new, said in (
        ('"llama": ["exact", ', '"llama": ["exact:audit", ', "is recorded as exact (checks), and is exact (twin)"),
        ('"gpt2": ["exact", "refused ', '"gpt2": ["exact", "exact labels=', "refused [for a reason]"),
        (
            '"llama": ["exact", ',
            '"llama": ["upstream error", ',
            "is recorded as upstream error, and is exact (twin)",
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


def test_samples_differ_and_can_be_drawn_again(recorded, monkeypatch):
    """Each release has its share; absent cells are not drawn; what has no proofs recorded is an error."""
    found = [cell(f"t{n}", mode, proof="twin") for n in range(50) for mode in MODES]
    for release in (OLD, NEW):
        tables.record(release, result_of(release, *found, cell("none", "eager", "absent")))
    drawn = [sample.draw(MATRIX, [OLD, NEW], 9, seed) for seed in ("a", "a", "b")]
    assert drawn[0] == drawn[1] != drawn[2]
    assert [(release, len(cells)) for release, cells in drawn[0]] == [(OLD, 5), (NEW, 4)]
    everything = dict(sample.draw(MATRIX, [NEW], 1000, "a"))[NEW]
    assert len(everything) == 100
    assert all(each["status"] == "exact" for each in everything)
    tables.path_of(OLD).unlink()
    with pytest.raises(CompatError, match=r"4\.9\.0 has no record of cells by the default call"):
        sample.draw(MATRIX, [OLD, NEW], 9, "a")
    monkeypatch.setenv("GITHUB_RUN_ID", "77")
    assert sample.new_seed() == "77"


def test_newest_says_what_has_changed(offline, recorded, monkeypatch, capsys):
    """New types in all modes, the others with their control; what was exact and is no more is a failure."""
    tables.record(OLD, result_of(OLD, cell("llama", "eager"), cell("t5", "eager")))
    monkeypatch.setattr(newest, "find", lambda name, pre: NEW)
    monkeypatch.setattr(newest, "cache_directory", run.cache_directory)
    monkeypatch.setattr(newest, "_doctor", lambda environment: [])
    monkeypatch.setattr(newest, "_mended", lambda *args: [])
    assert run.main(["--newest", "--release", "5.0.0"]) == 0
    assert [unit.modes for unit in offline] == [("eager", "sdpa"), ("eager", "control")]
    out = capsys.readouterr().out
    assert "New model types: 1\n  exact\n    gpt2/causal-lm/eager\n  refused: for a reason\n" in out
    assert "Model types that are gone\n  t5 (causal-lm)" in out
    assert "Exact in 4.9.0 and no more: none" in out
