"""Which pieces of transformers a model of a class can run, by following names from one to the next.

From a class all of its functions are followed but those that load, save, initialise, generate or resize, and from every
function the names of its module that it mentions, through imports into other modules of transformers. Of the large
classes that all models or configurations derive from, only what is mentioned somewhere by its name is followed.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import transformers

from autopack.trust.content import ALWAYS, TABLES, is_large, is_making, is_making_of_config, is_making_of_model
from autopack.trust.saying import kept
from autopack.trust.source_file import UNREAD, SourceFile

Piece = tuple[str, str]
"""A module and the name of a piece of it."""

ROOT = Path(str(transformers.__file__)).parent
_ELSEWHERE = re.compile(
    r"transformers\.(generation|cache_utils|models\.auto|utils\.(logging|doc|auto_docstring|hub|peft_utils)|initialization"
    r"|tokenization\w*|processing\w*|image\w*|video\w*|feature\w*|audio_utils|quantizers|core_model_loading|conversion_mapping"
    r"|dependency\w*|safetensors_conversion|dynamic_module_utils|testing_utils|modeling_gguf\w*|modeling_tf\w*|modeling_flax\w*"
    r"|integrations\.(peft|accelerate|eetq|tensor_parallel|ggml|bitsandbytes|awq|tiktoken)|distributed|pipelines|trainer\w*"
    r"|monkey_patching|fusion_mapping|model_debugging_utils|backbone_utils|loss\.loss_(?!utils)\w+|kernels|convert\w*)\b.*"
)
"""Modules of which a packed call runs nothing: loading, saving, generation, caches, processing, documentation."""
_INSTALLED = re.compile(
    r"is_\w+_(available|greater_or_equal\w*|platform)|get_torch_version|requires_backends|BACKENDS_MAPPING|PushToHubMixin|PeftAdapterMixin"
)
"""What asks for packages and devices: the answer is that of the machine, whatever the release."""
_OF_MAKERS = {"post_init", "init_weights", "_init_weights", "__init__"}
_SKIPPED_NAMES = {"logger", "TYPE_CHECKING", "__all__"}


@cache
def file_of(module: str) -> SourceFile | None:
    """The source of a module of transformers; None where there is none."""
    base = ROOT.joinpath(*module.split(".")[1:])
    for path in (base / "__init__.py", base.with_suffix(".py")):
        if path.exists():
            return SourceFile.read(module, path)
    return None


def resolve(module: str, name: str, told: bool = True) -> Iterator[Piece]:
    """Where a name leads to that a module binds or imports: every import on the way, then what it stands for.

    The first import is left out where what mentions the name has been `told` of it.
    """
    source = file_of(module)
    if source is None or module == "transformers" or _ELSEWHERE.fullmatch(module) or _INSTALLED.fullmatch(name):
        return
    if name not in source.names():
        for star in source.stars():
            yield from resolve(star, name, False)
        return
    origin = source.imported(name)
    if origin is None:
        yield module, name
    elif (
        origin[0].startswith("transformers")
        and origin[1]
        and (f := file_of(origin[0])) is not None
        and (origin[1] in set(f.names()) or f.stars())
    ):
        if not told:
            yield module, name
        yield from resolve(*origin, False)


class Closure:
    """The pieces that can be run from where it starts."""

    def __init__(self, *roots: Piece, large: bool = True):
        self.pieces: set[Piece] = set()
        self.mentioned: set[str] = set()
        self._large: set[Piece] = set()
        self._waiting: list[Piece] = list(roots)
        self._deferred: set[Piece] = set()
        if large:
            config = (
                "PreTrainedConfig"
                if "PreTrainedConfig" in _names("transformers.configuration_utils")
                else "PretrainedConfig"
            )
            self._waiting.append(("transformers.configuration_utils", config))
        while self._waiting:
            while self._waiting:
                self._add(self._waiting.pop())
            for module, cls in self._large:
                source = file_of(module)
                assert source is not None
                of_config = cls.endswith(("Config", "ConfigMixin"))
                for member in source.attributes(cls):
                    made = is_making_of_model(member) or (of_config and is_making_of_config(member)) or member in UNREAD
                    if (member in ALWAYS or member in self.mentioned) and (
                        not made or (member == "__init__" and not of_config)
                    ):
                        self._add((module, f"{cls}.{member}"))
            for module, piece in sorted(self._deferred):
                if piece.rpartition(".")[2] in self.mentioned:
                    self._add((module, piece))
        # What else a package does is to lay out what it imports.
        modules = {module for module, _ in self.pieces}
        self.pieces |= {(module, "") for module in modules if not (file := file_of(module)) or not file.is_package}

    def _add(self, piece: Piece) -> None:
        module, name = piece
        source = file_of(module)
        if piece in self.pieces or source is None or _ELSEWHERE.fullmatch(module):
            return
        if piece in TABLES.values():
            return
        if is_large(module, name):
            self._large.add(piece)
            piece = module, f"{name}()"
            if piece in self.pieces:
                return
        elif source.class_named(name) is not None:
            for function in source.functions(name):
                keep = self._deferred.add if is_making(module, function) else self._waiting.append
                keep((module, f"{name}.{function}"))
        self.pieces.add(piece)
        self._follow(piece, source)

    def _follow(self, piece: Piece, source: SourceFile) -> None:
        module, name = piece
        makes = name.endswith(".__init__")
        names, attributes, imports = mentions(source, name)
        if not makes or not is_large(module, name.partition(".")[0]):
            self.mentioned |= attributes - _OF_MAKERS
        for found in names - _SKIPPED_NAMES:
            self._waiting += resolve(module, found)
            origin = source.imported(found)
            for target in _modules_of(origin) if origin is not None else ():
                for attribute in attributes:
                    self._waiting += resolve(target, attribute, False)
        for statement in imports:
            for alias in statement.names:
                origin = source.origin(statement, alias.asname or alias.name)
                if origin[0].startswith("transformers") and origin[1]:
                    self._waiting += resolve(*origin, False)


@cache
def _names(module: str) -> frozenset[str]:
    source = file_of(module)
    return frozenset(source.names()) if source is not None else frozenset()


def _modules_of(origin: tuple[str, str]) -> list[str]:
    """The module of transformers that an imported name stands for, if it does."""
    name = ".".join(part for part in origin if part)
    return [name] if name.startswith("transformers") and file_of(name) is not None else []


@cache
def _mentions(module: str, name: str) -> tuple[frozenset[str], frozenset[str], tuple[ast.ImportFrom, ...]]:
    source = file_of(module)
    assert source is not None
    bound = _names(module)
    names, attributes, imports = set(), set(), []
    for _, node in source.pieces(name):
        if isinstance(node, ast.Import | ast.ImportFrom):
            continue
        for part in kept(node):
            if isinstance(part, ast.Name):
                names.add(part.id)
            elif isinstance(part, ast.Attribute):
                attributes.add(part.attr)
            elif isinstance(part, ast.ImportFrom):
                imports.append(part)
            elif isinstance(part, ast.Call) and isinstance(part.func, ast.Name) and "attr" in part.func.id:
                attributes |= {a.value for a in part.args if isinstance(a, ast.Constant) and isinstance(a.value, str)}
    return frozenset(names & bound), frozenset(attributes), tuple(imports)


def mentions(source: SourceFile, name: str) -> tuple[frozenset[str], frozenset[str], tuple[ast.ImportFrom, ...]]:
    """The names of its module that a piece mentions, all attributes in it, and the imports that it makes itself."""
    return _mentions(source.module, name)
