"""Whether the code that a model can run here is the code that a recorded release ran, function by function.

What is recorded of a release are its files, their pieces by digest (`autopack.trust.source_file`), and by **root** (a
class, or an entry of a table) the pieces that can be run from there. A file with the same bytes is not even parsed.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import transformers

from autopack.trust.data import content_of, load
from autopack.trust.source_file import SourceFile, digest

_PREFIX = "transformers."
_HERE = Path(str(transformers.__file__)).parent


class Content:
    """The code of one recorded release."""

    def __init__(self, data: dict[str, Any]):
        self.release: str = data["with"]["transformers"]
        self._files: dict[str, str] = data["files"]
        self._pieces: dict[str, str] = data["pieces"]
        self._modules = list(self._files)
        self._parts: list[tuple[int, str]] = data["parts"]
        self._roots: dict[str, list[int]] = data["roots"]
        self._found: dict[frozenset[str], str | None] = {}

    @classmethod
    def of(cls, release: str) -> Content:
        """What the package carries of a release."""
        return cls(load(content_of(release)))

    @cached_property
    def tables(self) -> frozenset[str]:
        """The tables that the release has."""
        return frozenset(name.partition(" ")[0] for name in self._roots if " " in name)

    def knows(self, root: str) -> bool:
        """Whether it is recorded what can be run from a root."""
        return root in self._roots

    def reaches(self, roots: Iterable[str], module: str, piece: str) -> bool:
        """Whether a piece is among what can be run from some roots."""
        wanted = self._wanted(roots).get(module.removeprefix(_PREFIX))
        names = self._digests(module.removeprefix(_PREFIX)) if wanted else {}
        return wanted is not None and any(n == piece for number, n in enumerate(names) if wanted >> number & 1)

    def why_other(self, roots: Iterable[str]) -> str | None:
        """What of the code that can be run from roots is another one here; None where all of it is the same."""
        asked = frozenset(roots)
        if asked not in self._found:
            self._found[asked] = self._compare(self._wanted(asked))
        return self._found[asked]

    def _wanted(self, roots: Iterable[str]) -> dict[str, int]:
        """By module, the numbers of its pieces as the bits of one number."""
        found: dict[str, int] = {}
        for part in {part for root in roots for part in self._roots[root]}:
            number, bits = self._parts[part]
            module = self._modules[number]
            found[module] = found.get(module, 0) | int(bits, 16)
        return found

    def _compare(self, wanted: dict[str, int]) -> str | None:
        changed = [module for module in wanted if file_digest(_PREFIX + module) != self._files[module]]
        # What is parsed soonest comes first: one difference is enough.
        for module in sorted(changed, key=lambda module: _size(_PREFIX + module)):
            source = source_of(_PREFIX + module)
            for number, (piece, known) in enumerate(self._digests(module).items()):
                if wanted[module] >> number & 1 and (source is None or source.digest(piece) != known):
                    return self._told(module, piece, source)
            if source is not None and (added := self._added(module, wanted[module], source)) is not None:
                return f"{added} of {_PREFIX}{module} has not been measured ({self.release})"
        return None

    def _added(self, module: str, wanted: int, source: SourceFile) -> str | None:
        """The first function that a class has here and had not when it was recorded, and that may be run."""
        known = self._digests(module)
        for number, piece in enumerate(known):
            cls = piece.removesuffix("()")
            for function in source.functions(cls) if wanted >> number & 1 and source.class_named(cls) else ():
                if f"{cls}.{function}" not in known and matters(_PREFIX + module, cls, function):
                    return f"{cls}.{function}"
        return None

    def _digests(self, module: str) -> dict[str, str]:
        """The digests of the pieces of a module, in the order of their numbers."""
        return dict(text.rpartition(":")[::2] for text in self._pieces[module].split(" "))

    def _told(self, module: str, piece: str, source: SourceFile | None) -> str:
        if source is None:
            return f"{_PREFIX}{module} is missing, of which {self.release} has {piece or 'statements'}"
        if source.digest(piece) is None:
            return f"{piece} of {_PREFIX}{module} is missing, which was measured ({self.release})"
        return f"{piece or 'a statement'} of {_PREFIX}{module} is not the one that was measured ({self.release})"


@cache
def path_of(module: str) -> Path | None:
    """The file of a module of transformers, whether or not it is loaded; None where there is none."""
    loaded = getattr(sys.modules.get(module), "__file__", None)
    if loaded is not None:
        return Path(loaded) if loaded.endswith(".py") and os.path.exists(loaded) else None
    base = _HERE.joinpath(*module.split(".")[1:])
    return next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.exists()), None)


def _size(module: str) -> int:
    path = path_of(module)
    return 0 if path is None else path.stat().st_size


@cache
def file_digest(module: str) -> str | None:
    """The digest of the bytes of a module's file; None where there is no file."""
    path = path_of(module)
    return None if path is None else digest(path.read_bytes())


@cache
def source_of(module: str) -> SourceFile | None:
    """The pieces of a module; None where it has no source."""
    path = path_of(module)
    return None if path is None else SourceFile.read(module, path)


ALWAYS = frozenset(
    "__init__ forward __call__ __init_subclass__ __new__ __getattr__ __getattribute__ __setattr__".split()
)
"""Functions that are run without being named."""
_MAKING = re.compile(
    r"_?init_weights|_?initialize_weights|_init_\w*|reset_parameters|post_init|_?tie_\w+|_?prune_heads|_?resize_\w+|set_(input|output)_embeddings"
    r"|prepare_inputs_for_generation|_prepare_\w*(for_generation|generat)\w*|_update_model_kwargs\w*|_?reorder_cache|generate|_\w*_generat\w*"
    r"|_expand_inputs_for_generation|can_generate|save_\w+|from_pretrained|_from_config|push_to_hub|load_\w+|dummy_inputs"
    r"|extra_repr|__repr__|_sample|_validate_model\w*|to_(dict|diff_dict|json\w*)|from_dict|from_\w+_configs?"
    r"|__post_init__|validate\w*|update|to|half|float|cuda|cpu|eval|train|get_config_dict|register_for_auto_class|compile"
    r"|_?set_gradient_checkpointing|(gradient|activation)_checkpointing_\w+|enable_input_require_grads"
)
"""Functions that make, load, save, move or resize, or that generate."""
_LARGE = re.compile(
    r"transformers\.(modeling_utils:(PreTrainedModel|ModuleUtilsMixin|EmbeddingAccessMixin)"
    r"|configuration_utils:Pre[Tt]rainedConfig|modeling_rope_utils:RotaryEmbeddingConfigMixin|heterogeneity\S+Mixin)"
)
_CONFIGS = re.compile(r"\.configuration_\w+$")


def is_large(module: str, cls: str) -> bool:
    """Whether a class is one of those that all models or configurations derive from: few of their functions matter."""
    return _LARGE.fullmatch(f"{module}:{cls}") is not None


def is_making(module: str, function: str) -> bool:
    """Whether a function of a class in a module makes, saves or generates; it matters where it is mentioned."""
    return is_making_of_config(function) if _CONFIGS.search(module) else is_making_of_model(function)


def is_making_of_model(function: str) -> bool:
    """The same for any class but a configuration."""
    return _MAKING.fullmatch(function) is not None


def is_making_of_config(function: str) -> bool:
    """The same for a configuration."""
    return function.startswith(("__init", "__post_init__", "validate", "to_", "from_", "_update_hetero"))


def matters(module: str, cls: str, function: str) -> bool:
    """Whether a function that a class has had none of matters: it may stand before one that the class inherits."""
    return (not is_large(module, cls) or function in ALWAYS) and not is_making(module, function)


TABLES: dict[str, tuple[str, str]] = {
    "attention": ("transformers.modeling_utils", "AttentionInterface._global_mapping"),
    "mask": ("transformers.masking_utils", "AttentionMaskInterface._global_mapping"),
    "experts": ("transformers.integrations.moe", "ExpertsInterface._global_mapping"),
    "loss": ("transformers.loss.loss_utils", "LOSS_MAPPING"),
}
"""By what they are for, the module and the piece that is such a dictionary; their entries are pieces of their own."""


def entry(table: str, key: str) -> tuple[str, str]:
    """The module and the name of the piece that an entry of a table is."""
    module, piece = TABLES[table]
    return module, f"{piece}['{key}']"


def root_of_entry(table: str, key: str) -> str:
    """The name under which the code that an entry runs is recorded."""
    return f"{table} {key}"
