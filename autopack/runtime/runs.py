"""Repeated runs within a call: on batches of documents in turn, and for other ranks.

Each run begins with the buffers that the documents alone would begin with.

Under FSDP and ZeRO-3 a run of a module waits for the same run on every rank with a share of its
parameters, and so does its backward. Where autopack runs a module once for each batch of documents,
a rank with fewer batches goes on with *idle* runs. An idle run repeats one of its own, leaves
nothing behind, and its results are in the graph of those that count, with a gradient of zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from autopack.errors import UnsupportedModel
from autopack.inspection.randomness import generators_restored, set_entries
from autopack.inspection.sharding import Group


class Buffers:
    """Copies of a module's buffers that a forward in training may write to.

    A spectral norm takes a step of its power iteration in every forward. A document alone begins
    where the call began, and so does every part of a packed call that runs the module again.
    Buffers that count all inputs so far (batch norms) are left out: every run adds to them.
    """

    def __init__(self, module: nn.Module):
        self._held = [
            (owner, name, buffer, buffer.detach().clone())
            for owner in module.modules()
            if owner.training and "num_batches_tracked" not in owner._buffers
            for name, buffer in owner._buffers.items()
            if buffer is not None and buffer.is_floating_point() and not buffer.is_inference()
        ]
        self._versions = [buffer._version for _, _, buffer, _ in self._held]

    def put_back(self) -> None:
        """Restore the buffers, in place, as they were when this object was made."""
        for number, (owner, name, buffer, held) in enumerate(self._held):
            owner._buffers[name] = buffer
            if buffer._version != self._versions[number]:
                with torch.no_grad():
                    buffer.copy_(held)
                self._versions[number] = buffer._version


def from_the_same_buffers(original: Callable[..., Any], module: nn.Module) -> Callable[..., Any]:
    """Return a forward that, in training, puts the buffers back as they are now before each run."""
    if not module.training or next(module.buffers(), None) is None:
        return original
    kept = Buffers(module)

    def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        kept.put_back()
        return original(module, *args, **kwargs)

    return run


class RankRuns:
    """A count of one module's runs in one call, which ranks keep equal.

    Before each run but the first, and when it has no more, a rank asks all others over `groups` if
    any goes on. `total` is the number agreed on earlier, for a call that is recomputed in backward;
    then no rank asks.
    """

    def __init__(self, groups: Sequence[Group], total: int | None = None):
        self._groups = groups
        self._total = total
        self.count = 0  # runs of this rank so far

    def begin(self) -> None:
        """Count a run that this rank needs for its own documents, and announce it to the others."""
        if self.count and self._total is None:
            _any_rank_goes_on(self._groups, True)
        self.count += 1

    def idle(self, obstacle: str | None = None) -> Iterator[None]:
        """Yield, and count, once for each run that this rank has yet to make for other ranks.

        If a rank that has to has an `obstacle`, every rank raises `UnsupportedModel`.
        """
        while (
            self.count < self._total
            if self._total is not None
            else _any_rank_goes_on(self._groups, False, obstacle)
        ):
            self.count += 1
            yield


def largest_over_ranks(groups: Sequence[Group], values: Sequence[int]) -> list[int]:
    """Return each value's maximum over the ranks of all groups; every rank has to call it."""
    found = list(values)
    for group in groups:
        # Where a group can do so on the CPU, no device is waited for.
        devices = dict(
            each.split(":") for each in torch.distributed.get_backend_config(group).split(",")
        )
        where = torch.device("cpu" if "cpu" in devices else next(iter(devices)))
        asked = torch.tensor(found, device=where)
        torch.distributed.all_reduce(asked, torch.distributed.ReduceOp.MAX, group)
        found = asked.tolist()
    return found


def _any_rank_goes_on(groups: Sequence[Group], going_on: bool, obstacle: str | None = None) -> bool:
    """Return True if any rank is `going_on`; raise `UnsupportedModel` if one then cannot."""
    anybody, stuck = largest_over_ranks(groups, [going_on, obstacle is not None])
    if anybody and stuck:
        raise UnsupportedModel(
            "ranks of a sharded model have other numbers of documents, so some would have to run "
            "on without any, and "
            f"{obstacle or 'on another rank that cannot be done: its error says why'}",
            code="rows-on-ranks",
        )
    return bool(anybody)


_OF_ZERO = ("ds_", "applied_pre_backward_", "pre_bwd_fn", "post_bwd_fn")
"""Beginnings of names of attributes by which DeepSpeed's ZeRO-3 counts backwards of modules."""


@contextmanager
def restoring_state(module: nn.Module) -> Iterator[None]:
    """Restore a module's random state, buffers and numbers at the end of this block.

    The graph of such a run keeps copies of the buffers.
    """
    held: list[tuple[nn.Module, dict[str, Any], dict[str, Any]]] = []
    for part in module.modules():
        numbers = {  # or None: some routers keep counts there
            name: value
            for name, value in vars(part).items()
            if (value is None or isinstance(value, int | float)) and not name.startswith(_OF_ZERO)
        }
        held.append((part, dict(part._buffers), numbers))
    with generators_restored(module):
        try:
            for part, buffers, _ in held:
                copies = {n: b if b is None else b.detach().clone() for n, b in buffers.items()}
                set_entries(part._buffers, copies)
            yield
        finally:
            for part, buffers, numbers in held:
                set_entries(part._buffers, buffers)
                vars(part).update(numbers)


def with_idle(kept: Any, idle: list[Any]) -> Any:
    """Return output `kept` with the outputs of idle runs in its graph, at a gradient of zero."""
    if not idle:
        return kept
    if isinstance(kept, Tensor):
        parts = [part for part in idle if isinstance(part, Tensor) and part.requires_grad]
        return _Idle.apply(kept, *parts) if parts else kept
    if isinstance(kept, dict):
        alike = [each for each in idle if isinstance(each, dict)]
        return type(kept)(
            **{
                key: with_idle(part, [each.get(key) for each in alike])
                for key, part in kept.items()
            },
        )
    if type(kept) in (tuple, list):
        alike = [each for each in idle if isinstance(each, type(kept))]
        of_place = (
            [each[place] for each in alike if place < len(each)] for place in range(len(kept))
        )
        return type(kept)(map(with_idle, kept, of_place))
    return kept


class _Idle(torch.autograd.Function):
    """Autograd function that returns its first input; the others get gradients of zero."""

    @staticmethod
    def forward(ctx: Any, kept: Tensor, *idle: Tensor) -> Tensor:
        ctx.idle = [(part.shape, part.dtype, part.device) for part in idle]
        return kept.clone()  # a view could not be changed in place, as Trainer changes a loss

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        zeros = (
            torch.zeros((), dtype=dtype, device=device).expand(shape)
            for shape, dtype, device in ctx.idle
        )
        return gradient, *zeros
