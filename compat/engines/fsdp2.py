"""FSDP2 and what it can be told, as engines."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from compat.engines.engines import BFLOAT16, Engine, die, layers_of


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


class FineFSDP2(FSDP2):
    """fully_shard of each linear layer by itself, inside of what autopack runs on documents."""

    def wrap(self, model: Any) -> Any:
        mesh = self.mesh()
        for layer in layers_of(model):
            for module in layer.modules():
                if isinstance(module, torch.nn.Linear):
                    fully_shard(module, mesh=mesh)
        return super().wrap(model)


class KeptFSDP2(FSDP2):
    """With `reshard_after_forward=False`."""

    options: ClassVar[dict[str, Any]] = {"reshard_after_forward": False}


class AccumulatingFSDP2(FSDP2):
    """Two calls per step, the first of them without reduction of gradients."""

    accumulates = True

    @contextlib.contextmanager
    def accumulating(self, last: bool) -> Iterator[None]:
        self.model.set_requires_gradient_sync(last)
        yield


class CheckpointedFSDP2(FSDP2):
    """With gradient checkpointing."""

    checkpointing = False


class ReentrantFSDP2(FSDP2):
    """With reentrant gradient checkpointing."""

    checkpointing = True


class LowerFSDP2(FSDP2):
    """With a mixed precision policy: bfloat16, gradients reduced in float32."""

    options: ClassVar[dict[str, Any]] = {
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    }
    tolerance, dtype = BFLOAT16, torch.bfloat16


class HSDP(FSDP2):
    """Replicated over pairs of ranks that share parameters."""

    def mesh(self) -> Any:
        return init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))


class DyingFSDP2(FSDP2):
    """One rank dies in its second step."""

    def backward(self, loss: torch.Tensor) -> None:
        die(self)
        super().backward(loss)


ENGINES: dict[str, type[Engine]] = {
    "fsdp2": FSDP2,
    "fsdp2 on 4": FSDP2,
    "fsdp2 by linear layer": FineFSDP2,
    "fsdp2 without resharding": KeptFSDP2,
    "fsdp2 accumulating": AccumulatingFSDP2,
    "fsdp2 checkpointing": CheckpointedFSDP2,
    "fsdp2 reentrant checkpointing": ReentrantFSDP2,
    "fsdp2 bfloat16": LowerFSDP2,
    "fsdp2, a rank dies": DyingFSDP2,
    "hsdp": HSDP,
}
