"""What the recorded runs of the leak test have covered: releases, classes, implementations and configurations."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from functools import cache, cached_property
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import transformers
from transformers import PretrainedConfig, PreTrainedModel

from autopack.inspection.configs import text_config
from autopack.inspection.releases import is_flash
from autopack.trust import configuration
from autopack.trust.data import SURVEYED, load

_MODELS = "transformers.models."
_COMMON = (
    "transformers.activations transformers.cache_utils transformers.configuration_utils transformers.masking_utils "
    "transformers.modeling_attn_mask_utils transformers.modeling_flash_attention_utils transformers.modeling_layers "
    "transformers.modeling_rope_utils transformers.modeling_utils transformers.pytorch_utils "
    "transformers.loss.loss_utils transformers.integrations.moe transformers.integrations.sdpa_attention "
    "transformers.integrations.flex_attention transformers.integrations.flash_attention"
).split()
"""Modules of transformers that all models share and that read configurations."""
_MAKING = ("__init__", "__post_init__", "validate", "to_dict", "to_diff_dict", "from_dict", "from_pretrained")
"""Methods of configurations that derive fields, which are looked at themselves, or that only store them."""


def why_not_recorded(model: PreTrainedModel) -> str | None:
    """In one clause, why no recorded run has covered this model as it is configured; None where one has."""
    record = _record()
    if transformers.__version__ != record.release:
        return f"transformers {transformers.__version__} has not been measured, only {record.release} has"
    model_type = str(model.config.model_type)
    known = record.types.get(model_type)
    if known is None:
        return f"model type {model_type!r} has not been measured"
    cls = next(c for c in type(model).__mro__ if not c.__module__.startswith("torch.distributed"))
    if class_name(cls) not in known["classes"]:
        return f"{cls.__module__}.{cls.__qualname__} has not been measured as a {model_type!r} model"
    for part in _attending(model.config):
        asked = getattr(part, "_attn_implementation", None) or "eager"
        if _backend(asked) not in record.backends.get(model_type, ()):
            return f"attn_implementation={asked!r} has not been measured for {model_type!r}"
    return next(_unmeasured(model, record), None)


def class_name(cls: type) -> str:
    """A class of transformers by its module below `transformers.models`; any other by its whole name."""
    return f"{cls.__module__.removeprefix(_MODELS)}.{cls.__qualname__}"


def fields_in(words: configuration.Words) -> dict[str, dict[str, list[str]]]:
    """Words as they are recorded: sorted, and without those that are usual."""
    return {
        model_type: {f: sorted(w) for f, w in sorted(fields.items()) if w != configuration.usual(f)}
        for model_type, fields in sorted(words.items())
    }


class _Record:
    """The data of the package, ready to be asked."""

    def __init__(self) -> None:
        measured, surveyed = load(), load(SURVEYED)
        self.release = surveyed["with"]["transformers"]
        self.types: dict[str, Any] = {
            name: {"classes": frozenset(entry["classes"]), "fields": _sets(entry["fields"])}
            for name, entry in surveyed["types"].items()
        }
        self.backends = {name: set(entry["implementations"]) for name, entry in surveyed["types"].items()}
        if measured["with"]["transformers"] == self.release:
            for types in measured["tasks"].values():
                for name, entry in types.items():
                    self.backends.setdefault(name, set()).update(entry.get("errors", ()))


def _sets(fields: dict[str, list[str]]) -> dict[str, frozenset[str]]:
    return {name: frozenset(words) for name, words in fields.items()}


@cache
def _record() -> _Record:
    return _Record()


def _backend(implementation: str) -> str:
    """The name under which the recorded runs have an attention implementation."""
    if implementation.startswith("paged"):
        return implementation
    return "flash" if is_flash(implementation) else {"flex_attention": "flex"}.get(implementation, implementation)


def _attending(config: PretrainedConfig) -> list[Any]:
    """The configurations by which text attends: the whole, and what it has for its encoder and decoder."""
    parts = [config, text_config(config, decoder=True), text_config(config, encoder=True)]
    return list({id(part): part for part in parts}.values())


def _unmeasured(model: PreTrainedModel, record: _Record) -> Iterator[str]:
    """A clause for every field with a value that no measured variant had and that the model can read."""
    code = Code(model)
    for model_type, fields in configuration.describe(model.config).items():
        entry = record.types.get(model_type)
        known = {} if entry is None else entry["fields"]
        for field, words in fields.items():
            measured = known.get(field, configuration.usual(field))
            missing = sorted(word for word in words if not configuration.is_met(word, measured))
            if missing and code.can_read(field):
                found = ", ".join(sorted(measured)) or "none of its values"
                yield f"{field} of {model_type!r} is {', '.join(missing)}, and {found} has been measured"


class Code:
    """The source of the modules of a model, of its configurations, and of what all models share."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    @cached_property
    def _modules(self) -> list[str]:
        found = {cls.__module__ for module in self.model.modules() for cls in type(module).__mro__}
        return sorted({*_COMMON, *(name for name in found if not name.startswith(("torch.", "builtins")))})

    @cached_property
    def _configs(self) -> dict[type, Any]:
        found = {type(c): c for m in self.model.modules() if (c := getattr(m, "config", None)) is not None}
        return {cls: config for config in found.values() for cls in type(config).__mro__}

    def can_read(self, field: str) -> bool:
        """Whether a field may be read: whether its name, or another name of it, stands in the source."""
        # Of a dictionary, what is inside may be read by names that no source spells out, if the dictionary is read.
        stored = field.partition(".")[0]
        maps = [getattr(config, "attribute_map", {}) for config in self._configs.values()]
        names = {stored, *(name for aliases in maps for name, meant in aliases.items() if meant == stored)}
        return any(
            any(_spells(module, name) for module in self._modules)
            or any(name in _names_of_config(cls) for cls in self._configs if cls not in (object, PretrainedConfig))
            for name in names
        )


def _spells(module: str, name: str) -> bool:
    names = _names_in(module)
    return names is None or name in names


@cache
def _names_in(module: str) -> frozenset[str] | None:
    """All names and words in the source of a module; None where there is no source, none where it is not loaded."""
    found = sys.modules.get(module)
    if found is None:
        return frozenset()
    path = getattr(found, "__file__", None)
    if not path or not path.endswith(".py") or not Path(path).exists():
        return None
    return frozenset(re.findall(r"\w+", Path(path).read_text()))


@cache
def _names_of_config(cls: type) -> frozenset[str]:
    """Names that the properties and methods of a class of configurations use, but for those that make it."""
    codes: list[CodeType] = []
    for name, value in vars(cls).items():
        function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        if isinstance(function, FunctionType) and not name.startswith(_MAKING):
            codes.append(function.__code__)
    names: set[str] = set()
    while codes:
        code = codes.pop()
        names.update(code.co_names, (constant for constant in code.co_consts if isinstance(constant, str)))
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return frozenset(names)
