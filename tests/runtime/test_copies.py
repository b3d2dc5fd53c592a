"""Copies of an enabled model by deepcopy, pickle and files: enabled by themselves; no autopack in
checkpoints."""

import copy
import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import autopack
from autopack.patching import SiteLease
from autopack.runtime.scope import BoundCheckpoint
from tests.conftest import (
    FLOAT64,
    LENGTHS,
    alone,
    error,
    gradient_error,
    gradients,
    installed_functions,
    llama,
    same,
)
from tests.runtime.test_copies_of_parts import every_copy
from tests.support.one_llama import IDS, WHERE, is_exact, leaks, logits
from tests.support.processes import python
from tests.support.refusals import refused


@pytest.fixture(scope="module")
def stock():
    return llama()


@every_copy
@pytest.mark.parametrize("disabled_first", ["original", "copy"])
def test_a_copy_is_enabled_on_its_own(stock, duplicate, disabled_first):
    model = llama()
    autopack.enable(model)
    logits(model)
    other = duplicate(model)
    assert autopack.is_enabled(other)
    assert is_exact(other, stock)
    one, rest = (model, other) if disabled_first == "original" else (other, model)
    autopack.disable(one)
    assert leaks(one, stock)
    assert is_exact(rest, stock)
    autopack.disable(rest)
    assert leaks(rest, stock)


def test_a_copy_checkpoints_on_its_own(stock):
    model = llama().train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    autopack.enable(model)
    logits(model)
    other = copy.deepcopy(model)
    loss = logits(other).square().sum()
    autopack.disable(model)
    assert not isinstance(model.model.layers[0]._gradient_checkpointing_func, BoundCheckpoint)
    loss.backward()
    alone(stock, IDS, LENGTHS).square().sum().backward()
    assert gradient_error(gradients(other), gradients(stock)) <= FLOAT64
    autopack.disable(other)


def test_a_copy_outlives_its_original(stock):
    model = llama()
    autopack.enable(model)
    other = copy.deepcopy(model)
    autopack.disable(model)
    del model
    with refused("past-the-entry"):
        other.forward(input_ids=IDS, position_ids=WHERE)
    assert is_exact(other, stock)
    assert autopack.enable(other).model is other
    autopack.disable(other)


def test_threads_that_make_the_first_call_of_a_copy_install_once(monkeypatch):
    model, before = llama(), installed_functions()
    autopack.enable(model)
    other = copy.deepcopy(model)
    autopack.disable(model)
    release = SiteLease.release

    def release_slowly(lease):
        release(lease)
        time.sleep(0.02)  # the others come before the first has noted what it holds

    monkeypatch.setattr(SiteLease, "release", release_slowly)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(other, [IDS] * 4))
    handle = autopack.enable(other)
    handle.remove()
    assert same(installed_functions(), before)


def test_a_checkpoint_holds_nothing_of_autopack(tmp_path):
    model, stock = llama(), llama()
    with autopack.enable(model):
        assert model.state_dict().keys() == stock.state_dict().keys()
        model.save_pretrained(tmp_path / "enabled")
        expected = model(input_ids=IDS).logits
    stock.save_pretrained(tmp_path / "stock")
    files = sorted(p.name for p in (tmp_path / "stock").iterdir())
    assert sorted(p.name for p in (tmp_path / "enabled").iterdir()) == files
    for name in files:
        if name.endswith(".json"):
            found, plain = (
                json.loads((tmp_path / d / name).read_text()) for d in ("enabled", "stock")
            )
            assert found == plain
    code = (
        "import sys, torch\n"
        "from transformers import AutoModelForCausalLM\n"
        f"model = AutoModelForCausalLM.from_pretrained({str(tmp_path / 'enabled')!r}, "
        "dtype=torch.float64)\n"
        f"torch.save(model(torch.load({str(tmp_path / 'ids.pt')!r})).logits, "
        f"{str(tmp_path / 'logits.pt')!r})\n"
        "assert not [name for name in sys.modules if name.startswith('autopack')]\n"
    )
    torch.save(IDS, tmp_path / "ids.pt")
    python("-c", code)
    assert error(torch.load(tmp_path / "logits.pt"), expected) <= FLOAT64
