"""`autopack run` executes nothing but the script, and nothing of autopack ever asks for a
network."""

import json
import os
import sysconfig
from pathlib import Path

import numpy as np

from tests.integration.test_run import start

COMMAND = str(Path(sysconfig.get_path("scripts")) / "autopack")
"""The installed command: unlike `python -m autopack` it does not put the working directory on the
path."""
TRAINS = """
import json, sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM
sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=32)
model = LlamaForCausalLM(LlamaConfig(**sizes)).train()
ids, mask = torch.randint(32, (2, 6)), torch.ones(2, 6, dtype=torch.long)
mask[1, 3:] = 0
model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss.backward()
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""
SPOKEN = "open({!r}, 'a').write(__name__ + chr(10))\n"
"""What a file beside the script does when it is executed."""
BLOCKED = """
import sys

def hook(event, arguments):
    network = event in ("socket.getaddrinfo", "socket.gethostbyname", "socket.sendto", "urllib.Request")
    if network or (event == "socket.connect" and isinstance(arguments[1], tuple)):
        open({!r}, "a").write(event + " " + repr(arguments) + chr(10))
        raise PermissionError("the network is blocked: " + event)

sys.addaudithook(hook)
"""
"""A sitecustomize under which whoever asks for an address or a connection to one fails, and is
written down."""


def started(directory, *arguments, path=""):
    """A command that keeps what this Python finds, with something in front of it."""
    found = os.pathsep.join(filter(None, [path, os.environ.get("PYTHONPATH", "")]))
    return start.__wrapped__(*arguments, cwd=directory, PYTHONPATH=found)


def test_no_file_beside_the_script_is_executed_that_the_script_does_not_import(tmp_path):
    (tmp_path / "train.py").write_text(TRAINS)
    plain = started(tmp_path, "train.py")
    enabled = started(tmp_path, COMMAND, "run", "train.py")
    assert "enabled; 1 padded batch packed inside" in enabled.err
    imported = set(json.loads(plain.out))
    extra = set(json.loads(enabled.out)) - imported
    assert extra == {"autopack", "wrapt"}  # fewer names are fewer files that a script cannot have

    spoken = tmp_path / "spoken"
    for name in (*extra, *({"sitecustomize", "usercustomize", "html", "this"} - imported)):
        (tmp_path / f"{name}.py").write_text(SPOKEN.format(str(spoken)))
    # In front of what autopack needs stands a file that it does not run: the script runs without
    # autopack, and says so.
    done = started(tmp_path, COMMAND, "run", "train.py")
    assert done.status == 0, done.err
    assert f"needs wrapt, and {tmp_path / 'wrapt.py'} stands in front of it" in done.err
    (tmp_path / "wrapt.py").unlink()
    done = started(tmp_path, COMMAND, "run", "train.py")
    assert "enabled; 1 padded batch packed inside" in done.err
    assert not spoken.exists(), spoken.read_text()


OFFLINE = """
import runpy, sys
import torch
import autopack
from autopack import tiny
from autopack.cli import main

model = tiny.build("llama").train()
autopack.enable(model, check_every=1)
batch = autopack.PackingCollator()([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}])
model(**batch).loss.backward()
assert autopack.audit(model).exact
rows = autopack.pack([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}], 8)
assert len(list(rows)) == 1
for arguments in (
    ["families"], ["audit", "gpt2"], ["doctor"], ["estimate", "lengths.npy"],
    ["demo", "--steps", "1"],
    ["bench", "--size", "tiny", "--lengths", "lengths.npy", "--seconds", "1"],
):
    sys.argv = ["autopack", *arguments]
    try:
        status = main(arguments)
    except SystemExit as error:
        status = error.code
    assert not status, (arguments, status)
print("done")
"""


def test_the_network_is_never_asked_for(tmp_path):
    asked = tmp_path / "asked"
    (tmp_path / "blocked").mkdir()
    (tmp_path / "blocked" / "sitecustomize.py").write_text(BLOCKED.format(str(asked)))
    np.save(tmp_path / "lengths.npy", np.array([5, 9, 3, 17, 4, 8, 12, 6]))
    (tmp_path / "train.py").write_text(TRAINS)
    (tmp_path / "offline.py").write_text(OFFLINE)
    given = {"path": str(tmp_path / "blocked")}
    for arguments in (["offline.py"], [COMMAND, "run", "train.py"]):
        done = started(tmp_path, *arguments, **given)
        assert done.status == 0, done.out + done.err
    assert not asked.exists(), asked.read_text()

    done = started(
        tmp_path,
        "-c",
        "import urllib.request; urllib.request.urlopen('http://example.org')",
        **given,
    )
    assert "the network is blocked" in done.err
    assert "example.org" in asked.read_text()
