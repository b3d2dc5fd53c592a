"""What a batch held on the host is used on a GPU without waiting for it, and stops it where it
holds something else."""

import textwrap

import torch

from autopack.layout.host import recall
from autopack.packing import HostBatch
from tests.support.processes import python


def test_what_was_moved_is_known_without_waiting_for_the_device_and_a_write_that_counts_is_seen():
    moved = HostBatch(position_ids=torch.arange(4)[None]).to("cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert recall(moved)["position_ids"].tolist() == [[0, 1, 2, 3]]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    moved["position_ids"].add_(1)
    assert recall(moved) == {}


def test_a_write_that_counts_no_version_up_stops_the_device():
    """In a process of its own, since a device that has stopped runs nothing more."""
    code = """
        import torch
        from autopack.layout.host import recall
        from autopack.packing import HostBatch
        moved = HostBatch(position_ids=torch.arange(4)[None]).to("cuda")
        moved["position_ids"].data.fill_(7)
        recall(moved)
        torch.cuda.synchronize()
    """
    done = python("-c", textwrap.dedent(code), status=None)
    assert done.returncode != 0
    assert "assert" in done.stderr
