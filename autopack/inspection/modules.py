"""The parts of a model that matter for packing, found by their code, hardly ever by names."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from types import FunctionType
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from autopack.errors import SiteDrift
from autopack.inspection.foreign import found_by_name, is_of_library
from autopack.inspection.source import (
    adds_up_mask,
    attends_by_itself,
    class_of,
    dispatching_functions,
    is_causal,
    parameters_of,
)

_OF_TORCH = (nn.Module, nn.Embedding, nn.Linear, nn.LayerNorm, nn.Dropout)
_QUERIES = "query_embeds"
_ACROSS = re.compile(r"cross|encdec|(^|\.)(encoder_attn|encoder_decoder_attention)(\.|$)")


class Anatomy:
    """The parts of one model.

    `entries` are the model and the models inside it that can be called with tokens, the outermost
    first. `attention` are the modules that attend through transformers' interface. `mixers` are the
    modules that mix tokens in another way, or count them. `towers` are the attention modules of
    parts that take no tokens, which pack by themselves. `within_token` are the modules that attend
    within each token or within media. `halves` are the encoder and the decoder, of a model that has
    both. `checkpointed` are the modules that may hold a gradient checkpointing function. `chunked`
    are the modules that may take some tokens at a time: `chunk_size_feed_forward` of them, 0 for
    all. `configs` are the configurations that entries and attention modules read.

    `causal` is True if any attention hides later tokens, `one_way` if all attention does.
    `counts_along_mask` is True if the model's code adds up a mask to number tokens.
    `has_row_dependent_rotary` is True if rotary frequencies depend on the longest position of a
    call.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        mixing: Collection[str],
        attending: Collection[str],
        within: Collection[str],
    ) -> None:
        """Find the parts of a model by names of classes.

        Classes in `mixing` mix tokens; the ones that are also in `attending` attend. All attention
        of classes in `within` is over parts of a token or of media.
        """
        outer, found = mixers(model, within), attention_modules(model)
        inside = {part for module in outer for part in module.modules()}
        self.model_type = model.config.model_type
        self.entries = entries(model)
        self.attention = [module for module in found if module not in inside]
        self.mixers = mixers(model, mixing)
        self.towers = towers(model)
        self.within_token = list(
            dict.fromkeys([*outer, *(module for module in found if module in inside)])
        )
        self.halves = halves(model)
        self.checkpointed = checkpointed(model)
        self.chunked = [
            module for module in model.modules() if "chunk_size_feed_forward" in vars(module)
        ]
        self.configs = configs_of([*self.entries, *self.attention])
        causal = [
            is_causal(module, model.config)
            for module in [*self.attention, *mixers(model, attending)]
        ]
        self.causal, self.one_way = any(causal), all(causal)
        self.counts_along_mask = adds_up_mask(self.entries, self.configs)
        self.has_row_dependent_rotary = bool(row_dependent_rotaries(model))

    @property
    def mixing(self) -> list[nn.Module]:
        """All modules that mix tokens, or count them."""
        return [*self.attention, *self.mixers]

    @property
    def indifferent(self) -> list[nn.Module]:
        """The attention modules that mix no tokens of documents."""
        return [*self.towers, *self.within_token]

    def in_decoder(self, module: nn.Module) -> bool | None:
        """Return True for a module in the decoder, False in the encoder, None in neither."""
        for decodes, half in enumerate(self.halves or ()):
            if module in set(half.modules()):
                return bool(decodes)
        return None


def attention_modules(root: nn.Module) -> list[nn.Module]:
    """Return the modules under `root` that call an attention function of transformers' interface.

    Sub-models that take neither tokens nor embeddings (vision and audio towers) are left out: they
    pack by themselves.
    """
    return _of_classes(_text_modules(root), dispatching_functions)


def towers(root: nn.Module) -> list[nn.Module]:
    """Return the modules of vision and audio towers that call transformers' attention interface."""
    return _of_classes(_modules_of_media(root), dispatching_functions)


def _modules_of_media(root: nn.Module) -> list[nn.Module]:
    """Return the modules of a model that work on images or sounds, not on text."""
    inside = set(_text_modules(root))
    return [module for module in root.modules() if module not in inside]


def _of_classes(modules: Iterable[nn.Module], wanted: Callable[[Any], Any]) -> list[nn.Module]:
    """Return the modules for whose class `wanted` returns True; it is called once per class."""
    walked = list(modules)
    kinds = list(map(class_of, walked))
    classes = {cls for cls in set(kinds) if wanted(cls)}
    return [module for module, kind in zip(walked, kinds, strict=True) if kind in classes]


def handed_others_positions(root: PreTrainedModel) -> list[nn.Module]:
    """Return the models of media inside `root` that may be handed the positions of tokens.

    A forward that takes positions by `**kwargs` hands them on to all parts. These models do not
    name them either, or number tokens beside queries.
    """
    if all("position_ids" in parameters_of(class_of(entry)).names for entry in entries(root)):
        return []
    parts = [part for part in _modules_of_media(root) if isinstance(part, PreTrainedModel)]
    taken = (parameters_of(class_of(part)).names for part in parts)
    return [
        part
        for part, names in zip(parts, taken, strict=True)
        if "position_ids" not in names or _QUERIES in names
    ]


def row_dependent_rotaries(root: nn.Module) -> list[nn.Module]:
    """Return the rotary modules under `root` that depend on a call's longest position."""
    # of each kind of layer
    kinds = ((module, str(module.__dict__.get("rope_type"))) for module in root.modules())
    return [module for module, kind in kinds if "dynamic" in kind or "longrope" in kind]


def mixers(root: nn.Module, names: Collection[str]) -> list[nn.Module]:
    """Return modules for text under `root` whose class, or a base of it, has one of the names."""
    # By the names of the bases too: FSDP puts modules into a class of its own that derives from
    # theirs.
    return _of_classes(
        _text_modules(root), lambda kind: any(cls.__name__ in names for cls in kind.__mro__)
    )


def attending_by_themselves(root: nn.Module, mixers: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the outermost modules under `root`, outside `mixers`, that attend by themselves."""
    # A class inside a function cannot be found again by its name, so nothing can stand at its
    # forward.
    attending = _of_classes(
        _text_modules(root), lambda c: attends_by_itself(c) and found_by_name(defining_class(c))
    )
    inside = {part for mixer in mixers for part in mixer.modules()}
    found = []
    for module in attending:  # outer ones first
        if module not in inside:
            found.append(module)
            inside.update(module.modules())
    return found


def counting_columns(
    root: nn.Module, mixers: Iterable[nn.Module]
) -> tuple[list[nn.Module], list[nn.Module]]:
    """Return (position tables, embeddings that hold one) under `root` that number tokens by column.

    They are embeddings of positions, and embeddings of tokens that hold such a table. They are
    found by their names; an audit checks the result.
    """
    inside = {part for mixer in mixers for part in mixer.modules()}
    tables, whole = [], []
    for module in _text_modules(root):
        if (
            module in inside
            or isinstance(module, PreTrainedModel)
            or defining_class(type(module)) in _OF_TORCH
        ):
            continue
        parts = dict(module.named_children())
        holds_table = any(
            "position" in name and isinstance(part, nn.Embedding) for name, part in parts.items()
        )
        if "Position" in type(module).__name__:
            tables.append(module)
        elif holds_table and all(
            defining_class(type(part)) in _OF_TORCH for part in parts.values()
        ):
            whole.append(module)
    return tables, whole


def checkpointed(model: nn.Module) -> list[nn.Module]:
    """Return the modules, or torch's wrappers, that may hold a gradient checkpointing function."""
    # Its module is imported where there is such a wrapper.
    wrappers = sys.modules.get("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
    kind = () if wrappers is None else wrappers.CheckpointWrapper
    return [
        module
        for module in model.modules()
        if "gradient_checkpointing" in vars(module)
        or hasattr(type(module), "gradient_checkpointing")
        or isinstance(module, kind)
    ]


def defining_class(kind: type[nn.Module]) -> Any:
    """Return the class whose forward a module of class `kind` runs."""
    return next(cls for cls in kind.__mro__ if "forward" in vars(cls))


def check_forwards(model: nn.Module) -> None:
    """Raise `SiteDrift` if the forward of a class of transformers is no function, so unreadable.

    Modules of TorchScript have none; they are proven by themselves.
    """
    for kind in dict.fromkeys(map(defining_class, map(type, model.modules()))):
        forward = vars(kind)["forward"]
        is_known = is_of_library(kind) and not issubclass(kind, torch.jit.ScriptModule)
        if is_known and not isinstance(inspect.unwrap(forward), FunctionType):
            raise SiteDrift(
                f"autopack expects a function at {kind.__module__}.{kind.__qualname__}.forward; "
                f"found {type(forward).__name__}. Run `autopack doctor` to see which versions are "
                "supported.",
                code="site-drift",
            )


def entries(model: PreTrainedModel) -> list[Any]:
    """Return the model and its inner models that can be called with tokens, the outermost first.

    The model is one of them whenever it holds any, whatever it takes: the names of its tokens may
    not be known. So are the halves of an encoder-decoder, whatever their base (FSMT's are mere
    modules).
    """
    known = [module for module in _text_modules(model) if isinstance(module, PreTrainedModel)]
    halved = [half for half in halves(model) or () if not isinstance(half, PreTrainedModel)]
    found: list[Any] = [each for each in (*known, *halved) if takes_tokens(each)]
    return [model, *found] if found and found[0] is not model else found


def config_of(module: nn.Module, whole: PreTrainedModel) -> Any:
    """Return an entry's configuration: its own, or the whole's for a half that is no model."""
    return getattr(module, "config", whole.config)


def is_pair(model: nn.Module) -> bool:
    """Return True if a model takes `decoder_input_ids`, so that it has an encoder and a decoder."""
    # One of BLIP-2 may hold a decoder alone.
    decodes_alone = getattr(
        getattr(model, "config", None), "use_decoder_only_language_model", False
    )
    return not decodes_alone and "decoder_input_ids" in parameters_of(class_of(model)).names


def halves(model: PreTrainedModel) -> tuple[nn.Module, nn.Module] | None:
    """Return the encoder and the decoder of a model that has both, or None."""
    if not is_pair(model):
        return None
    # Up to 4.57 models with a head of a pair do not have it themselves.
    whole: Any = next(
        (module for module in model.modules() if hasattr(module, "get_encoder")), None
    )
    if whole is None:
        return None
    try:
        found = whole.get_encoder(), whole.get_decoder()
    except TypeError:
        # a head asks its model in another way than that answers (T5Gemma 2, up to 5.5)
        found = whole.base_model.get_encoder(), whole.base_model.get_decoder()
    return found if all(isinstance(half, nn.Module) for half in found) else None


def cross_attention(decoder: nn.Module, mixing: list[nn.Module]) -> list[nn.Module]:
    """Return those `mixing` modules that attend to the encoder: by name, or the decoder itself."""
    # The class says nothing: most decoders use one class for both.
    named = {module: name for name, module in decoder.named_modules()}
    return [
        module
        for module in mixing
        if module is decoder or _ACROSS.search(named.get(module, "").lower())
    ]


def _text_modules(root: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules of a model that work on text, not on images or sounds."""
    waiting: list[tuple[nn.Module, Any]] = [(root, getattr(root, "config", None))]
    while waiting:
        module, config = waiting.pop()
        yield module
        # Not by `children()`: enabling walks a model a dozen times.
        for child in reversed(module._modules.values()):
            if child is None:
                continue
            if not isinstance(child, PreTrainedModel):
                waiting.append((child, config))
            elif _reads_text(child, config):
                waiting.append((child, child.config))


def takes_tokens(model: nn.Module) -> bool:
    """Return True if a model takes tokens or their embeddings under transformers' names for them.

    A Q-Former's are no tokens of a row: they accompany the queries of one image (InstructBLIP).
    """
    names = set(parameters_of(class_of(model)).names)
    return (
        bool({"input_ids", "inputs_embeds", "decoder_input_ids"} & names) and _QUERIES not in names
    )


def _reads_text(model: PreTrainedModel, config: Any) -> bool:
    """Return True if an inner model is a part of the text model with this configuration."""
    names = parameters_of(class_of(model)).names
    # Decoder wrappers of encoder-decoder types have `forward(*args, **kwargs)`. A part that is a
    # model itself may take hidden states, and has the same configuration (DeBERTa's encoder, 4.47
    # to 4.50); towers have one of their own.
    return (
        takes_tokens(model)
        or not names
        or (model.config is config and names[:1] == ("hidden_states",))
    )


def configs_of(modules: list[nn.Module]) -> list[PretrainedConfig]:
    """Return the distinct configs that these modules read, by identity."""
    found: list[Any] = [getattr(module, "config", None) for module in modules]
    distinct = {id(config): config for config in found}.values()
    return [config for config in distinct if hasattr(config, "_attn_implementation")]


def device_of(model: PreTrainedModel) -> torch.device:
    """Return the device for inputs of the model."""
    try:
        holder: Any = model.get_input_embeddings()
    except NotImplementedError:  # several tables, of hashes (CANINE)
        holder = model
    if isinstance(holder, torch.Tensor):  # latents (Perceiver)
        return holder.device
    return next(holder.parameters()).device
