"""The command line: what it imports, its exit statuses and messages, and the audit subcommand."""

import json
import os
import shlex
import subprocess
import sys

import pytest
import torch

import autopack
from autopack import __version__
from autopack.cli import COMMANDS, main
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
        ("audit gpt-oss", "did you mean gpt_oss?"),
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
