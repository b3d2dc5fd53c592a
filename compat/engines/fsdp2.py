"""FSDP2 and what it can be told, as engines."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from compat.engines.engines import BFLOAT16, Engine, layers_of


class FSDP2(Engine):
    """fully_shard, each layer by itself and the rest."""

    options: ClassVar[dict[str, Any]] = {}
    checkpointing: bool | None = None
    """Whether checkpointing is reentrant, where there is any."""

    def mesh(self) -> Any:
        return init_device_mesh("cpu", (dist.get_world_size(),))

    def wrap(self, model: Any) -> Any:
        mesh = self.mesh()
        for layer in layers_of(model):
            fully_shard(layer, mesh=mesh, **self.options)
        if self.checkpointing is not None:
            model.gradient_checkpointing_enable({"use_reentrant": self.checkpointing})
            if self.checkpointing:
                model.enable_input_require_grads()
        return fully_shard(model, mesh=mesh, **self.options)

    @contextlib.contextmanager
    def accumulating(self, last: bool) -> Iterator[None]:
        if self.accumulates:
            self.model.set_requires_gradient_sync(last)
        yield


class FineFSDP2(FSDP2):
    """fully_shard of each linear layer by itself, inside of what autopack runs on documents."""

    def wrap(self, model: Any) -> Any:
        mesh = self.mesh()
        for layer in layers_of(model):
            for module in layer.modules():
                if isinstance(module, torch.nn.Linear):
                    fully_shard(module, mesh=mesh)
        return super().wrap(model)


class HSDP(FSDP2):
    """Replicated over pairs of ranks that share parameters."""

    def mesh(self) -> Any:
        return init_device_mesh(
            "cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard")
        )


class LowerFSDP2(FSDP2):
    """In bfloat16, with gradients reduced in float32."""

    tolerance, dtype = BFLOAT16, torch.bfloat16
    options: ClassVar[dict[str, Any]] = {
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    }
