"""The examples: they run, with the line and without it to the same results; notebooks are kept with
their outputs."""

import re

import pytest
import torch
import transformers
from packaging import version

from compat.engines.start import launched
from examples.pretrained.weights import MINILM, missing
from tests.support import pages
from tests.support.processes import ROOT, python

pytest.importorskip("accelerate", reason="transformers' Trainer needs it")
pytest.importorskip("ipykernel")
pytest.importorskip("matplotlib")
pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")

PICTURES = {
    "embeddings": 1,
    "estimate_pack_train": 1,
    "own_family": 2,
    "prefixes": 1,
    "real_sentences": 1,
}
PICTURES |= {"trainer": 3, "trl": 1}
"""Every notebook, and how many pictures it draws."""
STEPS = 4
ROUNDING = 1e-4


def plain_loop(*arguments):
    return python("examples/plain_loop.py", "--steps", STEPS, "--threads", "1", *arguments).stdout


def losses(printed):
    return [float(loss) for loss in re.findall(r"^step +\d+  loss (\S+)$", printed, re.MULTILINE)]


def text(notebook, name):
    """What the cell of this name put out, as plain text."""
    (cell,) = [cell for cell in notebook.cells if cell.id == name]
    return "".join(
        o.text if o.output_type == "stream" else o.data.get("text/plain", "") for o in cell.outputs
    )


def numbers(notebook, name, pattern):
    """What the pattern's group finds in what the cell put out."""
    return [float(found) for found in re.findall(pattern, text(notebook, name), re.MULTILINE)]


def columns(notebook, name):
    """The columns of a table of losses by step."""
    rows = re.findall(r"^ *\d+ (?: +\S+)+$", text(notebook, name), re.MULTILINE)
    return [
        list(map(float, column)) for column in zip(*(row.split()[1:] for row in rows), strict=True)
    ]


def of(name):
    """Give a test the notebook of this name, run; it fails where a cell does."""
    return pytest.mark.parametrize(
        "executed", [pytest.param(name, marks=pytest.mark.exhaustive)], indirect=True
    )


@pytest.fixture(name="executed")
def _executed(tmp_path, request):
    name = f"{request.param}.ipynb"
    python("examples/refresh.py", name, "--output", tmp_path)
    return nbformat.read(tmp_path / name, as_version=4)


def same_losses(notebook, name, steps):
    """Want losses that fall in so many steps, and are the same with the line."""
    stock, enabled, *_ = columns(notebook, name)
    assert len(stock) == steps
    assert enabled == pytest.approx(stock, rel=ROUNDING)
    assert stock[-1] < stock[0]


def same_embeddings(notebook, name, count, within):
    differences = numbers(notebook, name, r"^largest difference.*: +(\S+)$")
    assert len(differences) == count
    assert max(differences) < within


@pytest.mark.exhaustive
def test_plain_loop_prints_the_same_losses_with_the_line_and_without():
    stock, enabled = plain_loop("--stock"), plain_loop()
    assert len(losses(stock)) == STEPS
    assert losses(enabled) == pytest.approx(losses(stock), rel=1e-4)
    assert losses(stock)[-1] < losses(stock)[0]
    assert "tokens per second" in stock
    assert "autopack" not in stock
    assert f"{STEPS} padded batches packed inside" in enabled


@of("trainer")
def test_trainer(executed):
    same_losses(executed, "losses", 20)
    assert "20 padded batches packed inside" in text(executed, "handle")
    assert "enabled by autopack, sdpa, float32: exact" in text(executed, "audit")
    assert text(executed, "remove") == "False"


@of("trl")
def test_trl(executed):
    for cell in ("sft-losses", "dpo-losses"):
        same_losses(executed, cell, 6)
    leaking, exact = numbers(executed, "packing", r"off by (\S+)$")
    assert exact < ROUNDING < 1e-2 < leaking
    assert text(executed, "handle").count("6 padded batches packed inside") == 2


@of("embeddings")
def test_embeddings(executed):
    same_embeddings(executed, "encode-enabled", 2, 1e-5)
    same_embeddings(executed, "predict", 1, 1e-5)
    stock, enabled = re.findall(r"(\[.*\])", text(executed, "rank"))
    assert enabled == stock


@of("estimate_pack_train")
def test_estimate_pack_train(executed):
    same_losses(executed, "losses", 12)
    padded, _, _, leaking, _ = columns(executed, "losses")
    assert leaking[1:] != pytest.approx(padded[1:], rel=10 * ROUNDING)


@pytest.mark.skipif(
    version.parse(transformers.__version__) < version.parse("4.57"), reason="has no Qwen3-Next"
)
@of("own_family")
def test_own_family(executed):
    for cell, said in (
        ("hybrid-stock", "float32: LEAKS"),
        ("hybrid-enabled", "enabled by autopack, eager, float32: exact"),
        ("own-refused", "has no place to keep documents apart"),
        ("own-stock", "LEAK"),
        ("own-half", "it is not exact"),
        ("own-enabled", "enabled by autopack, eager, float32: exact"),
    ):
        assert said in text(executed, cell)


@of("prefixes")
def test_prefixes(executed):
    logits, gradients = numbers(executed, "difference", r" (\d\S+?)(?:, relative)?$")
    assert max(logits, gradients) < 1e-4
    for cell in ("explain", "packed"):
        assert "1,792 of them computed with those of another row" in text(executed, cell)
    assert numbers(executed, "dpo", r"differ by (\S+) at most")[0] < ROUNDING
    shared = numbers(executed, "dpo", r"real tokens, (\d+),\d+ of them")
    assert len(shared) == 2
    assert min(shared) > 1
    apart, together = map(
        int, re.search(r"in (\d+) rows, or in (\d+) of groups", text(executed, "groups")).groups()
    )
    assert together < apart / 2


@pytest.mark.skipif(bool(missing(MINILM)), reason=f"needs the weights: {MINILM.install}")
@of("real_sentences")
def test_real_sentences(executed):
    same_embeddings(executed, "encode", 2, 1e-6)
    for cell, count in (("retrieval", 3), ("after", 2)):
        found = re.findall(r"accuracy@1 (\S+)  MRR (\S+)", text(executed, cell))
        assert len(found) == count
        assert len(set(found)) == 1
    same_losses(executed, "train", 6)


@pytest.mark.exhaustive
@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this torch has no gloo")
def test_rows_that_two_processes_share_have_the_losses_of_one():
    printed = [
        launched(["examples/sequence_parallel.py"], processes).stdout for processes in (1, 2)
    ]
    one, two = ([float(loss) for loss in re.findall(r"loss ([\d.]+)", text)] for text in printed)
    assert len(one) == 8
    assert two == pytest.approx(one, abs=2e-4)  # as they are printed


def test_every_notebook_is_listed():
    assert sorted(path.stem for path in (ROOT / "examples").glob("*.ipynb")) == sorted(PICTURES)


@pytest.mark.parametrize("name", PICTURES)
def test_a_notebook_is_kept_with_its_outputs_and_little_else(name):
    path = ROOT / "examples" / f"{name}.ipynb"
    kept = nbformat.read(path, as_version=4)
    words = [cell.source for cell in kept.cells if cell.cell_type == "markdown"]
    assert re.search(r"\]\(\.\./", words[-1])
    assert list(pages.lost_links(path, "\n".join(words))) == []
    cells = [cell for cell in kept.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [o for o in outputs if o.output_type == "error" or o.get("name") == "stderr"]
    assert sum("image/png" in o.get("data", {}) for o in outputs) == PICTURES[name]
    assert path.stat().st_size < 300_000
    assert not re.search(r"/(?:tmp|home|work)/", path.read_text())
