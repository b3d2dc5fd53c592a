"""Tiny configurations: the defaults of a type, shrunk by the rules."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import re
from collections.abc import Sequence
from typing import Any

import transformers
from transformers import PretrainedConfig
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from autopack.family import DERIVED
from autopack.options import TASKS as TASKS
from autopack.registry import families
from autopack.tiny import rules

Fields = dict[str, Any]
"""Fields of a configuration, by name; those of a part are a dictionary of their own."""


class CannotBuild(ValueError):
    """Error of a model type that the installed transformers cannot build tiny, with the reason."""

    def __init__(self, model_type: str, reason: str | BaseException) -> None:
        text = " ".join(str(reason).split())
        if isinstance(reason, BaseException):
            text = f"{type(reason).__name__}: {text}"
        super().__init__(f"cannot build a tiny {model_type!r} model: {text}")
        self.model_type = model_type
        self.reason = text


def types_for(task: str) -> list[str]:
    """Return all model types that the installed transformers maps to a task of `TASKS`, sorted.

    Types registered with transformers' auto classes in this process are among them.
    """
    registered = getattr(modeling_auto, TASKS[task])._extra_content
    return sorted(
        {
            *getattr(modeling_auto, f"{TASKS[task]}_NAMES"),
            *(added.model_type for added in registered),
        }
    )


def config(model_type: str, *, task: str = "causal-lm", **overrides: Any) -> PretrainedConfig:
    """Return a tiny configuration of `model_type`, with a layer of every kind that the type has.

    Overrides go by the type's own field names or by the common ones (`hidden_size`,
    `num_hidden_layers`). In a composite type, overrides that only its text part has go there, and a
    dictionary given for a sub-configuration is merged into the tiny one. Lists with one entry per
    layer follow an overridden number of layers. Raises `CannotBuild` if the installed transformers
    lacks the type or refuses the result.
    """
    if model_type not in CONFIG_MAPPING:
        raise CannotBuild(model_type, f"transformers {transformers.__version__} has no such type")
    return of_class(CONFIG_MAPPING[model_type], overrides, known("parts", model_type), task)


def of_class(
    config_class: type[PretrainedConfig], overrides: Fields, parts: dict[str, str], task: str = ""
) -> PretrainedConfig:
    """Return a tiny configuration of a class of any origin, shrunk as `config` shrinks a type.

    `parts` are the model types of its sub-configurations, by name. Raises `CannotBuild` if the
    class refuses them.
    """
    model_type = config_class.model_type
    own = known("configs", model_type) | (
        known("causal", model_type) if task == "causal-lm" else {}
    )
    typed: Fields = {name: {"model_type": part_type} for name, part_type in parts.items()}
    try:
        tiny = config_class(**_arguments(config_class(**typed), own, overrides))
        if task == "seq2seq" or (
            task != "causal-lm" and getattr(tiny, "is_encoder_decoder", False)
        ):
            for name, token in (("decoder_start_token_id", 2), ("pad_token_id", 0)):
                if getattr(tiny, name, None) is None:
                    setattr(tiny, name, token)
        for name, (stand_in, extra) in known("stand_ins", model_type).items():
            # past the class's __setattr__, which would insist on the type that is being replaced
            vars(tiny)[name] = config(stand_in, **extra)
    except CannotBuild:
        raise
    except Exception as error:
        raise CannotBuild(model_type, error) from error
    return tiny


def known(what: str, model_type: str) -> Fields:
    """Return a copy of the families' entry for a type in field `what` of `Tiny`, or {}."""
    found = (getattr(family.tiny, what).get(model_type) for family in families())
    return copy.deepcopy(dict(next(filter(None, found), {})))


def _arguments(default: PretrainedConfig, own: Fields, overrides: Fields) -> Fields:
    """Return the keyword arguments that make a tiny configuration of the class of `default`.

    `own` are the fields of its type beyond the general rules; the caller's overrides win over them.
    """
    present = vars(default)
    # configurations
    parts = {name: value for name, value in present.items() if hasattr(value, "to_diff_dict")}
    given = _routed(default, parts, overrides)
    depth = next((name for name in rules.DEPTH if isinstance(present.get(name), int)), "")
    arguments = _shrunk(default) | _kinds(present, present.get(depth)) | _token_ids(present)
    if "kv_lora_rank" in present:  # no grouped heads; head_dim is the width that is rotated
        latent = {"num_key_value_heads": "num_attention_heads", "head_dim": "qk_rope_head_dim"}
        arguments |= {n: rules.FIELDS[like] for n, like in latent.items() if n in present}
    arguments |= {name: value for name, value in (own | given).items() if name not in parts}
    if depth:
        _fit_depth(depth, own, given, arguments)
    for name, part in parts.items():
        of_part = known("configs", part.model_type) | known("causal", part.model_type)
        arguments[name] = _arguments(part, of_part, {**own.get(name, {}), **given.get(name, {})})
        if part.model_type:
            arguments[name]["model_type"] = part.model_type
    return {name: value for name, value in arguments.items() if value != DERIVED}


def _routed(default: PretrainedConfig, parts: Fields, overrides: Fields) -> Fields:
    """Return overrides by stored field names, with fields of the text part in a dict of its own."""
    text = next((name for name in ("text_config", "decoder") if name in parts), None)
    given: Fields = {}
    for name, value in overrides.items():
        stored = getattr(default, "attribute_map", {}).get(name, name)
        if stored in parts:
            given[stored] = {**given.get(stored, {}), **value}
        elif text and stored not in vars(default):
            given[text] = {**given.get(text, {}), name: value}
        else:
            given[stored] = value
    return given


def _shrunk(default: PretrainedConfig) -> Fields:
    """Return the rules' values, 0 for dropout and noise, of fields that a class takes, by name."""
    if dataclasses.is_dataclass(default):
        taken = {field.name for field in dataclasses.fields(default)}
    else:
        taken = set(inspect.signature(type(default).__init__).parameters)
    stored = getattr(default, "attribute_map", {})
    taken |= {stored[name] for name in taken if name in stored}
    arguments: Fields = {}
    for name, value in vars(default).items():
        if name not in taken:
            continue  # the class derives it
        if name in rules.FIELDS and (value or name not in rules.ONLY_IF_SET):
            arguments[name] = rules.FIELDS[name]
        elif type(value) in (int, float) and re.search("drop|jitter|noise", name):
            arguments[name] = type(value)(0)
    return arguments


def _kinds(present: Fields, depth: int | None) -> Fields:
    """Return the default's lists of a value per layer, cut down to the first layer of each kind."""
    lists = {name: value for name, value in _per_layer(present).items() if len(value) == depth}
    layers = list(zip(*lists.values(), strict=True))
    chosen = sorted(map(layers.index, set(layers)))
    chosen *= 1 if len(chosen) >= rules.LAYERS else rules.LAYERS
    return {name: [value[index] for index in chosen] for name, value in lists.items()}


def _per_layer(fields: Fields) -> dict[str, Sequence[Any]]:
    """Return {field: list} of the fields that list one value per layer."""
    return {
        name: fields[name]
        for name in rules.PER_LAYER
        if isinstance(fields.get(name), (list, tuple))
    }


def _fit_depth(name: str, own: Fields, given: Fields, arguments: Fields) -> None:
    """Set `name`, the number of layers, in `arguments`, and lists as long; `given` wins."""
    sources = (given, own, _per_layer(arguments), arguments)
    depths = (
        source.get(name) or next(map(len, _per_layer(source).values()), None) for source in sources
    )
    if (depth := next(filter(None, depths), None)) is not None:
        arguments[name] = depth
        for key, values in _per_layer(arguments).items():
            if key not in given:
                arguments[key] = [values[index % len(values)] for index in range(depth)]


def _token_ids(present: Fields) -> Fields:
    """Return special token ids inside the vocabulary, placeholders of media at its upper end."""
    ids: Fields = {}
    free = rules.VOCAB - 1
    low = range(rules.ORDINARY.start)
    for name, value in sorted(present.items()):
        if value is None or (type(value) is int and value in low):
            continue
        if name in rules.ENDS:
            ids[name] = rules.ENDS[name]
        elif type(value) is int and re.search("(?<!^pad)_token_(id|index)$", name):
            ids[name] = free
            free -= 1
    pad = present.get("pad_token_id")
    # 5.0 dropped the attribute from the base class, but some models still read it
    if pad is not None or "vocab_size" in present:
        ids["pad_token_id"] = pad if type(pad) is int and pad in low else 0
    return ids
