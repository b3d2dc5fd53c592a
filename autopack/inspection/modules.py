"""Find, in any model, where attention goes through transformers' interface: by what its code says, not by names."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from autopack.inspection.parameters import parameters_of
from autopack.inspection.source import class_of, dispatching_functions

_ACROSS = re.compile(r"cross|encdec|(^|\.)(encoder_attn|encoder_decoder_attention)(\.|$)")


def attention_modules(root: nn.Module) -> list[nn.Module]:
    """The modules under `root` that call an attention function of transformers' interface.

    Sub-models that take neither tokens nor embeddings (vision and audio towers) are left out: they pack by themselves.
    """
    return _dispatching(_text_modules(root))


def towers(root: nn.Module) -> list[nn.Module]:
    """The modules of such sub-models that call an attention function of transformers' interface."""
    inside = {id(module) for module in _text_modules(root)}
    return _dispatching(module for module in root.modules() if id(module) not in inside)


def _dispatching(modules: Iterable[nn.Module]) -> list[nn.Module]:
    known: dict[Any, bool] = {}  # for one walk only: the functions of a class may be replaced
    found = []
    for module in modules:
        cls = class_of(module)
        if cls not in known:
            known[cls] = bool(dispatching_functions(cls))
        if known[cls]:
            found.append(module)
    return found


def row_dependent_rotaries(root: nn.Module) -> list[nn.Module]:
    """The rotary modules under `root` whose frequencies depend on the longest position of a call."""
    found = []
    for module in root.modules():
        kind = module.__dict__.get("rope_type")
        names = map(str, kind.values() if isinstance(kind, dict) else [kind])
        if any("dynamic" in name or name == "longrope" for name in names):
            found.append(module)
    return found


def mixers(root: nn.Module, names: Collection[str]) -> list[nn.Module]:
    """The modules under `root` of classes of these names."""
    # By the names of the bases too: FSDP puts modules into a class of its own that derives from theirs.
    walked = list(_text_modules(root))
    kinds = {kind for kind in set(map(type, walked)) if any(cls.__name__ in names for cls in kind.__mro__)}
    return [module for module in walked if type(module) in kinds]


def checkpointed(model: nn.Module) -> list[nn.Module]:
    """The modules that may hold a gradient checkpointing function: transformers' own, and torch's wrappers."""
    # Its module is imported where there is such a wrapper.
    wrappers = sys.modules.get("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
    kind = () if wrappers is None else wrappers.CheckpointWrapper
    return [
        module for module in model.modules() if hasattr(module, "gradient_checkpointing") or isinstance(module, kind)
    ]


def forwards_of(classes: Iterable[type[nn.Module]]) -> list[tuple[str, str]]:
    """Module and path of each forward that these classes define."""
    return sorted((cls.__module__, f"{cls.__qualname__}.forward") for cls in {*classes})


def defining_class(kind: type[nn.Module]) -> Any:
    """The class whose forward modules of a class run."""
    return next(cls for cls in kind.__mro__ if "forward" in vars(cls))


def entries(model: PreTrainedModel) -> list[PreTrainedModel]:
    """The models inside a model that can be called with tokens on their own, the outermost first, after the model.

    The model is one of them whatever it takes, where it holds any: what it calls its tokens may not be known.
    """
    found = [module for module in _text_modules(model) if isinstance(module, PreTrainedModel) and takes_tokens(module)]
    return [model, *found] if found and found[0] is not model else found


def is_pair(model: nn.Module) -> bool:
    """Whether a model calls an encoder and a decoder: it takes tokens for both."""
    return "decoder_input_ids" in parameters_of(class_of(model)).names


def halves(model: PreTrainedModel) -> tuple[nn.Module, nn.Module] | None:
    """The encoder and the decoder of a model that has both, or None."""
    if not is_pair(model):
        return None
    encoder, decoder = model.get_encoder(), model.get_decoder()
    return (encoder, decoder) if isinstance(encoder, nn.Module) and isinstance(decoder, nn.Module) else None


def cross_attention(decoder: nn.Module, mixing: list[nn.Module]) -> list[nn.Module]:
    """Those of the modules `mixing` under a decoder that attend to what the encoder has made: by their names."""
    # The class says nothing: most decoders use one class for both.
    named = {id(module): name for name, module in decoder.named_modules()}
    return [module for module in mixing if _ACROSS.search(named.get(id(module), "").lower())]


def _text_modules(root: nn.Module) -> Iterator[nn.Module]:
    waiting = [root]
    while waiting:
        module = waiting.pop()
        yield module
        for child in reversed(list(module.children())):
            if not isinstance(child, PreTrainedModel) or takes_tokens(child) or _passes_all_on(child):
                waiting.append(child)


def takes_tokens(model: PreTrainedModel) -> bool:
    """Whether a model takes tokens, or embeddings of them, under the names that transformers has for them."""
    return bool({"input_ids", "inputs_embeds", "decoder_input_ids"}.intersection(parameters_of(class_of(model)).names))


def _passes_all_on(model: PreTrainedModel) -> bool:
    """Decoder wrappers of encoder-decoder types: `forward(*args, **kwargs)`."""
    return not parameters_of(class_of(model)).names


def configs_of(modules: list[nn.Module]) -> list[PretrainedConfig]:
    """The distinct configs that these modules read, by identity."""
    configs: list[Any] = [getattr(module, "config", None) for module in modules]
    return list({id(config): config for config in configs if hasattr(config, "_attn_implementation")}.values())


def device_of(model: PreTrainedModel) -> torch.device:
    """The device that inputs of the model belong on."""
    return next(model.get_input_embeddings().parameters()).device
