"""The fields of a configuration that the code of a model may read, by the names in its source."""

from __future__ import annotations

import re
import sys
from functools import cache, cached_property
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel

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
        """Return True if a name of this field stands in the source."""
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
    """Return the words in the source of a module; None without a source, none if it is not loaded."""
    found = sys.modules.get(module)
    if found is None:
        return frozenset()
    path = getattr(found, "__file__", None)
    if not path or not path.endswith(".py") or not Path(path).exists():
        return None
    return frozenset(re.findall(r"\w+", Path(path).read_text()))


@cache
def _names_of_config(cls: type) -> frozenset[str]:
    """Return the names in properties and methods of a class of configurations that do not make it."""
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
