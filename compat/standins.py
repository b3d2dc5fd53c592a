"""CPU stand-ins for kernels that need CUDA: the same signatures, computed densely in plain torch.

They let the whole way to the kernel run on a CPU: transformers' own dispatch, argument processing
and signature checks included. A stand-in refuses what the kernel refuses, and computes just what
its arguments say."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from functools import wraps
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from compat import signatures
from compat.old_releases import bound_at_import


def attend_densely(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: Any = None,
    max_seqlen_k: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    softcap: float | None = None,
    learnable_sink: torch.Tensor | None = None,
    deterministic: bool = False,
) -> torch.Tensor:
    """Attention over (tokens, heads, head size), dense, with one mask for all documents; or over
    (rows, tokens, heads, head size) where no bounds are given."""
    if cu_seqlens_q is None or cu_seqlens_k is None:
        (rows, length), other = q.shape[:2], k.shape[1]
        q, k, v = (t.flatten(0, 1) for t in (q, k, v))
        of_q, of_k = (torch.arange(rows + 1, dtype=torch.int32) * n for n in (length, other))
        settings = (softmax_scale, causal, window_size, softcap, learnable_sink)
        found = attend_densely(q, k, v, of_q, of_k, length, other, *settings)
        return found.unflatten(0, (rows, length))
    check_bounds("q", cu_seqlens_q, len(q), max_seqlen_q)
    check_bounds("k", cu_seqlens_k, len(k), max_seqlen_k)
    if not q.shape[-1] == k.shape[-1] == v.shape[-1]:
        raise RuntimeError("query, key and value must have the same head dimension")
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    k, v = (by_head(q, t) for t in (k, v))
    scores = scores_within(
        q, k, cu_seqlens_q, cu_seqlens_k, scale, causal, window_size, softcap or 0.0
    )
    if learnable_sink is not None:
        sink = learnable_sink[:, None, None].expand(-1, len(q), 1)
        scores = torch.cat([scores, sink], dim=-1)
    weights = scores.softmax(-1)[..., : len(k)]
    return torch.einsum("hqk,khd->qhd", weights, v).contiguous()


def check_bounds(name: str, bounds: torch.Tensor, total: int, longest: Any) -> None:
    """Raise where a kernel does not take the bounds of documents in so many tokens."""
    if bounds.dtype != torch.int32 or not bounds.is_contiguous():
        raise RuntimeError(f"cu_seqlens_{name} must have dtype int32, found {bounds.dtype}")
    if not isinstance(longest, int):
        raise TypeError(f"max_seqlen_{name} must be an int, found {type(longest).__name__}")
    if int(bounds[0]) != 0 or int(bounds[-1]) != total:
        raise RuntimeError(
            f"cu_seqlens_{name} must cover the {total} tokens, found {bounds.tolist()}"
        )
    if longest < int(bounds.diff().max()):
        raise RuntimeError(f"max_seqlen_{name}={longest} is less than the longest sequence")


def by_head(query: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """Keys or values (tokens, heads, head size), repeated for every head of the query."""
    if query.shape[1] % states.shape[1]:
        raise RuntimeError("number of heads in key/value must divide number of heads in query")
    return states.repeat_interleave(query.shape[1] // states.shape[1], dim=1)


def scores_within(
    query: torch.Tensor,
    key: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    scale: float,
    causal: bool,
    window: tuple[int | None, int | None],
    softcap: float = 0.0,
) -> torch.Tensor:
    """Logits (heads, queries, keys) of (tokens, heads, head size) states, -inf across documents and
    out of reach.

    The last query of a document stands at its last key, as in flash-attn since 2.1 ("aligned to the
    bottom right")."""
    number_q, place_q = _places(cu_seqlens_q, len(query))
    number_k, place_k = _places(cu_seqlens_k, len(key))
    place_q = place_q + (cu_seqlens_k.diff() - cu_seqlens_q.diff()).long()[number_q]
    distance = place_q[:, None] - place_k[None, :]
    visible = number_q[:, None] == number_k[None, :]
    if causal:
        visible &= distance >= 0
    before, after = (None if w is None or w < 0 else w for w in window)
    if before is not None:
        visible &= distance <= before
    if after is not None:
        visible &= -distance <= after
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    return scores.masked_fill(~visible, float("-inf"))


def _places(bounds: torch.Tensor, total: int) -> tuple[torch.Tensor, torch.Tensor]:
    number = torch.bucketize(torch.arange(total), bounds[1:-1].long(), right=True)
    return number, torch.arange(total) - bounds.long()[number]


def pad_input(hidden: torch.Tensor, indices: torch.Tensor, batch: int, seqlen: int) -> torch.Tensor:
    """flash-attn's function of this name."""
    whole = hidden.new_zeros(batch * seqlen, *hidden.shape[1:])
    whole[indices] = hidden
    return whole.view(batch, seqlen, *hidden.shape[1:])


def unpad_input(hidden: torch.Tensor, attention_mask: torch.Tensor, unused_mask: Any = None) -> Any:
    """flash-attn's function of this name."""
    lengths = attention_mask.sum(dim=-1, dtype=torch.int32)
    indices = attention_mask.flatten().nonzero().flatten()
    bounds = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return hidden.flatten(0, 1)[indices], indices, bounds, int(lengths.max()), lengths


def of_signature(package: str, name: str, compute: Callable[..., Any]) -> Callable[..., Any]:
    """A function with the signature that a published package gives it. `compute` gets the arguments
    that it takes, by their names; the others must have their defaults."""
    signature, heeded = signatures.signature(package, name), inspect.signature(compute).parameters

    def stand_in(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        for argument, value in given.arguments.items():
            default = signature.parameters[argument].default
            if (
                default is not inspect.Parameter.empty
                and argument not in heeded
                and value not in (default, None)
            ):
                raise NotImplementedError(
                    f"the stand-in of {name} computes nothing for {argument}={value!r}"
                )
        given.apply_defaults()
        return compute(**{name: v for name, v in given.arguments.items() if name in heeded})

    stand_in.__name__ = name
    vars(stand_in)["__signature__"] = signature  # transformers asks what a function takes
    return stand_in


def _paged(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError("the stand-in has no paged cache")


def _module(name: str, **contents: Any) -> dict[str, Any]:
    module = ModuleType(name)
    vars(module).update(contents)
    return {name: module}


def _functions(package: str, compute: Callable[..., Any]) -> dict[str, Any]:
    made = {name: of_signature(package, name, compute) for name in signatures.OF_FLASH}
    return {**made, "flash_attn_with_kvcache": _paged}


def flash_2_of(compute: Callable[..., Any]) -> dict[str, ModuleType]:
    """The modules of flash-attn 2, whose functions hand their arguments to `compute`."""
    padding = _module("flash_attn.bert_padding", pad_input=pad_input, unpad_input=unpad_input)
    own = {"__version__": "2.8.3", "bert_padding": padding["flash_attn.bert_padding"]}
    return _module("flash_attn", **own, **_functions(signatures.FLASH_2, compute)) | padding


def _flash_4() -> dict[str, ModuleType]:
    with_nothing = wraps(attend_densely)(lambda **given: (attend_densely(**given), None))
    cute = _module("flash_attn.cute", **_functions(signatures.FLASH_4, with_nothing))
    return _module("flash_attn", cute=cute["flash_attn.cute"]) | cute


_FLASH: dict[str, Callable[[], dict[str, ModuleType]]] = {
    "flash_attention_2": lambda: flash_2_of(attend_densely),
    "flash_attention_3": lambda: _module(
        "flash_attn_interface", **_functions(signatures.FLASH_3, attend_densely)
    ),
    "flash_attention_4": _flash_4,
}


@contextlib.contextmanager
def loadable(modules: dict[str, ModuleType]) -> Iterator[None]:
    """Make modules importable. Other modules that are imported meanwhile stay (mock.patch.dict
    would drop them)."""
    for name, module in modules.items():
        module.__spec__ = ModuleSpec(name, None)
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name, earlier in before.items():
            if earlier is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = earlier


def integration_of(kernel: str) -> ModuleType | None:
    """transformers' module for a kernel; None in releases in which every modeling file calls it by
    itself."""
    name = f"transformers.integrations.{kernel}"
    return import_module(name) if find_spec(name) is not None else None


_LOADED = """_loaded_implementation _flash_fn _flash_varlen_fn _flash_with_kvcache_fn _pad_fn _unpad_fn
_process_flash_kwargs_fn _process_with_kvcache_kwargs_fn _is_fa3 _flash_supports_window""".split()
"""What transformers keeps of the implementation that it has loaded."""


@contextlib.contextmanager
def loaded_as(implementation: str, modules: dict[str, ModuleType]) -> Iterator[ModuleType]:
    """Have transformers' own loader find modules as a flash implementation; yields the loader."""
    from transformers import modeling_flash_attention_utils as flash

    with contextlib.ExitStack() as stack:
        stack.enter_context(loadable(modules))
        for number in "234":
            name, answer = f"is_flash_attn_{number}_available", number == implementation[-1]
            if hasattr(flash, name):
                stack.enter_context(mock.patch.object(flash, name, return_value=answer))
        for name in _LOADED:
            if hasattr(flash, name):
                stack.enter_context(mock.patch.object(flash, name, None))
            else:  # 4.54 has none before it has loaded one
                stack.callback(vars(flash).pop, name, None)
        yield flash


@contextlib.contextmanager
def flash_standin(implementation: str = "flash_attention_2") -> Iterator[None]:
    """Make a flash implementation loadable on a CPU, by transformers' own loader."""
    with contextlib.ExitStack() as stack:
        flash = stack.enter_context(loaded_as(implementation, _FLASH[implementation]()))
        for name, function in bound_at_import(flash, _FLASH["flash_attention_2"]()).items():
            stack.enter_context(mock.patch.object(flash, name, function, create=True))
        # Half-precision tensors never get there; float32, which real kernels refuse, need not be
        # cast for a stand-in.
        integration = integration_of("flash_attention")
        if integration is None:  # up to 4.47
            pass
        elif hasattr(integration, "get_target_dtype"):
            stack.enter_context(
                mock.patch.object(integration, "get_target_dtype", return_value=None)
            )
        else:
            # It takes the dtype of the first linear layer, and GPT-2's attention has none.
            layer = torch.nn.Linear(1, 1)
            first = mock.patch.object(
                integration, "next", lambda found: next(found, layer), create=True
            )
            stack.enter_context(first)
        yield


def set_implementation(model: Any, implementation: str) -> None:
    """Give a model an attention implementation past the checks that want the hardware."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "_attn_implementation_internal"):
            config._attn_implementation_internal = implementation


@contextlib.contextmanager
def flex_standin(broadcast: bool = False) -> Iterator[None]:
    """Compute `flex_attention` densely, with backward, where transformers would call the compiled
    kernel.

    With `broadcast`, rules of masks are asked for all their places at once and not through vmap,
    which takes most of the time; they have to be made of functions that broadcast."""
    from torch.nn.attention import flex_attention as torch_flex
    from transformers.integrations import flex_attention as flex

    def reference(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, training: bool = False, *,
        score_mod: Any = None, block_mask: Any = None, scale: float | None = None, enable_gqa: bool = False,
        kernel_options: Any = None, return_lse: bool = False, return_aux: Any = None,
    ) -> Any:  # fmt: skip
        if return_aux is not None:
            raise NotImplementedError("transformers asks for nothing else on a CPU")
        if query.shape[1] != key.shape[1]:
            if not enable_gqa:
                raise ValueError("query and key heads differ, and enable_gqa is False")
            key, value = (
                t.repeat_interleave(query.shape[1] // t.shape[1], dim=1) for t in (key, value)
            )
        rows, heads, queries, keys = query.shape[0], query.shape[1], query.shape[2], key.shape[2]
        scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scale is None else scale)
        if score_mod is not None:
            places = _places_of((rows, heads, queries, keys))
            # Where it indexes step by step, as before 4.50, it does not broadcast, or to too many
            # axes for one token.
            modified = None
            with contextlib.suppress(IndexError):
                modified = score_mod(scores, *places)
            if modified is None or modified.shape != scores.shape:
                one_by_one = torch_flex._vmap_for_bhqkv(score_mod, prefix=(0,))
                modified = one_by_one(scores, *(place.flatten() for place in places))
            scores = modified
        if block_mask is not None:
            visible = torch_flex.create_mask(
                block_mask.mask_mod, rows, heads, queries, keys, device="cpu"
            )
            scores = scores.masked_fill(~visible, float("-inf"))
        # the kernels give what sees nothing zeros
        blind = (scores == float("-inf")).all(-1, keepdim=True)
        attended = scores.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0) @ value
        return (attended, scores.logsumexp(-1)) if return_lse else attended

    with contextlib.ExitStack() as stack:
        # before 4.50 models called the function itself, and before 4.53 there was no module of
        # masks
        named = "compile_friendly_flex_attention"
        stack.enter_context(
            mock.patch.object(flex, named if hasattr(flex, named) else "flex_attention", reference)
        )
        # Masks are made without compiling, by functions that stay transformers' own.
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        if broadcast:
            stack.enter_context(mock.patch.object(torch_flex, "create_mask", _mask_by_broadcasting))
        yield


def _mask_by_broadcasting(
    rule: Any, rows: int | None, heads: int | None, queries: int, keys: int, device: Any = None
) -> torch.Tensor:
    """What `create_mask` of torch gives for a rule of a mask, without vmap."""
    sizes = (rows or 1, heads or 1, queries, keys)
    return rule(*_places_of(sizes, device)).expand(sizes).clone()


def _places_of(sizes: tuple[int, ...], device: Any = None) -> list[torch.Tensor]:
    """The places along each dimension, in shapes that broadcast."""
    return [
        torch.arange(n, device=device).view([-1 if a == b else 1 for b in range(4)])
        for a, n in enumerate(sizes)
    ]


def taken_for_kernels(handle: Any) -> None:
    """Have an enabled model share rows by its stand-ins as by the kernels themselves, which have
    twins on a GPU."""
    handle.enabled.unknown_code, handle.enabled.said_by_twins = None, {("prefixes",): None}


_FLAGS = {"sdpa": "sdpa", "flex_attn": "flex_attention", "flash_attn": "flash_attention"}
_FLAGS["flash_attn_2"] = "flash_attention"  # as 4.x spelled it


def supported_implementations(model: Any) -> set[str]:
    """Return the attention implementations that the model's class declares, such as sdpa."""
    return {
        "eager",
        *(name for flag, name in _FLAGS.items() if getattr(model, f"_supports_{flag}", False)),
    }
