"""Engines in which ranks share rows, each with a part of their columns."""

from __future__ import annotations

from typing import Any, ClassVar

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from compat.engines.cells import ENGINES
from compat.engines.engines import DDP, Engine, Zero
from compat.engines.fsdp2 import FSDP2


class SharedDDP(DDP):
    """Two ranks share rows, in DistributedDataParallel."""

    parts = 2

    @property
    def share(self) -> int:
        return dist.get_rank() // self.parts

    @property
    def shares(self) -> int:
        return dist.get_world_size() // self.parts

    @property
    def options_of_enable(self) -> dict[str, Any]:  # type: ignore[override]
        mesh = init_device_mesh(
            "cpu", (self.shares, self.parts), mesh_dim_names=("data", "sequence")
        )
        return {"sequence_parallel": mesh["sequence"]}


class SharedFSDP2(SharedDDP):
    """Two ranks share rows, and all of them parameters."""

    checkpointing: bool | None = None
    options: ClassVar[dict[str, Any]] = {}
    mesh = FSDP2.mesh
    wrap = FSDP2.wrap


class SharedZero(Zero):
    """DeepSpeed's sequence parallelism (ALST), registered with transformers after the first model
    was enabled."""

    stage, parts, shares, share = 1, 2, 1, 0
    adds_parts = True
    attention = "sdpa"
    registered: ClassVar[list[Any]] = []

    def wrap(self, model: Any) -> Any:
        import deepspeed
        from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

        deepspeed.init_distributed("gloo")
        if not SharedZero.registered:
            SharedZero.registered.append(
                UlyssesSPAttentionHF.register_with_transformers(
                    model_name_or_path=model,
                    core_attn_implementation="sdpa",
                    sequence_parallel_size=self.parts,
                    micro_batch_size=1,
                    disable_in_eval=True,
                )
            )
        self.more = {"mpu": SharedZero.registered[0]}
        return super().wrap(model)


def engine_of(name: str) -> type[Engine]:
    """The engine of a row of engines.toml."""
    row = {key: value for key, value in ENGINES[name].items() if key not in ("types", "processes")}
    base = Engine.known[row["class"]]
    return type(base.__name__, (base,), row)
