"""State that several processes share: parameters gathered for a run (FSDP, ZeRO-3), and rows."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import nn

from autopack.inspection import releases
from autopack.inspection.foreign import original
from autopack.inspection.source import names_in

_OF_SEQUENCES = ("deepspeed", "ring_flash_attn", "yunchang", "xfuser")
"""Packages with attention functions for rows that several processes share."""
_ULYSSES = "deepspeed.runtime.sequence_parallel.ulysses_sp"
"""The module of DeepSpeed's attention over rows that ranks share (ALST).

`UlyssesSPAttentionHF.register_with_transformers` wraps the registered function. The wrapper
exchanges tokens for heads and calls that function for whole rows without a mask, so it knows of
documents only by flash attention's reading of positions.
"""
Group = Any
"""A process group of torch.distributed, which not every build of torch has."""


def gathering_groups(root: nn.Module) -> tuple[Group, ...]:
    """Return the process groups that gather parameters of `root` or reduce its gradients.

    All ranks find them in the same order. Empty if every process has its parameters whole. It is
    asked in a group of processes only.
    """
    found = {id(group): group for module in root.modules() for group in _groups_of(module)}
    return tuple(group for group in found.values() if torch.distributed.get_world_size(group) > 1)


def gathers_inside(module: nn.Module) -> bool:
    """Return True if parts of a module gather parameters in a run, not only the whole."""
    return any(part is not module and _groups_of(part) for part in module.modules())


def splits_rows(implementations: Iterable[str], training: bool) -> str | None:
    """Return the mechanism that splits rows over ranks (context or sequence parallelism), or None.

    That is torch's `context_parallel` while it is in force, or an attention function that calls
    other processes in a call of a model in this mode. Called in a group of processes only.
    """
    sdpa: Any = torch.nn.functional.scaled_dot_product_attention
    if str(getattr(sdpa, "__module__", "")).startswith("torch.distributed"):
        return "torch's context_parallel"
    for name in implementations:
        found = original(releases.attention_function(name))
        exchange = exchange_of(found)
        if exchange is not None and not exchanges_now(exchange, training):
            continue
        if isinstance(found, FunctionType) and _communicates(found):
            return f"the attention function {found.__module__}.{found.__qualname__}"
    return None


def exchange_of(function: Any) -> Any:
    """Return DeepSpeed's exchanging module in a registered attention function, or None."""
    function = original(function)
    if not isinstance(function, FunctionType) or function.__module__ != _ULYSSES:
        return None
    cells = (cell.cell_contents for cell in function.__closure__ or ())
    found = next((cell for cell in cells if isinstance(cell, nn.Module)), None)
    return (
        found
        if hasattr(found, "process_group") and callable(getattr(found, "attn", None))
        else None
    )


def of_whole_rows(function: Any) -> Any:
    """Return the attention function for whole rows: the one that DeepSpeed wraps, or itself."""
    found = exchange_of(function)
    return function if found is None else original(found.attn)


@contextmanager
def without_exchange(implementations: Iterable[str]) -> Iterator[None]:
    """Switch off DeepSpeed's exchange of tokens between processes within the block.

    DeepSpeed's wrapper loses masks, so attention sites call the function that it wraps meanwhile.
    """
    functions = map(releases.attention_function, implementations)
    found = {*map(exchange_of, functions)} - {None}
    for exchange in found:
        vars(exchange)["forward"] = exchange.attn
    try:
        yield
    finally:
        for exchange in found:
            del vars(exchange)["forward"]


def exchanges_now(exchange: Any, training: bool) -> bool:
    """Return True if DeepSpeed's module exchanges tokens in calls of a model in this mode."""
    return "forward" not in vars(exchange) and (
        training or not getattr(exchange, "disable_in_eval", False)
    )


def _communicates(function: FunctionType) -> bool:
    """Return True if a function calls torch.distributed, or is of a sequence-parallel package."""
    names = names_in(function.__code__)
    values = [function, *map(function.__globals__.get, names)]
    origins = (str(getattr(value, "__module__", "")) for value in values)
    return (
        "distributed" in names
        or any(value is torch.distributed for value in values)
        or any(origin.startswith(("torch.distributed", *_OF_SEQUENCES)) for origin in origins)
    )


def _groups_of(module: nn.Module) -> list[Group]:
    """Return the process groups among which a module's parameters are sharded."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    # of ZeRO-3
    found = [getattr(each, "ds_process_group", None) for each in module._parameters.values()]
    if fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel):
        # the second of hybrid sharding
        found += [module.process_group, getattr(module, "_inter_node_pg", None)]
    elif hasattr(module, "_get_fsdp_state"):  # fully_shard
        state: Any = module._get_fsdp_state()  # type: ignore[operator]
        sharded = getattr(state, "_fsdp_param_groups", None)
        # one group up to torch 2.10
        for part in [state._fsdp_param_group] if sharded is None else sharded:
            mesh = getattr(part, "mesh_info", None)
            found += [
                getattr(mesh, f"{kind}_process_group", None) for kind in ("shard", "replicate")
            ]
    return [group for group in found if group is not None]
