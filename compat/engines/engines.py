"""The engines: how each wraps a model, and where gradients, parameters and checkpoints are found in
it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import autopack
from compat.engines.data import Spec, optimizer_of

EXACT = 1e-4
"""Of float32; leaks start at 1e-2. Orders of sums differ by 1e-5 after three steps."""
BFLOAT16 = 0.2
"""What docs/trust.md holds gradients in bfloat16 to."""
STOCK = os.environ.get("ENGINES_STOCK") == "1"


def enable(model: Any, **options: Any) -> None:
    """Enable a model, unless it is asked whether stock trains by itself."""
    if not STOCK:
        autopack.enable(model, **options)


class Engine:
    """One way of training: `model` is what is called. Ranks of one `share` get the same
    documents."""

    tolerance = EXACT
    dtype = torch.float32
    averages = True
    """Whether gradients are averaged over the shares."""
    accumulates = False
    """Whether a step is made of two calls, the first of them without reduction of gradients."""
    parts = 1
    """How many ranks share the rows of a share, each with a part of their columns."""
    adds_parts = False
    """Whether gradients of their parts are added up, and averaged over shares alone."""
    attention = "eager"
    options_of_enable: ClassVar[dict[str, Any]] = {}
    known: ClassVar[dict[str, type[Engine]]] = {}
    """All engines, by their names."""

    def __init_subclass__(cls) -> None:
        Engine.known.setdefault(cls.__name__, cls)

    def __init__(self, spec: Spec, seed: int = 0):
        self.spec = spec
        self.base = spec.build(seed, attn_implementation=self.attention)
        enable(self.base, **self.options_of_enable)
        self.model = self.wrap(self.base)
        self.optimizer = optimizer_of(self.model)

    @property
    def share(self) -> int:
        """Which documents this rank gets."""
        return dist.get_rank()

    @property
    def shares(self) -> int:
        """How many shares there are."""
        return dist.get_world_size()

    @property
    def averaged_over(self) -> int:
        """By what the engine divides gradients."""
        return self.shares * (1 if self.adds_parts else self.parts)

    def wrap(self, model: Any) -> Any:
        raise NotImplementedError

    def call(self, batch: dict[str, Any]) -> Any:
        """What the model makes of packed rows, or of this rank's part of them."""
        if self.parts > 1:
            batch = autopack.packing.shard_rows(batch, dist.get_rank() % self.parts, self.parts)
        return self.model(**batch)

    def accumulating(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        """Around the forward and backward of a call that may not be the last of its step."""
        return contextlib.nullcontext() if last or not self.accumulates else self.model.no_sync()

    def backward(self, loss: torch.Tensor) -> None:
        """Gradients of the loss."""
        loss.backward()

    def step(self) -> None:
        """Let the optimizer move the parameters, and forget the gradients."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def gradients(self) -> dict[str, torch.Tensor]:
        """Whole gradients by the names of the plain model."""
        return {
            plain(n): whole(p.grad) for n, p in self.model.named_parameters() if p.grad is not None
        }

    def parameters(self) -> dict[str, torch.Tensor]:
        """Whole parameters by the names of the plain model."""
        return {plain(n): whole(p.detach()) for n, p in self.model.named_parameters()}

    def save(self, folder: Path) -> None:
        """Write model and optimizer as torch's distributed checkpoints have them."""
        model, optimizer = states.get_state_dict(self.model, self.optimizer)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)

    def load(self, folder: Path) -> None:
        """Read them into a model that has just been made."""
        model, optimizer = states.get_state_dict(self.model, self.optimizer)
        found: dict[str, Any] = {"model": model, "optimizer": optimizer}
        dcp.load(found, checkpoint_id=folder)
        states.set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=found["model"],
            optim_state_dict=found["optimizer"],
        )


def plain(name: str) -> str:
    """The name of a parameter in the plain model."""
    for part in ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module."):
        name = name.replace(part, "")
    return name.removeprefix("module.")


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor that may lie on several ranks."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def layers_of(model: Any) -> torch.nn.ModuleList:
    """The layers of a model."""
    return next(module for module in model.modules() if isinstance(module, torch.nn.ModuleList))


class DDP(Engine):
    """DistributedDataParallel."""

    options: ClassVar[dict[str, Any]] = {}

    def wrap(self, model: Any) -> Any:
        return DistributedDataParallel(model, **self.options)


class FSDP1(Engine):
    """FullyShardedDataParallel, each layer by itself."""

    def wrap(self, model: Any) -> Any:
        policy = ModuleWrapPolicy({type(layers_of(model)[0])})
        return FullyShardedDataParallel(
            model, auto_wrap_policy=policy, device_id=torch.device("cpu"), use_orig_params=True
        )

    def gradients(self) -> dict[str, torch.Tensor]:
        with FullyShardedDataParallel.summon_full_params(self.model, with_grads=True):
            return super().gradients()

    def parameters(self) -> dict[str, torch.Tensor]:
        with FullyShardedDataParallel.summon_full_params(self.model):
            return super().parameters()

    def save(self, folder: Path) -> None:
        model, optimizer = (
            self.model.state_dict(),
            FullyShardedDataParallel.optim_state_dict(self.model, self.optimizer),
        )
        if dist.get_rank() == 0:
            torch.save((model, optimizer), f"{folder}.pt")

    def load(self, folder: Path) -> None:
        model, optimizer = torch.load(f"{folder}.pt")
        self.model.load_state_dict(model)
        found = FullyShardedDataParallel.optim_state_dict_to_load(
            self.model, self.optimizer, optimizer
        )
        self.optimizer.load_state_dict(found)


class Accelerate(Engine):
    """`Accelerator.prepare`, by what `accelerate launch` was configured for."""

    def __init__(self, spec: Spec, seed: int = 0):
        from accelerate import Accelerator

        self.spec = spec
        self.accelerator = Accelerator(cpu=True)
        self.base = spec.build(seed)
        enable(self.base)
        self.model, self.optimizer = self.accelerator.prepare(self.base, optimizer_of(self.base))

    def backward(self, loss: torch.Tensor) -> None:
        self.accelerator.backward(loss)

    def save(self, folder: Path) -> None:
        self.accelerator.save_state(str(folder))

    def load(self, folder: Path) -> None:
        self.accelerator.load_state(str(folder))


class Zero(Engine):
    """DeepSpeed's ZeRO."""

    stage = 1
    more: dict[str, Any] = {}  # noqa: RUF012

    def wrap(self, model: Any) -> Any:
        import deepspeed

        zero = {
            "stage": self.stage,
            "stage3_param_persistence_threshold": 0,
            "reduce_bucket_size": 100_000,
        }
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "gradient_clipping": 0.0,
        }
        self.engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer_of(model), config=config, **self.more
        )
        return self.engine

    def backward(self, loss: torch.Tensor) -> None:
        self.engine.backward(loss)

    def step(self) -> None:
        self.engine.step()

    def gradients(self) -> dict[str, torch.Tensor]:
        from deepspeed.utils import safe_get_full_grad

        found = {plain(n): safe_get_full_grad(p) for n, p in self.engine.module.named_parameters()}
        return {name: gradient for name, gradient in found.items() if gradient is not None}

    def parameters(self) -> dict[str, torch.Tensor]:
        from deepspeed.utils import safe_get_full_fp32_param

        named = [(plain(n), p) for n, p in self.engine.module.named_parameters() if p.requires_grad]
        return {name: safe_get_full_fp32_param(parameter).clone() for name, parameter in named}

    def save(self, folder: Path) -> None:
        self.engine.save_checkpoint(str(folder))

    def load(self, folder: Path) -> None:
        self.engine.load_checkpoint(str(folder))


class TensorParallel(Engine):
    """`from_pretrained` with a plan for tensor parallelism: all ranks get the same documents."""

    averages = False
    shares, share = 1, 0

    def __init__(self, spec: Spec, seed: int = 0):
        import tempfile

        from transformers.distributed import DistributedConfig

        folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(folder)
        made = spec.build(seed)
        if dist.get_rank() == 0:
            made.save_pretrained(folder[0])
        dist.barrier()
        plan = DistributedConfig(tp_plan="auto", tp_size=dist.get_world_size())
        loaded = type(made).from_pretrained(
            folder[0], distributed_config=plan, attn_implementation="eager"
        )
        self.spec, self.base = spec, loaded.train()
        enable(self.base)
        self.model = self.base
        self.optimizer = optimizer_of(self.model)
