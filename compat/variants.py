"""Variants of a tiny configuration that each change the value of one field which may change what a
model does.

Bools are flipped, numbers are given and taken away and made 0, 1 and more, thresholds are made
small enough for the auditor's documents to cross them, strings go through their choices, and rotary embeddings through their types."""

from __future__ import annotations

import dataclasses
import json
import re
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autopack.inspection.modules import configs_of
from autopack.proving import configuration
from autopack.tiny import rules

CROSSED = 4
"""For windows, floors and chunks: less than most of the auditor's documents have tokens."""
BETWEEN = 8
"""For the lengths at which rotary embeddings change: some of the auditor's documents are longer and
some shorter."""
FITTING = 16
"""For the number of positions: every document of the auditor fits, a row of them does not."""

_CHOICES: dict[str, list[Any]] = json.loads(Path(__file__).with_name("choices.json").read_text())
"""Choices of strings that no annotation spells out."""

_KINDS = ("full_attention", "sliding_attention")
_POSITIONS = "max_position_embeddings n_positions n_ctx max_seq_len max_target_positions max_source_positions".split()
_SWITCHED = re.compile(
    r"first_k_dense_replace|n(um)?_(local_|routed_|shared_)*experts|(\w+_)?shared_\w+|num_kv_shared_layers|num_dense_layers"
    r"|hidden_size_per_layer_input|type_vocab_size|swiglu_limit"
)
"""Sizes that switch something off where they are 0."""
_OR_NONE = re.compile("layer|window|offset|before|after|shared|floor")
"""Whole numbers that may be 0."""
_FIXED = frozenset({"is_encoder_decoder", "_experts_implementation_internal", "num_labels"})


@dataclass(frozen=True)
class Variant:
    """One field of one part of a configuration, by the part's path, and the value that it gets;
    `also` goes with it."""

    path: tuple[str, ...]
    model_type: str
    field: str
    value: Any
    also: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        """The change in words."""
        extra = "".join(f", {name}={_short(value)}" for name, value in self.also)
        return f"{self.model_type}.{self.field}={_short(self.value)}{extra}"

    def overrides(self) -> dict[str, Any]:
        """Arguments of `tiny.build`."""
        inner: Any = {self.field: self.value, **dict(self.also)}
        for name in reversed(self.path):
            inner = {name: inner}
        return dict(inner)


def variants(model: Any, whole: Any) -> Iterator[Variant]:
    """All variants of a tiny model, whose class took `whole` or a part of it."""
    parts = dict(_parts(whole, ()))
    read = [
        model.config,
        *configs_of([module for module in model.modules() if hasattr(module, "config")]),
    ]
    text = [model.config.get_text_config(decoder=True), model.config.get_text_config(encoder=True)]
    for path, part in parts.items():
        like = [config for config in read if type(config) is type(part)]
        if like and (not path or _is_text(part, text)):
            yield from _of_part(path, like[0])


def _is_text(part: Any, text: list[Any]) -> bool:
    return any(type(part) is type(each) for each in text)


def _parts(config: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield path, config
    for name, value in vars(config).items():
        if hasattr(value, "to_diff_dict") and value.model_type:
            yield from _parts(value, (*path, name))


def _of_part(path: tuple[str, ...], part: Any) -> Iterator[Variant]:
    hints = _annotations(type(part))
    for field, value in vars(part).items():
        if field in _POSITIONS and isinstance(value, int):
            yield Variant(path, part.model_type, field, FITTING)
        if configuration.is_neutral(field, value) or field in _FIXED or field.startswith("_"):
            continue
        if isinstance(value, dict):
            for changed, also in _of_dict(part, field, value):
                yield Variant(path, part.model_type, field, changed, also)
        elif hasattr(value, "to_diff_dict"):
            if not getattr(value, "model_type", ""):
                inner_hints = _annotations(type(value))
                for name, inner in vars(value).items():
                    if not configuration.is_neutral(name, inner) and not name.startswith("_"):
                        for changed in _values(name, inner, inner_hints.get(name)):
                            yield Variant((*path, field), part.model_type, name, changed)
        else:
            for changed in _values(field, value, hints.get(field)):
                yield Variant(path, part.model_type, field, changed, _depth(part, field, changed))
                if (
                    "sliding" in field
                    and not changed
                    and "sliding_attention" in (kinds := _kinds(part))
                ):
                    full = ["full_attention"] * len(kinds)
                    yield Variant(path, part.model_type, field, changed, (("layer_types", full),))
    for count in (1, 3):
        yield Variant(path, part.model_type, "num_labels", count)


def _kinds(part: Any) -> list[Any]:
    return list(vars(part).get("layer_types") or ())


def _depth(part: Any, field: str, value: Any) -> tuple[tuple[str, Any], ...]:
    """The number of layers that goes with a list of kinds of layers, where tiny models do not see
    to it by themselves, and that the last layers share no keys, for which each of them needs one of
    its kind before."""
    if field == "layer_types" and vars(part).get("num_kv_shared_layers"):
        return (("num_kv_shared_layers", 0),)
    kinds = (
        isinstance(value, list)
        and all(isinstance(entry, str) for entry in value)
        and len(value) > 1
    )
    name = next((name for name in rules.DEPTH if name in vars(part)), None)
    return ((name, len(value)),) if kinds and name and field not in rules.PER_LAYER else ()


def _values(field: str, value: Any, hint: Any) -> Iterator[Any]:
    """Values of other words than the present one."""
    # A router in float16 rounds by the shape of its batch, in stock too, by more than what is told
    # from a leak.
    choices = [
        choice for choice in (*_CHOICES.get(field, ()), *_literals(hint)) if choice != "float16"
    ]
    optional = hint is None or type(None) in typing.get_args(hint) or "None" in str(hint)
    if choices:
        yield from (
            choice
            for choice in dict.fromkeys(map(_hashable, choices))
            if choice != _hashable(value)
        )
        return
    if configuration.is_size(field):
        if field == "pad_token_id":
            yield 2 if value is None else None
        elif isinstance(value, (int, float)) and value:
            if optional and hint is not None:
                yield None
            if _SWITCHED.fullmatch(field):
                yield 0
        elif not value and not isinstance(value, (list, tuple)):
            yield rules.FIELDS.get(field, 2)
    elif isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        numbers = (0, 1, 3) if value < 1 or _OR_NONE.search(field) else (1, 3)
        yield from (
            n for n in numbers if configuration.number_word(n) != configuration.number_word(value)
        )
        if value > 12:
            yield CROSSED
        if optional and hint is not None:
            yield None
    elif isinstance(value, float):
        yield 0.0 if value else 0.5
        if optional and hint is not None:
            yield None
    elif value is None:
        yield from _given(str(hint))
    elif isinstance(value, (list, tuple)):
        yield from _lists(field, list(value), optional)


def _given(hint: str) -> Iterator[Any]:
    if "list" in hint:
        yield from ([0], [0, 1])
    elif "bool" in hint:
        yield from (True, False)
    elif "int" in hint or hint == "None":
        yield from (CROSSED, 1)
    elif "float" in hint:
        yield 0.5


def _lists(field: str, value: list[Any], optional: bool) -> Iterator[Any]:
    if field in rules.PER_LAYER or (value and all(isinstance(entry, str) for entry in value)):
        kinds = list(dict.fromkeys(value))
        if set(kinds) <= {*_KINDS, "chunked_attention"}:
            kinds = list(dict.fromkeys([*kinds, *_KINDS]))
        if all(isinstance(kind, int) for kind in kinds) and set(kinds) <= {0, 1}:
            kinds = [1, 0]
        if not all(isinstance(kind, (str, int)) for kind in kinds):
            return
        yield from ([kind, kind] for kind in kinds)
        if len(kinds) > 1:  # of which the fuzz draws other orders
            yield from (other for other in (kinds, kinds[::-1]) if other != value)
    elif all(type(entry) is int for entry in value):
        yield from (other for other in ([], [0], [1], [0, 1]) if other != value)


def _of_dict(
    part: Any, field: str, value: dict[str, Any]
) -> Iterator[tuple[Any, tuple[tuple[str, Any], ...]]]:
    if "rope_type" in value:
        yield from _rotary(part, value)
    for name, inner in value.items():
        if name == "rope_type" or not isinstance(name, str):
            continue  # numbers are keys of tables
        if isinstance(inner, dict):
            for changed, also in _of_dict(part, f"{field}.{name}", inner):
                yield {**value, name: changed}, also
        elif not configuration.is_neutral(name, inner) and not configuration.is_size(
            f"{field}.{name}"
        ):
            for changed in _values(name, inner, type(inner)):
                yield {**value, name: changed}, ()


def _rotary(part: Any, value: dict[str, Any]) -> Iterator[tuple[Any, tuple[tuple[str, Any], ...]]]:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    stored = vars(part)  # of layers that differ, the attribute itself has no one value
    width = stored.get("qk_rope_head_dim") or stored.get("head_dim")
    if width is None:
        if {"hidden_size", "num_attention_heads"} - {*stored, *getattr(part, "attribute_map", {})}:
            return  # a part of this one has the layers
        width = part.hidden_size // part.num_attention_heads
    share = value.get("partial_rotary_factor") or stored.get("partial_rotary_factor") or 1.0
    pairs = int(width * share) // 2
    lists = {"short_factor": [1.0] * pairs, "long_factor": [1.5] * pairs}
    extra: dict[str, dict[str, Any]] = {
        "linear": {"factor": 2.0},
        "dynamic": {"factor": 2.0},
        "yarn": {"factor": 2.0, "original_max_position_embeddings": BETWEEN},
        "longrope": {"factor": 2.0, "original_max_position_embeddings": BETWEEN, **lists},
        "llama3": {"factor": 2.0, "original_max_position_embeddings": BETWEEN}
        | {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    }
    also: tuple[tuple[str, Any], ...] = (("max_position_embeddings", BETWEEN),)
    # "proportional" is Gemma 4's alone, which has it as it is.
    for kind in ("default", *sorted({*ROPE_INIT_FUNCTIONS} - {"proportional"})):
        if kind != value["rope_type"]:
            grows = also if kind == "dynamic" else ()
            if kind == "longrope" and "original_max_position_embeddings" in stored:
                grows = (("original_max_position_embeddings", BETWEEN),)
            yield {**value, "rope_type": kind, **extra.get(kind, {})}, grows


def _annotations(cls: Any) -> dict[str, Any]:
    if not dataclasses.is_dataclass(cls):
        return {}
    try:
        return typing.get_type_hints(cls)
    except (NameError, TypeError):  # names that are imported for type checkers alone
        return {field.name: field.type for field in dataclasses.fields(cls)}


def _literals(hint: Any) -> list[Any]:
    if typing.get_origin(hint) is typing.Literal:
        return list(typing.get_args(hint))
    return [value for part in typing.get_args(hint) for value in _literals(part)]


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _short(value: Any) -> str:
    return str(value.get("rope_type", value) if isinstance(value, dict) else value)
