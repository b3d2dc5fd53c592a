"""Importing autopack is free: it imports neither torch nor transformers, and changes nothing."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import autopack
from autopack import errors


def _run(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_import_loads_neither_torch_nor_transformers():
    _run(
        "import sys, autopack; dir(autopack); autopack.__version__\n"
        "heavy = {'torch', 'transformers', 'numpy', 'wrapt'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )


def test_errors_can_be_caught_without_loading_torch():
    _run("import sys; from autopack import AutopackError, InvalidPacking; assert 'torch' not in sys.modules")


@pytest.mark.parametrize("name", autopack.__all__)
def test_every_public_name_resolves(name):
    assert getattr(autopack, name) is not None
    assert name in dir(autopack)


def test_the_names_for_type_checkers_are_the_public_names():
    declared = {n for n in autopack.__all__ if n != "__version__"}
    assert declared == set(autopack._PUBLIC)


def test_errors_share_one_base_class():
    for name in errors.__all__:
        assert issubclass(getattr(errors, name), autopack.AutopackError)


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'autopack' has no attribute 'enabel'"):
        autopack.enabel  # noqa: B018
    with pytest.raises(ImportError):
        importlib.import_module("autopack.enabel")


def test_importing_every_module_patches_nothing():
    _run(
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
        "assert all(same(dict(vars(c)), b) for c, b in zip(classes, before[1]))"
    )
