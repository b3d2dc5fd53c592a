"""Importing autopack is free: it imports neither torch nor transformers, and changes nothing."""

import importlib

import pytest

import autopack
from autopack import errors
from tests.support.processes import python

SHARDS = """
import datasets, tempfile
datasets.disable_progress_bars()
data = datasets.Dataset.from_dict({'input_ids': [[1, 2], [3]]})
autopack.packing.pack_shards(data, 4, tempfile.mkdtemp())
"""


@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        ("dir(autopack); autopack.__version__", "torch transformers numpy wrapt"),
        ("from autopack import AutopackError, InvalidPacking", "torch"),
        ("autopack.packing.PackingCollator()([{'input_ids': [1]}], 'np')", "torch transformers"),
        pytest.param(SHARDS, "torch transformers ray", marks=pytest.mark.exhaustive),
        (
            "from autopack.cli import parser; parser()",
            "torch transformers tokenizers matplotlib datasets",
        ),
    ],
)
def test_only_what_is_needed_is_imported(code, heavy):
    python(
        "-c",
        f"import sys, autopack\n{code}\nheavy = {set(heavy.split())} & "
        "set(sys.modules)\nassert "
        "not heavy, heavy",
    )


def test_errors_share_one_base_class():
    for name in errors.__all__:
        assert issubclass(getattr(errors, name), autopack.AutopackError)
    assert issubclass(errors.UnsupportedVersion, ImportError)


def test_unknown_name_is_an_attribute_error():
    assert {*autopack.__all__} <= {*dir(autopack)}
    with pytest.raises(AttributeError, match="'autopack' has no attribute 'enabel'"):
        autopack.enabel  # noqa: B018
    with pytest.raises(ImportError):
        importlib.import_module("autopack.enabel")


def test_importing_every_module_patches_nothing():
    python(
        "-c",
        "import torch\n"
        "from torch import nn\n"
        "from tests.conftest import installed_functions, same\n"
        "from transformers import PreTrainedModel\n"
        "classes = [nn.Module, PreTrainedModel, torch.Tensor]\n"
        "before = installed_functions(), [dict(vars(c)) for c in classes]\n"
        "from importlib import import_module\n"
        "from autopack import _PUBLIC\n"
        "for module in _PUBLIC.values(): import_module(module)\n"
        "from autopack import registry; registry.families()\n"
        "assert same(installed_functions(), before[0])\n"
        "assert all(same(dict(vars(c)), b) for c, b in zip(classes, before[1]))",
    )
