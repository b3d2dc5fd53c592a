"""A backend is one file: whatever has a list of them has a new one too."""

import importlib
import sys

import pytest

import autopack
from autopack import options, tiny
from autopack.attention import backends, choose
from autopack.commands import doctor
from tests.conftest import FLOAT32, alone, error, positions, token_ids

ROWS = ((7, 1, 9, 3),)
TOY = """
from autopack.attention import per_document
from autopack.attention.call import Backend

calls = []

def attend(call):
    calls.append(call.implementation)
    return per_document.attend(call)

BACKEND = Backend(
    name="toy",
    attend=attend,
    availability=lambda: (True, "a toy"),
    refusal=lambda call: None,
    stands_in=frozenset({"sdpa"}),
)
"""


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """A module `toy` among the backends, as if its file had been there from the beginning."""
    (tmp_path / "toy.py").write_text(TOY)
    monkeypatch.setattr(backends, "__path__", [*backends.__path__, str(tmp_path)])
    found = importlib.import_module(f"{backends.__name__}.toy")
    monkeypatch.setitem(choose.BACKENDS, found.BACKEND.name, found.BACKEND)
    monkeypatch.setitem(options.CHOICES, "backend", (*options.CHOICES["backend"], "toy"))
    yield found
    del sys.modules[f"{backends.__name__}.toy"]


def packed():
    return {"input_ids": token_ids(1, sum(ROWS[0]), 0), "position_ids": positions(*ROWS)}


@pytest.mark.parametrize("asked", ["auto", "toy"])
def test_a_new_file_is_taken_by_auto_and_by_name(asked, toy):
    model = tiny.build("llama", attn_implementation="sdpa")
    expected = alone(model, packed()["input_ids"], *ROWS)
    with autopack.enable(model, backend=asked, verify=False) as handle:
        toy.calls.clear()
        assert error(model(**packed()).logits, expected) < FLOAT32
        assert toy.calls == ["sdpa"] * 2
        assert handle.backend == ("auto: toy or sdpa" if asked == "auto" else "toy")


def test_the_doctor_knows_it(toy, capsys):
    assert doctor.examine()["backends"]["toy"] == "yes: a toy"
    assert doctor.examine()["choices"]["sdpa on cpu"] == "toy or sdpa", "as of a handle"


@pytest.mark.parametrize(("implementation", "device", "names"), [
    ("sdpa", "cpu", ("sdpa",)),
    ("eager", "cpu", ("eager",)),
    ("eager", "cuda", ("eager",)),
    ("flex_attention", "cpu", ("flex",)),
    ("flash_attention_2", "cuda", ("flash",)),
    ("paged|flash_attention_2", "cuda", ("flash",)),
    ("of_mine", "cpu", ("eager",)),
])  # fmt: skip
def test_what_auto_may_take(implementation, device, names):
    assert choose.taken_by_auto(implementation, device) == names
