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

_CHOICES: dict[str, list[Any]]
_ROTARY: dict[str, dict[str, Any]]
_CHOICES, _ROTARY = json.loads(Path(__file__).with_name("choices.json").read_text()).values()
"""Choices of strings that no annotation spells out, and numbers that go with types of rotary
embeddings."""
_GROWS = {
    "dynamic": "max_position_embeddings",
    "longrope": "original_max_position_embeddings",
}
"""Numbers of positions beside a type of rotary embeddings, which then change with the length."""
Also = tuple[tuple[str, Any], ...]
"""Fields that go with a changed one, and their values."""

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
    also: Also = ()

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
    read = [
        model.config,
        *configs_of([module for module in model.modules() if hasattr(module, "config")]),
    ]
    buffers = model.named_buffers()
    pairs = max((len(found) for name, found in buffers if name.endswith("inv_freq")), default=0)
    text = [model.config.get_text_config(decoder=True), model.config.get_text_config(encoder=True)]
    for path, part in _parts(whole, ()):
        like = [config for config in read if type(config) is type(part)]
        if not like or (path and not any(type(part) is type(each) for each in text)):
            continue
        stored, hints = vars(like[0]), _annotations(type(part))
        for field, value in stored.items():
            for changed, also in _changed(stored, field, value, hints.get(field), pairs):
                yield Variant(path, part.model_type, field, changed, also)
        for count in (1, 3):
            yield Variant(path, part.model_type, "num_labels", count)


def _parts(config: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield path, config
    for name, value in vars(config).items():
        if hasattr(value, "to_diff_dict") and value.model_type:
            yield from _parts(value, (*path, name))


def _changed(
    stored: dict[str, Any], field: str, value: Any, hint: Any, pairs: int
) -> Iterator[tuple[Any, Also]]:
    """Other values of a field, or of what stands in it, with the fields of a configuration that go
    with each."""
    name = field.rpartition(".")[2]
    if field in _POSITIONS and isinstance(value, int):
        yield FITTING, ()
    if configuration.is_neutral(name, value) or name in _FIXED or name.startswith("_"):
        return
    inside: dict[Any, Any] = {}
    if isinstance(value, dict):
        inside, hints = value, {each: type(found) for each, found in value.items()}
        if "rope_type" in value:
            yield from _rotary(stored, value, pairs)
    elif hasattr(value, "to_diff_dict"):  # one without a type has its place alone
        inside = {} if getattr(value, "model_type", "") else vars(value)
        hints = _annotations(type(value))
    elif field == name or not configuration.is_size(field):
        for changed in _values(name, value, hint):
            yield changed, _depth(stored, field, changed)
    for each, found in inside.items():
        if isinstance(each, str) and each != "rope_type":  # numbers are keys of tables
            for changed, also in _changed(stored, f"{field}.{each}", found, hints.get(each), pairs):
                yield {**(value if isinstance(value, dict) else {}), each: changed}, also


def _depth(stored: dict[str, Any], field: str, value: Any) -> Also:
    """The number of layers that goes with a list of kinds of layers, where tiny models do not see
    to it by themselves, and that the last layers share no keys, for which each of them needs one of
    its kind before."""
    if field == "layer_types" and stored.get("num_kv_shared_layers"):
        return (("num_kv_shared_layers", 0),)
    kinds = (
        isinstance(value, list)
        and all(isinstance(entry, str) for entry in value)
        and len(value) > 1
    )
    name = next((name for name in rules.DEPTH if name in stored), None)
    return ((name, len(value)),) if kinds and name and field not in rules.PER_LAYER else ()


def _values(field: str, value: Any, hint: Any) -> Iterator[Any]:
    """Values of other words than the present one."""
    # A router in float16 rounds by the shape of its batch, in stock too, by more than what is told
    # from a leak.
    choices = [each for each in (*_CHOICES.get(field, ()), *_literals(hint)) if each != "float16"]
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


def _rotary(
    stored: dict[str, Any], value: dict[str, Any], pairs: int
) -> Iterator[tuple[Any, Also]]:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    lists = {"short_factor": [1.0] * pairs, "long_factor": [1.5] * pairs}
    # "proportional" is Gemma 4's alone, which has it as it is.
    for kind in ("default", *sorted({*ROPE_INIT_FUNCTIONS} - {"proportional"})):
        if kind != value["rope_type"]:
            field = _GROWS.get(kind, "")
            grows = ((field, BETWEEN),) if kind == "dynamic" or field in stored else ()
            more = {**_ROTARY.get(kind, {}), **(lists if kind == "longrope" else {})}
            yield {**value, "rope_type": kind, **more}, grows


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
