"""Training steps of enabled models on a device wait for nothing, in any type: read by meta tensors
that say they are on a GPU."""

import traceback
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import autopack
from autopack.bench.race import Batch
from autopack.inspection import torches
from autopack.packing import HostBatch
from autopack.tiny import configs, models
from benchmarks.counting import Counting, as_on_cuda, count
from compat.torch_flash import aten_on_cpu

pytestmark = pytest.mark.skipif(torches.varlen_attn is None, reason="this torch has no varlen_attn")
OWN = str(Path(autopack.__file__).parent)
LENGTHS = (5, 9, 3, 12)
BY_DOCUMENT = "documents run alone, and the labels of each are counted where they are"
WAITS = {
    **dict.fromkeys(("xlm", "flaubert"), "tokens are searched for padding tokens, as stock does"),
    "tapas": "positions of each document are compared with columns",
    "mra": "documents run alone",
    **dict.fromkeys(
        "blt cpmant deepseek_v4 minimax_m3_vl_text prophetnet reformer xlnet".split(), BY_DOCUMENT
    ),
}
"""Types that wait in code of autopack, and for what."""


def _row(model, documents, labels):
    given = [{"input_ids": ids, "labels": ids if labels else 1} for ids in documents.documents]
    return replace(autopack.PackingCollator.for_model(model))(given)


def _padded(model, documents, labels):
    batch = documents.padded()
    return HostBatch(
        batch if labels else {**batch, "labels": torch.ones(len(LENGTHS), dtype=torch.long)}
    )


def _is_upstreams(error):
    """Return True if code of transformers or torch raised, called by transformers."""
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    places = [file for file in files if file.startswith(OWN) or "/transformers/" in file]
    return not places or not places[-1].startswith(OWN)


TASKS = ("causal-lm", "masked-lm", "sequence-classification")


@pytest.mark.parametrize("form", [_row, _padded], ids=["packed row", "padded batch"])
@pytest.mark.parametrize(
    ("model_type", "task"),
    [(each, task) for task in TASKS for each in sorted(configs.types_for(task))],
)
def test_no_step_waits_for_the_device(model_type, task, form):
    try:
        config = configs.config(model_type, task=task)
        with torch.device("meta"):
            model = models.of_config(config, task, None, torch.bfloat16).train()
    except Exception as error:
        pytest.skip(f"cannot be built on the meta device: {error}")
    model.config.use_cache = False
    documents = Batch.of(LENGTHS, torch.arange(20, 60), 0, "cpu")
    try:
        with aten_on_cpu(), as_on_cuda(False), autopack.enable(model, verify=False):
            made = form(model, documents, labels=task in TASKS[:2])
            for _ in range(3):  # the first two padded batches are looked at
                with Counting([]):
                    call = dict(HostBatch(made).to("cuda"))
                counting = count(model, call, [])[1]
    except (autopack.AutopackError, ValueError) as error:
        pytest.skip(f"refused: {error}")
    except Exception as error:
        if _is_upstreams(error):
            pytest.skip(f"stock cannot run there: {error}")
        waits = [str(error)]
    else:
        waits = [place for place in counting.waits if ", autopack/" in place]
    assert not waits or model_type in WAITS, waits
