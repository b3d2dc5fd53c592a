"""The command line: what it imports, its exit statuses and messages, and the audit subcommand."""

import json
import os
import re
import shlex
import subprocess
import sys

import pytest
import torch
import transformers

import autopack
from autopack import __version__
from autopack.attention.choose import availability
from autopack.cli import COMMANDS, main
from autopack.options import CHOICES
from autopack.version import MINIMUM, mismatch, problem
from tests.conftest import LENGTHS, llama, positions, token_ids
from tests.support.processes import ROOT, python


@pytest.mark.parametrize("arguments", [["--help"], *([name, "--help"] for name in COMMANDS)])
def test_help_imports_neither_torch_nor_transformers(arguments):
    program = (
        "import sys; from autopack.cli import main\n"
        f"try: main({arguments!r})\n"
        "except SystemExit as end: assert end.code == 0, end.code\n"
        "heavy = {'torch', 'transformers', 'tokenizers', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    assert python("-c", program).stdout.startswith("usage: autopack")


def test_module_runs():
    assert python("-m", "autopack", "--version").stdout.strip() == f"autopack {__version__}"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("audit qwen33", "did you mean qwen3"),
        ("audit nothing-like-it", "nor a model type of transformers"),
        ("audit gpt-oss", "did you mean gpt_oss"),
        ("audit llama --task masked-lm", "nor a model type (masked-lm) of transformers"),
        ("audit llama --device nonsense", "--device nonsense: torch"),
        ("audit llama --device meta", "pass --device cpu"),
        ("audit /no/such/directory", "'/no/such/directory' is neither a directory"),
        ("audit llama --attn no_such_attention", "no_such_attention"),
        (
            "audit llama --stock --backend sdpa",
            "--backend: not allowed with argument --stock",
        ),
        (
            "audit llama --plot /no/such/directory/report.png",
            "there is no directory /no/such/directory",
        ),
        ("bench llamma", "did you mean llama"),
        ("bench no/such-model", "nothing is downloaded here"),
        ("bench --lengths /no/such/file.npy", "/no/such/file.npy: no such file"),
        ("bench --plot a.xyz", "wanted a file name that ends with"),
        ("bench llama --attn no_such_attention", "no_such_attention"),
        ("bench no/such-model --size 7M", "--size is for models that are built"),
        (f"audit {ROOT} --task seq2seq", "--task says what a type is built for"),
        # A refusal of `enable` itself: UnsupportedModel.
        (
            "audit llama --attn sdpa --backend flash",
            "backend='flash' cannot serve LlamaForCausalLM",
        ),
        (f"audit {ROOT}", f"cannot load {ROOT}"),
        ("audit llama --html .", "--html .: wanted a file, found a directory"),
        ("bench llama --device cuda:99", "--device cuda:99: torch"),
        (
            "estimate lengths.npy --html /no/such/directory/a.html",
            "there is no directory",
        ),
        ("estimate ''", "an empty path: no such file or folder"),
        # What the parser refuses.
        (
            "estimate lengths.npy --max-length 1099511627776",
            "max_length=1099511627776: wanted at most",
        ),
        (
            "bench llama --max-length 1099511627776",
            "max_length=1099511627776: wanted at most",
        ),
        (
            "estimate lengths.npy --hidden-size 0",
            "hidden_size=0: wanted an int of at least 1",
        ),
        ("audit llama --stokc", "unrecognized arguments: --stokc"),
        ("run --unpda x.py", "unrecognized arguments: --unpda"),
        ("no-such-command", "invalid choice"),
        ("demo --steps 0", "steps=0: wanted an int of at least 1"),
        ("bench --batch-size 0", "batch_size=0: wanted an int of at least 1"),
        ("audit", "the following arguments are required: MODEL"),
    ],
)
def test_requests_that_cannot_be_carried_out_exit_with_2(arguments, said, capsys):
    try:
        status = main(shlex.split(arguments))
    except SystemExit as end:
        status = end.code
    printed = capsys.readouterr()
    assert (status, printed.out) == (2, "")
    assert printed.err.removeprefix("usage: ").startswith("autopack")
    assert said in printed.err
    assert "Traceback" not in printed.err


def test_no_command_prints_the_help_which_names_every_subcommand(capsys):
    assert main([]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in COMMANDS)


@pytest.mark.parametrize("arguments", ["families", "--help", "audit --help", "families --json"])
def test_a_reader_that_has_gone_is_no_error(arguments):
    program = f"import sys; from autopack.cli import main; sys.exit(main({arguments.split()!r}))"
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # argparse hides what an unbuffered stream raises
        env={**os.environ, "PYTHONUNBUFFERED": ""},
    )
    process.stdout.close()
    _, said = process.communicate(timeout=600)
    assert (process.returncode, said) == (141, b"")


@pytest.mark.parametrize(
    ("model_type", "class_name"),
    [
        ("bert", "BertForMaskedLM"),
        ("bart", "BartForConditionalGeneration"),
        ("gpt2", "GPT2LMHeadModel"),
    ],
)
def test_audit_builds_what_a_type_is_and_warns_of_nothing(model_type, class_name, capsys, caplog):
    assert main(["audit", model_type, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["model"].startswith(class_name)
    assert not [record for record in caplog.records if record.name.startswith("autopack")]


def test_a_call_of_the_user_warns_after_an_audit(caplog):
    model, ids = llama(), token_ids()
    with autopack.enable(model, verify=False):
        autopack.audit(model)
        assert "keeps the documents" not in caplog.text
        model(input_ids=ids, attention_mask=torch.ones_like(ids), position_ids=positions(LENGTHS))
        assert "keeps the documents" in caplog.text


def test_audit_passes_its_options_on(capsys):
    asked = "audit llama --attn eager --backend eager --dtype float64 --json"
    assert main(asked.split()) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["implementation"], data["dtype"], data["enabled"], data["exact"]) == (
        "eager",
        "float64",
        True,
        True,
    )
    assert data["worst"] <= data["tolerance"]
    assert all(result["exact"] for result in data["results"])


# The doctor, on this installation as it is and on installations with something broken put in front
# of it.


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
