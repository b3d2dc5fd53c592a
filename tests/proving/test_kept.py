"""What a twin has shown is kept, for as long as nothing that it depends on is another one, and no longer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest
from transformers import LlamaForCausalLM
from transformers.models.llama import modeling_llama

import autopack
from autopack import tiny
from autopack.enabling import by_twin
from autopack.errors import UnsupportedModel
from autopack.proving import kept

UNMEASURED = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4, "remark": True}}
"""A configuration with a word that no recorded run had, of a class that is all transformers'."""
SCRIPT = f"""
import json, sys
import autopack
from autopack import tiny
from autopack.enabling import by_twin

made = []
of = by_twin.twins.of
by_twin.twins.of = lambda *given: made.append(1) or of(*given)
print(json.dumps([autopack.enable(tiny.build("llama", **{UNMEASURED!r})).verified, len(made)]))
"""


class Mine(LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


@pytest.fixture
def made(monkeypatch):
    """The classes of which twins have been made."""
    found = []
    of = by_twin.twins.of
    monkeypatch.setattr(by_twin.twins, "of", lambda model, *given: found.append(type(model)) or of(model, *given))
    return found


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOPACK_CACHE", str(tmp_path))
    return tmp_path / "twins"


def verified(model):
    with autopack.enable(model) as handle:
        return handle.verified


def in_process(**environ):
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environ}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environ, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def files(folder):
    return sorted(folder.iterdir()) if folder.exists() else []


def test_the_second_model_of_a_process_needs_no_twin(made):
    first = verified(tiny.build("llama", **UNMEASURED))
    twins = len(made)
    assert twins >= 1
    assert "by a twin of" in first
    assert verified(tiny.build("llama", **UNMEASURED)) == f"{first}, kept since then"
    assert len(made) == twins


@pytest.mark.exhaustive
def test_the_next_process_needs_none_either(folder):
    assert in_process()[1] >= 1
    (file,) = files(folder)
    said, twins = in_process()
    assert twins == 0
    assert said.endswith(", kept since then")
    assert files(folder) == [file]


@pytest.mark.exhaustive
def test_many_processes_at_once(folder):
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    started = [
        subprocess.Popen([sys.executable, "-c", SCRIPT], env=environ, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    for process in started:
        out, _ = process.communicate()
        assert process.returncode == 0
        assert "by a twin of" in out
    (file,) = files(folder)  # no half of one is left, and none is another's
    assert json.loads(file.read_text())["answer"]["source"] == "twin"


@pytest.mark.parametrize("said", ["off", "0", "False"])
def test_it_can_be_turned_off(tmp_path, monkeypatch, said):
    monkeypatch.setenv("AUTOPACK_CACHE", said)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert "by a twin of" in verified(tiny.build("llama", **UNMEASURED))
    assert not files(tmp_path)


def test_where_it_lies(tmp_path, monkeypatch):
    monkeypatch.delenv("AUTOPACK_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert kept.directory() == tmp_path / "autopack" / "twins"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert kept.directory() == tmp_path / ".cache" / "autopack" / "twins"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"key": "of another"}', '{"answer": 3}'])
def test_what_cannot_be_read_is_answered_anew(folder, made, text):
    verified(tiny.build("llama", **UNMEASURED))
    twins = len(made)
    (file,) = files(folder)
    file.write_text(text)
    kept.forget()
    assert not verified(tiny.build("llama", **UNMEASURED)).endswith("kept since then")
    assert len(made) == 2 * twins
    assert json.loads(file.read_text())["answer"]["source"] == "twin"


def test_a_folder_that_cannot_be_made(tmp_path, monkeypatch, made):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("AUTOPACK_CACHE", str(tmp_path / "file"))
    assert "by a twin of" in verified(tiny.build("llama", **UNMEASURED))


@pytest.mark.parametrize(
    "change",
    [
        {"attention_bias": True},
        {"hidden_act": "relu"},
        {"intermediate_size": 48},
        {"attn_implementation": "sdpa"},
        {"rope_parameters": {**UNMEASURED["rope_parameters"], "factor": 4.0}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_another_configuration_is_another_question(made, change):
    fields = {"attn_implementation": "eager", **UNMEASURED}
    verified(tiny.build("llama", **fields))
    twins = len(made)
    assert not verified(tiny.build("llama", **{**fields, **change})).endswith("kept since then")
    assert len(made) > twins


def test_code_of_the_user_is_asked_every_time(folder, made):
    for _ in range(2):
        verified(Mine(tiny.config("llama")))
    assert made.count(Mine) >= 2
    assert not files(folder)


def test_a_function_that_was_replaced_in_memory_is_not_what_was_asked_about(monkeypatch, folder):
    verified(tiny.build("llama", **UNMEASURED))
    forward = modeling_llama.LlamaMLP.forward
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", lambda self, x: forward(self, x + x.mean(1, keepdim=True)))
    with pytest.raises(UnsupportedModel, match="not exact"):
        autopack.enable(tiny.build("llama", **UNMEASURED))
    assert len(files(folder)) == 1


def test_a_loss_on_the_instance_is_asked_about(made):
    verified(tiny.build("llama", **UNMEASURED))
    model = tiny.build("llama", **UNMEASURED)
    model.loss_function = lambda logits, labels, vocab_size, **_: logits.mean() + 0 * labels.sum()
    assert not verified(model).endswith("kept since then")
    assert len(made) >= 2


def test_files_that_are_younger_than_the_process_say_nothing(monkeypatch, made):
    kept._packages.cache_clear()
    monkeypatch.setattr(kept, "_begun", lambda: time.time() - 10 * 365 * 86400)
    assert kept.key_of(tiny.build("llama")) is None
    kept._packages.cache_clear()
