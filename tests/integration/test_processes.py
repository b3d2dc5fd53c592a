"""What each of several processes (gloo, CPU) finds, that have one model or its rows together.

Data parallelism (ranks), ranks that gather parameters with unequal numbers of documents (in_step),
proofs without the other processes (proofs), rows that ranks share (shared_rows), and trainers that
stop and go on (resuming)."""

import tempfile
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.integration import processes, ranks, resuming, shared_rows
from tests.integration.documents import exact

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this torch has no gloo"),
]
MODULES = {"ranks": ranks, "shared_rows": shared_rows, "resuming": resuming}
if ranks.fully_shard is not None:
    from tests.integration import in_step, proofs

    MODULES |= {"in_step": in_step, "proofs": proofs}


@cache
def found_by(module):
    """All cases of a module share one pair of processes: starting them costs more than all the
    cases."""
    with tempfile.TemporaryDirectory() as folder:
        return processes.found_by(f"tests.integration.{module}", Path(folder))


@pytest.mark.parametrize(
    ("module", "name"), [(module, name) for module in MODULES for name in MODULES[module].CASES]
)
def test_every_rank_finds_what_it_has_to(module, name):
    _, wanted = MODULES[module].CASES[name]
    for rank in found_by(module):
        assert wanted(rank[name]), rank[name]


def _four(*_):
    kept = {"num_key_value_heads": 4}
    return [
        shared_rows.error("llama", **kept),
        shared_rows.error("llama", shared_rows.declared_otherwise, **kept),
    ]


def test_four_ranks(tmp_path):
    for rank in processes.run(_four, tmp_path, world=4):
        assert all(map(exact, rank)), rank
