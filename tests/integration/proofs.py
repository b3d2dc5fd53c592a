"""Proofs on two processes (gloo, CPU), for test_processes.py: how a model is shared out, and what
its proof touches.

One rank enables alone while the other waits: a proof that asked for the other's part would not come
back."""

from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import autopack
from tests.conftest import FLOAT32, LENGTHS, alone, error, positions, token_ids
from tests.integration.documents import says
from tests.integration.ranks import SHARDED, WORLD, fsdp2
from tests.proving.untouched import Doubled, built, collectives, left_alone


def _tensor_parallel(model):
    mesh = init_device_mesh("cpu", (WORLD,))
    columns = (
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
    )
    plan = {name: ColwiseParallel() for name in columns}
    plan |= {"self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()}
    for layer in model.model.layers:
        parallelize_module(layer, mesh, plan)
    return model


WRAPS = {**SHARDED, "DDP": DistributedDataParallel, "tensor parallel": _tensor_parallel}


def _case(wrap, rank):
    """The error of packed rows; one rank alone proves by a twin."""
    model, ids = built(), token_ids()
    with torch.no_grad():
        expected = alone(model, ids, LENGTHS)
    wrapped = wrap(model)
    dist.barrier()
    for turn in range(WORLD):
        if rank == turn:
            with left_alone(wrapped):
                assert autopack.enable(wrapped).enabled.proof.source == "twin"
        dist.barrier()
    before = collectives()
    with torch.no_grad():
        found = wrapped(input_ids=ids, position_ids=positions(LENGTHS)).logits
    # The control of the count: the call itself makes ranks wait for each other.
    assert collectives() > before or wrap is DistributedDataParallel
    return error(found, expected)


def _with_an_own_layer(_):
    """All ranks together, with a layer that the twin has none of: the model is not run all the
    same."""
    model = built()
    model.model.layers[3].mlp.down_proj = Doubled(256, 128, bias=False)
    wrapped = fsdp2(model)
    with left_alone(wrapped):
        return autopack.enable(wrapped).enabled.proof.source


def _control(_):
    """All ranks together run the model, which gathers its weights."""
    wrapped = fsdp2(built())
    with left_alone(wrapped), torch.no_grad():
        wrapped(input_ids=token_ids())


CASES = {
    **{name: (partial(_case, wrap), lambda found: found < FLOAT32) for name, wrap in WRAPS.items()},
    "own layer": (_with_an_own_layer, says("part")),
    "control": (_control, lambda found: "modules ran" in found or "collectives" in found),
}
"""With what a rank has to find."""
