"""Which code of a model is the library's, what its classes add to it, and which fields and names that code may read."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from functools import cache, cached_property
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel

from autopack.inspection import releases
from autopack.inspection.code_origin import PLAIN, found_by_name, is_made_in_c, is_of
from autopack.trust.content import Content, root_of_entry
from autopack.trust.source_file import UNREAD

_COMMON = (
    "transformers.activations transformers.cache_utils transformers.configuration_utils transformers.masking_utils "
    "transformers.modeling_attn_mask_utils transformers.modeling_flash_attention_utils transformers.modeling_layers "
    "transformers.modeling_rope_utils transformers.modeling_utils transformers.pytorch_utils "
    "transformers.loss.loss_utils transformers.integrations.moe transformers.integrations.sdpa_attention "
    "transformers.integrations.flex_attention transformers.integrations.flash_attention"
).split()
"""Modules of transformers that all models share and that read configurations."""
MAKING = ("__init__", "__post_init__", "validate", "to_dict", "to_diff_dict", "from_dict", "from_pretrained")
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

    def library_reads(self, name: str) -> bool:
        """Whether a name stands in the source of a module of transformers that the model is made of."""
        return any(_spells(module, name) for module in self._modules if module.startswith("transformers."))

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
        if isinstance(function, FunctionType) and not name.startswith(MAKING):
            codes.append(function.__code__)
    names: set[str] = set()
    while codes:
        code = codes.pop()
        names.update(code.co_names, (constant for constant in code.co_consts if isinstance(constant, str)))
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return frozenset(names)


_MODELS = "transformers.models."
_OF_DATACLASSES = ("__dataclass_", "__eq__", "__hash__", "__match_args__", "__repr__", "__replace__")


def class_name(cls: type) -> str:
    """A class of transformers by its module below `transformers.models`; any other by its whole name."""
    return f"{cls.__module__.removeprefix(_MODELS)}.{cls.__qualname__}"


class Own:
    """The classes of a model, those of its configurations, and what they use of the tables of transformers."""

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self._code = Code(model)

    def base(self, cls: type) -> tuple[type, str | None]:
        """The class of transformers that a class derives from, and what is between that could matter, in words.

        A class in between may have no functions, and nothing that the code of the model reads.
        """
        found = next((c for c in cls.__mro__ if _is_of_library(c)), cls)
        between = (c for c in cls.__mro__ if not c.__module__.startswith(("torch.", "transformers.")))
        return found, next((said for c in between if (said := self._added(c)) is not None), None)

    def _added(self, cls: type) -> str | None:
        if is_made_in_c(cls) or cls.__module__ in ("typing", "abc") or is_of(cls, "peft") or is_of(cls, "accelerate"):
            return None  # what is integrated is judged by its own kind
        config = issubclass(cls, PretrainedConfig)
        for name, value in vars(cls).items():
            # What a configuration is made by shows in its fields, which are looked at themselves.
            if name in PLAIN or name in UNREAD or (config and name.startswith((*MAKING, *_OF_DATACLASSES))):
                continue
            if hasattr(value, "__get__") or self._code.library_reads(name):
                return f"{cls.__module__}.{cls.__qualname__}.{name} has not been measured"
        return None

    def why_other(self, content: Content) -> str | None:
        """What of the code that the model can run is another one than was recorded; None where all is the same."""
        configs = {id(c): c for m in self.model.modules() if (c := getattr(m, "config", None)) is not None}
        of_modules = [self.base(cls) for cls in dict.fromkeys(map(type, self.model.modules()))]
        of_configs = [self.base(type(config)) for config in configs.values()]
        if (said := next((said for _, said in of_modules + of_configs if said is not None), None)) is not None:
            return said
        bases = [base for base, _ in of_modules if _is_of_library(base)] + [base for base, _ in of_configs]
        roots = {class_name(base) for base in bases if content.knows(class_name(base))}
        for base in bases:
            if not content.reaches(roots, base.__module__, base.__qualname__):
                return (
                    f"{base.__module__}.{base.__qualname__} has not been measured in such a model ({content.release})"
                )
        for name in self._entries(list(configs.values()), content):
            if not content.knows(name):
                return f"the {' function '.join(name.split(' ', 1))!r} has not been measured ({content.release})"
            roots.add(name)
        return self._other_loss(content, roots) or content.why_other(roots)

    def _entries(self, configs: list[Any], content: Content) -> Iterator[str]:
        """The entries of tables that its configurations choose."""
        for config in configs:
            asked = str(vars(config).get("_attn_implementation_internal") or "eager")
            name = "flash_attention_2" if releases.is_flash(asked) else asked
            for table in ("attention", "mask") if name != "eager" else ("mask",):
                if table in content.tables:
                    yield root_of_entry(table, name)
            # Others are no words that have been measured, where any expert reads them.
            experts = root_of_entry("experts", str(vars(config).get("_experts_implementation_internal")))
            if content.knows(experts):
                yield experts

    def _other_loss(self, content: Content, roots: set[str]) -> str | None:
        """Adds the losses of its models to the roots; in words, one of another kind than its class is recorded with."""
        for module in self.model.modules():
            base = self.base(type(module))[0]
            if "loss" not in content.tables or not isinstance(module, PreTrainedModel):
                continue
            if not content.reaches([class_name(base)] if content.knows(class_name(base)) else [], *_LOSS):
                continue
            kind, usual = releases.kind_of_loss(module), _kind_by_name(base.__name__)
            if kind != usual:
                return f"the loss of {type(module).__name__} is of the kind {kind!r}, and {usual!r} has been measured"
            roots.add(root_of_entry("loss", kind))
        return None


_LOSS = ("transformers.modeling_utils", "PreTrainedModel.loss_function")


@cache
def _is_of_library(cls: type) -> bool:
    return cls.__module__.startswith("transformers.") and found_by_name(cls)


@cache
def _kind_by_name(name: str) -> str:
    """The kind of loss that transformers finds in the name of a class."""
    kinds = releases.losses()
    found = [name] if name in kinds else re.findall("|".join(kinds), name)
    return found[0] if found else "ForCausalLM"
