"""What a proof leaves alone: the weights of a model, its modules, random states, and other
processes."""

import contextlib
import random

import numpy
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import LlamaForCausalLM

from autopack import tiny


class Mine(LlamaForCausalLM):
    """A class that nobody has recorded."""

    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


class Doubled(nn.Linear):
    """A layer that nobody has recorded."""

    def forward(self, states):
        return 2 * super().forward(states)


def built(device="cpu", cls=Mine, **fields):
    """A model of the class above, wider than a twin and with more layers."""
    config = tiny.config(
        "llama", hidden_size=128, intermediate_size=256, num_hidden_layers=4, **fields
    )
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    with torch.device(device):
        return cls(config).eval()


class Touched(AssertionError):
    """Something was touched that a proof leaves alone."""


@contextlib.contextmanager
def left_alone(model, *run):
    """Raise `Touched` where the block changes tensors or random states, runs modules but those to
    `run`, or makes processes wait for each other."""
    inside = {id(module) for module in model.modules()} - {
        id(part) for each in run for part in each.modules()
    }
    ran = []

    def listen(module, args):
        if id(module) in inside:
            ran.append(type(module).__name__)

    before, states, count = _tensors(model), _random_states(), collectives()
    handle = register_module_forward_pre_hook(listen)
    try:
        yield
    finally:
        handle.remove()
    if ran:
        raise Touched(f"modules ran: {', '.join(ran)}")
    if collectives() != count:
        raise Touched(f"{collectives() - count} collectives")
    for name, after in _tensors(model).items():
        if not _same(before[name], after):
            raise Touched(f"{name} is another one")
    if not all(map(_same, states, _random_states())):
        raise Touched("a random state")


def collectives():
    """How many collectives this process has begun in its group, whatever began them."""
    return dist.group.WORLD._get_sequence_number_for_group() if dist.is_initialized() else 0


def _tensors(model):
    found = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        # of torchao
        parts = local.__tensor_flatten__()[0] if hasattr(local, "__tensor_flatten__") else ()
        held = [getattr(local, part) for part in parts] or [local]
        bits = [None if each.is_meta else each.detach().clone() for each in held]
        found[name] = id(tensor), _version(local), tensor.requires_grad, id(tensor.grad), *bits
    return found


def _version(tensor):
    return None if tensor.is_inference() else tensor._version


def _random_states():
    return [
        (torch.get_rng_state(),),
        random.getstate(),
        (torch.from_numpy(numpy.random.get_state()[1].copy()),),
    ]


def _same(before, after):
    return all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else a == b
        for a, b in zip(before, after, strict=True)
    )
