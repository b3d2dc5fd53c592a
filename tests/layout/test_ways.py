"""A new way to declare documents is one line of `autopack/layout/ways.py`: all that reads declarations follows."""

import subprocess
import sys
from pathlib import Path

import pytest

from autopack.layout import ways

LINE = '    Declaration("chapter", starts=changes, of_rows=True),\n'
BEFORE = f"""
import sys, types
source = open({str(Path(ways.__file__))!r}, encoding="utf-8").read()
assert source.count("TABLE = (\\n") == 1
module = types.ModuleType("autopack.layout.ways")
sys.modules[module.__name__] = module
exec(compile(source.replace("TABLE = (\\n", "TABLE = (\\n" + {LINE!r}), "ways.py", "exec"), vars(module))

import torch, autopack
from autopack import tiny
from autopack.errors import InvalidPacking
from tests.conftest import FLOAT64, alone, error, positions, token_ids

def raised(function):
    try:
        function()
    except InvalidPacking as error:
        return str(error)
    return ""

lengths = (5, 1, 4)
chapters = torch.repeat_interleave(torch.tensor([7, 3, 9]), torch.tensor(lengths))[None]
"""
CALL = """
model, ids = tiny.build("llama", dtype=torch.float64), token_ids(columns=10)
expected = alone(model, ids, lengths)
with autopack.enable(model):
    assert error(model(input_ids=ids, chapter=chapters).logits, expected) < FLOAT64
    said = raised(lambda: model(input_ids=ids, chapter=chapters, position_ids=positions((4, 6))))
    assert "by position_ids a document starts at row 0, column 4, by chapter none does" in said, said
    said = raised(lambda: model(input_ids=ids, chapter=chapters[:, :-1]))
    assert "chapter must have the shape (1, 10); found (1, 9)" in said, said
"""
HALVES = """
model, ids = tiny.build("t5", task="seq2seq", dtype=torch.float64), token_ids(columns=10)
parts = [model(input_ids=part, decoder_input_ids=part).logits[0] for part in ids.split(lengths, dim=1)]
with autopack.enable(model):
    found = model(input_ids=ids, decoder_input_ids=ids, chapter=chapters, decoder_chapter=chapters).logits
assert error(found, torch.cat(parts)[None]) < FLOAT64
"""
EXAMPLES = """
import datasets
example = {"input_ids": list(range(1, 11)), "chapter": chapters[0].tolist()}
batch = autopack.PackingCollator()([example])
assert batch["position_ids"].tolist() == positions(lengths).tolist()
assert "chapter" not in batch
said = raised(lambda: autopack.pack(datasets.Dataset.from_list([example]), 16))
assert "found a column 'chapter', so the examples are packed rows" in said, said
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("code", [CALL, HALVES, EXAMPLES], ids=["call", "halves", "examples"])
def test_one_line_is_a_way(code):
    done = subprocess.run([sys.executable, "-c", BEFORE + code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_without_the_line_it_is_an_argument_like_any_other():
    """The control: the row is one document."""
    code = BEFORE.replace(repr(LINE), "''") + CALL.replace("< FLOAT64", "> LEAK").partition("    said")[0]
    code = code.replace("import FLOAT64,", "import LEAK,")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
