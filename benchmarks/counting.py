"""Operations that a call starts on a GPU, counted on a CPU: its tensors are torch's fake ones,
which have no values."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from benchmarks.gpu.machine import ROOT, _short

aten = torch.ops.aten
CUDA, META = torch.device("cuda:0"), torch.device("meta")
_PLACES = f"{ROOT}/autopack/", "/transformers/"
_STARTS_NOTHING = frozenset(
    "_unsafe_view empty empty_like empty_strided new_empty new_empty_strided lift_fresh pin_memory".split()
)
"""Operations without a kernel, beside views."""


class Counts(NamedTuple):
    """Counts of one forward and backward.

    `operations` are those that start a kernel or a copy, `moved` the bytes that those read and
    write that are no matrix products or attention, `saved` the bytes that are kept for backward at
    the end of forward, parameters left out, `uploaded` the bytes of integers and booleans that are
    copied to the device, and `waits` how often the host waits."""

    flops: float = 0
    operations: float = 0
    moved: float = 0
    saved: float = 0
    uploaded: float = 0
    waits: float = 0


class AsCuda(TorchFunctionMode):
    """Has tensors of the meta device say that they are on a GPU; autograd takes no fake CUDA
    tensors in a CPU build."""

    __module__ = "torch.benchmarks"  # in a mode of somebody else's, calls are checked
    _device, _is_cuda, _is_meta = (
        getattr(torch.Tensor, name).__get__ for name in ("device", "is_cuda", "is_meta")
    )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (self._device, self._is_cuda, self._is_meta) and args[0].is_meta:
            return CUDA if func == self._device else func == self._is_cuda
        args = tuple(META if _is_cuda(each) else each for each in args)
        return func(
            *args,
            **{name: META if _is_cuda(each) else each for name, each in (kwargs or {}).items()},
        )


def _is_cuda(value: Any) -> bool:
    return (isinstance(value, torch.device) and value.type == "cuda") or value in ("cuda", "cuda:0")


class Counting(TorchDispatchMode):
    """Counts what is done to tensors of the device; operations on tensors of the host run as they
    are.

    A boolean that is read from the device is False, and a number 0. Attention by `varlen_attn` is
    over documents of `lengths`, and counts for nothing if none are given."""

    __module__ = "torch.benchmarks"

    def __init__(self, lengths: list[int]):
        super().__init__()
        self.lengths = lengths
        self.operations: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()
        self.flops = self.moved = self.uploaded = 0
        self._pinned: dict[int, torch.Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            return self._run(func, args, kwargs or {})

    def _run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        name = func.overloadpacket.__name__
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if name in ("pin_memory", "_pin_memory"):
            self._pinned[args[0].data_ptr()] = args[0]
            return args[0]
        if kwargs.get("device") != META and not any(each.is_meta for each in given):
            return func(*args, **kwargs)
        if name == "_local_scalar_dense":
            self._wait(name)
            return False if args[0].dtype == torch.bool else 0
        if name in ("nonzero", "masked_select", "equal", "unique_dim", "_unique2"):
            self._wait(name)
        found = func(*args, **kwargs)
        made = [leaf for leaf in tree_leaves(found) if isinstance(leaf, torch.Tensor)]
        if name in ("_to_copy", "copy_"):
            self._look_at_copy(
                given[-1], made[0], kwargs.get("non_blocking") or args[2:3] == (True,)
            )
        if not (func.is_view or name in _STARTS_NOTHING):
            self.operations[name] += 1
            flops = self._flops(func.overloadpacket, args, kwargs, found)
            self.flops += flops
            self.moved += 0 if flops else sum(each.nbytes for each in (*given, *made))
        return found

    def _flops(self, packet: Any, args: Any, kwargs: Any, found: Any) -> int:
        """Return the operations of an operation by torch's formulas, in which attention counts
        every pair of tokens."""
        if packet is aten._grouped_mm:
            return 2 * args[0].numel() * args[1].shape[-1]
        if packet in (
            torch.ops.torch_attn._varlen_attn,
            torch.ops.torch_attn._varlen_attn_backward,
        ):
            backward = packet is torch.ops.torch_attn._varlen_attn_backward
            states = args[: 4 if backward else 3]
            assert not self.lengths or len(args[6 if backward else 3]) == len(self.lengths) + 1, (
                "other documents"
            )
            of_length = [
                [(1, t.shape[1], length, t.shape[2]) for t in states] for length in self.lengths
            ]
            return sum(
                (sdpa_backward_flop_count if backward else sdpa_flop_count)(*shapes)
                for shapes in of_length
            )
        return (
            flop_registry[packet](*args, **kwargs, out_val=found) if packet in flop_registry else 0
        )

    def _look_at_copy(self, source: torch.Tensor, made: torch.Tensor, non_blocking: bool) -> None:
        if source.is_meta == made.is_meta:
            return
        if source.is_meta:
            self._wait("copy to the host")
            return
        self.uploaded += 0 if source.is_floating_point() else source.nbytes
        if not non_blocking or source.data_ptr() not in self._pinned:
            self._wait("copy from memory that is not pinned")

    def _wait(self, name: str) -> None:
        frame: Any = sys._getframe(2)
        while frame.f_back and not any(part in frame.f_code.co_filename for part in _PLACES):
            frame = frame.f_back
        self.waits[f"{name}, {_short(frame.f_code.co_filename)}:{frame.f_lineno}"] += 1


def count(model: Any, call: dict[str, Any], lengths: list[int]) -> tuple[Counts, Counting]:
    """Return the counts of a training step of a model on documents of these lengths, without the
    optimizer."""
    own = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    saved: dict[int, torch.UntypedStorage] = {}  # kept, so that no other one gets the same address

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            saved[storage._cdata] = storage
        return tensor

    model.zero_grad()
    with Counting(lengths) as counting:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = model(**call).loss
        loss.backward()
    operations, waits = counting.operations.total(), counting.waits.total()
    kept = sum(each.nbytes() for each in saved.values())
    found = Counts(counting.flops, operations, counting.moved, kept, counting.uploaded, waits)
    return found, counting


@contextlib.contextmanager
def as_on_cuda(stock: bool) -> Iterator[None]:
    """Let code choose as it would on a GPU: of the H100's class, with torch's kernels of attention.

    Around `stock` models SDPA takes FlashAttention without a mask, and memory-efficient attention
    with one."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(AsCuda())
        stack.enter_context(
            mock.patch.object(torch.cuda, "get_device_capability", return_value=(9, 0))
        )
        if stock:
            stack.enter_context(
                mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", _sdpa)
            )
        yield


def _sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    if attn_mask is None:
        return aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, scale=scale
        )[0]
    if attn_mask.dtype == torch.bool:
        attn_mask = torch.where(attn_mask, 0.0, float("-inf")).to(query.dtype)
    bias = attn_mask.expand(len(query), query.shape[1], -1, -1)
    return aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, True, dropout_p, scale=scale
    )[0]
