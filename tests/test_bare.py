"""Nothing but what autopack requires is installed: no accelerate, datasets, PEFT, TRL, matplotlib
or flash-attn."""

import os
from functools import partial

import pytest

from tests.support.processes import ROOT, python

HIDDEN = (
    "accelerate datasets flash_attn hypothesis kernels lightning matplotlib pandas peft pyarrow "
    "ray scipy sentence_transformers sklearn torchdata trl"
).split()

_SITECUSTOMIZE = f"""
import sys
from importlib.machinery import PathFinder

HIDDEN = {set(HIDDEN)!r}

class Bare(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in HIDDEN else PathFinder.find_spec(name, path, target)

    @staticmethod
    def find_distributions(*args, **kwargs):
        found = PathFinder.find_distributions(*args, **kwargs)
        return (one for one in found if (one.metadata["Name"] or "").lower().replace("-", "_") not in HIDDEN)

sys.meta_path[sys.meta_path.index(PathFinder)] = Bare
"""


@pytest.fixture
def bare(tmp_path):
    """Runs Python with arguments, and finds none of these packages, nor that they are installed."""
    (tmp_path / "sitecustomize.py").write_text(_SITECUSTOMIZE)
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    return partial(python, folder=tmp_path, PYTHONPATH=path, OMP_NUM_THREADS="1")


def test_the_packages_are_hidden_and_those_that_autopack_needs_are_not(bare):
    asked = (
        "import importlib.metadata as metadata, importlib.util as util\n"
        f"for name in {HIDDEN!r}:\n"
        "    assert util.find_spec(name) is None, name\n"
        "    try: metadata.version(name)\n"
        "    except metadata.PackageNotFoundError: continue\n"
        "    raise AssertionError(name)\n"
        "assert metadata.version('torch') and util.find_spec('transformers')"
    )
    bare("-c", asked)


def test_a_model_is_enabled_audited_and_called(bare):
    script = (
        "import torch, autopack\n"
        "from autopack import tiny\n"
        "from transformers.utils import is_accelerate_available\n"
        "assert not is_accelerate_available()\n"
        "model = tiny.build('llama', attn_implementation='sdpa')\n"
        "assert not autopack.audit(model, modes=('default',)).exact, 'negative control'\n"
        "handle = autopack.enable(model)\n"
        "assert autopack.audit(model).exact\n"
        "documents = [{'input_ids': tiny.tokens(None, 1, n)[0].tolist()} for n in (5, 9, 3)]\n"
        "batch = autopack.PackingCollator.for_model(model)(documents)\n"
        "model(**batch).loss.backward()\n"
        "mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])\n"
        "ids = tiny.tokens(None, 2, 4)\n"
        "model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, "
        "-100)).loss.backward()\n"
        "assert handle.tally.batches == 1, str(handle.tally)\n"
        "try: autopack.pack(documents, 16)\n"
        "except ImportError as error: assert 'autopack[data]' in str(error)\n"
        "assert list(autopack.PackedBatchSampler([5, 9, 3], max_length=16))\n"
        "handle.remove()\n"
    )
    bare("-c", script)


@pytest.mark.parametrize(
    "arguments", ["demo --help", "demo --steps 1", "audit gpt2", "families", "run --help"]
)
def test_commands_work(bare, arguments):
    assert bare("-m", "autopack", *arguments.split()).stdout


def test_the_doctor_finds_nothing_broken(bare):
    printed = bare("-m", "autopack", "doctor").stdout
    assert "matplotlib    not installed" in printed
    assert printed.rstrip().endswith("Nothing is broken.")


def test_a_picture_wants_matplotlib_and_says_so_before_anything_is_trained(bare):
    finished = bare("-m", "autopack", "estimate", "no.npy", "--plot", "result.png", status=2)
    assert "pip install 'autopack[plot]'" in finished.stderr
    assert "Traceback" not in finished.stderr
    assert "collecting" not in finished.stderr
