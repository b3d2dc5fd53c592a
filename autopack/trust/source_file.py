"""A file of source as named pieces, each with a digest of what it says.

A **piece** is a function, a member of a class, the rest of a class, or a name that a module binds otherwise. Its digest
is one of its text (`autopack.trust.saying`) and of where the module has imported the names from that stand in it.

    forward_of          a function, or all statements that bind a name of the module (a constant, an import)
    Layer               a class but for its functions: bases, decorators, attributes
    Layer()             its bases and decorators alone
    Layer.forward       a member of a class
    TABLE['key']        one entry of a dictionary, of a module or a class
    (empty)             statements of the module that bind nothing
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from autopack.trust.saying import is_said, kept, name_of, told

_DIGITS = 10
_ENTRY = re.compile(r"(.+)\['(.*)'\]")
UNREAD = frozenset(
    "_no_split_modules _tp_plan _pp_plan _ep_plan _fsdp_plan base_model_tp_plan base_model_pp_plan base_model_ep_plan "
    "base_model_fsdp_plan _tied_weights_keys _dynamic_tied_weights_keys _keys_to_ignore_on_load_missing "
    "_keys_to_ignore_on_load_unexpected _keys_to_ignore_on_save _keep_in_fp32_modules _keep_in_fp32_modules_strict "
    "_skip_keys_device_placement supports_gradient_checkpointing _supports_sdpa _supports_flash_attn "
    "_supports_flash_attn_2 _supports_flex_attn _supports_attention_backend _supports_cache_class "
    "_supports_static_cache _supports_quantized_cache _can_compile_fullgraph _compatible_flash_implementations "
    "base_model_prefix main_input_name input_modalities output_modalities model_tags _auto_class "
    "pretrained_model_archive_map "
    "load_tf_weights config_class is_parallelizable _is_stateful _checkpoint_conversion_mapping _input_embed_layer "
    "keys_to_ignore_at_inference model_type sub_configs _global_mapping".split()
)
"""Attributes of classes that only loading, saving, placing and generating read, or that are compared by themselves."""


def digest(data: bytes) -> str:
    """Ten hexadecimal digits by which two contents are told apart."""
    return hashlib.blake2b(data, digest_size=_DIGITS // 2).hexdigest()


class SourceFile:
    """The pieces of one module."""

    def __init__(self, module: str, source: bytes, is_package: bool = False):
        self.module = module
        self.is_package = is_package
        self._source = source
        self._package = module if is_package else module.rpartition(".")[0]
        self._digests: dict[str, str | None] = {}

    @classmethod
    def read(cls, module: str, path: Path) -> SourceFile:
        """The module in a file."""
        return cls(module, path.read_bytes(), path.name == "__init__.py")

    @cached_property
    def _bound(self) -> dict[str, list[tuple[str, ast.stmt]]]:
        """By name, the statements of the module that bind it, with the conditions that they stand under."""
        found: dict[str, list[tuple[str, ast.stmt]]] = {"": []}
        for conditions, statement in _flat(ast.parse(self._source).body, "", typing=self._package == self.module):
            for name in _names_bound(statement, set(found)):
                found.setdefault(name, []).append((conditions, statement))
        return found

    def names(self) -> Iterator[str]:
        """What the module binds."""
        return iter(self._bound)

    def imported(self, name: str) -> tuple[str, str] | None:
        """Module and name that a name has been imported from (the name is empty for a module); None for others."""
        for _, statement in self._bound.get(name, ()):
            if isinstance(statement, ast.ImportFrom | ast.Import):
                return self.origin(statement, name)
        return None

    def origin(self, statement: ast.Import | ast.ImportFrom, name: str) -> tuple[str, str]:
        """Module and name that an import statement gets a name from."""
        alias = next(a for a in statement.names if _as(a) == name or a.name == "*")
        if isinstance(statement, ast.Import):
            return alias.name if alias.asname else name, ""
        parts = self._package.split(".")
        above = ".".join(parts[: len(parts) - statement.level + 1]) if statement.level else ""
        module = ".".join(part for part in (above, statement.module) if part)
        return module, name if alias.name == "*" else alias.name

    def stars(self) -> list[str]:
        """The modules of which it imports all names."""
        return [self.origin(s, "*")[0] for _, s in self._bound.get("*", ()) if isinstance(s, ast.ImportFrom)]

    def class_named(self, name: str) -> ast.ClassDef | None:
        """The class of that name in the module; the last, where there are several."""
        return next(reversed(self._classes(name)), None)

    def pieces(self, name: str) -> list[tuple[str, ast.AST]]:
        """The nodes of a piece, with the conditions that they stand under; none where there is no such piece."""
        if match := _ENTRY.fullmatch(name):
            return self._entry(match[1], match[2])
        if "." in name and name not in self._bound:
            cls, _, member = name.partition(".")
            return [(kind, node) for _, kind, node in self._members(cls).get(member, ())]
        if name.endswith("()"):
            return [("", node) for cls in self._classes(name[:-2]) for node in _head(cls)]
        classes = self._classes(name)
        whole = [(where, s) for where, s in self._bound.get(name, ()) if not isinstance(s, ast.ClassDef)]
        found: list[tuple[str, ast.AST]] = [*whole]
        for each in classes:
            found += [("", node) for node in _head(each)]
            for member, nodes in self._members(each.name).items():
                if member not in UNREAD:
                    found += [(kind, node) for function, kind, node in nodes if not function]
        return found

    def functions(self, cls: str) -> list[str]:
        """The names of the functions of a class."""
        return [name for name, found in self._members(cls).items() if any(function for function, _, _ in found)]

    def attributes(self, cls: str) -> list[str]:
        """The names of all members of a class."""
        return [name for name in self._members(cls) if name]

    def digest(self, name: str) -> str | None:
        """The digest of a piece; None where there is no such piece."""
        if name not in self._digests:
            found = self.pieces(name)
            exists = bool(found) or name == "" or name.removesuffix("()") in self._bound
            self._digests[name] = digest(self._text(name, found).encode()) if exists else None
        return self._digests[name]

    def _text(self, name: str, found: list[tuple[str, ast.AST]]) -> str:
        texts, used = [], set()
        for conditions, node in found:
            if isinstance(node, ast.Import | ast.ImportFrom):
                used.add(name)
                texts.append(conditions)
                continue
            texts.append(f"{conditions} {told(node)}")
            used |= {part.id for part in kept(node) if isinstance(part, ast.Name) and part.id in self._bound}
        origins = (self.imported(name) for name in sorted(used))
        imports = [f"{name}={origin}" for name, origin in zip(sorted(used), origins, strict=True) if origin is not None]
        return "\n".join([*texts, *imports])

    def _classes(self, name: str) -> list[ast.ClassDef]:
        return [statement for _, statement in self._bound.get(name, ()) if isinstance(statement, ast.ClassDef)]

    def _members(self, name: str) -> dict[str, list[tuple[bool, str, ast.stmt]]]:
        """By name, the statements of a class that bind a member: whether it is a function, under which conditions."""
        found: dict[str, list[tuple[bool, str, ast.stmt]]] = {}
        for number, cls in enumerate(self._classes(name)):
            where = f"{number} " if number else ""
            for conditions, statement in _flat(cls.body, where):
                is_function = isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef)
                # An annotation makes a field of a dataclass; what it says of the type does not matter.
                kind = f"{conditions}field" if isinstance(statement, ast.AnnAssign) else conditions
                for member in _names_bound(statement, set()):
                    found.setdefault(member, []).append((is_function, kind, statement))
        return found

    def keys(self, name: str) -> list[str]:
        """The words that a dictionary has as its keys."""
        return sorted({str(k.value) for found in self._dicts(name) for k in found.keys if isinstance(k, ast.Constant)})

    def _entry(self, name: str, key: str) -> list[tuple[str, ast.AST]]:
        pairs = (pair for found in self._dicts(name) for pair in zip(found.keys, found.values, strict=True))
        return [("", value) for k, value in pairs if isinstance(k, ast.Constant) and k.value == key]

    def _dicts(self, name: str) -> Iterator[ast.Dict]:
        """The outermost dictionaries that stand in a piece."""
        waiting = [node for _, node in self.pieces(name)]
        while waiting:
            node = waiting.pop(0)
            if isinstance(node, ast.Dict):
                yield node
            else:
                waiting += ast.iter_child_nodes(node)


def _head(cls: ast.ClassDef) -> list[ast.AST]:
    """The bases and decorators of a class."""
    return [ast.ClassDef(cls.name, cls.bases, cls.keywords, [], cls.decorator_list)]


def _as(alias: ast.alias) -> str:
    return alias.asname or alias.name.partition(".")[0]


def _flat(body: list[ast.stmt], where: str, typing: bool = False) -> Iterator[tuple[str, ast.stmt]]:
    """Statements with the conditions that they stand under, those inside of `if` and `try` too.

    What is imported for type checkers alone counts where `typing` says so: a package that loads its parts when they are
    asked for tells there what they are.
    """
    for statement in body:
        if isinstance(statement, ast.If):
            if name_of(statement.test) == "TYPE_CHECKING":
                yield from _flat(statement.body, where, typing) if typing else ()
                yield from _flat(statement.orelse, where, typing)
            else:
                test = told(statement.test)
                yield from _flat(statement.body, f"{where}if {test} ", typing)
                yield from _flat(statement.orelse, f"{where}unless {test} ", typing)
        elif isinstance(statement, ast.Try):
            yield from _flat(statement.body, f"{where}try ", typing)
            for handler in statement.handlers:
                kind = told(handler.type) if handler.type is not None else ""
                yield from _flat(handler.body, f"{where}except {kind} ", typing)
            yield from _flat([*statement.orelse, *statement.finalbody], f"{where}else ", typing)
        elif is_said(statement):
            yield where, statement


def _names_bound(statement: ast.stmt, known: set[str]) -> Iterator[str]:
    """The names that a statement binds, or changes what `known` ones stand for; the empty one where there are none."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield statement.name
    elif isinstance(statement, ast.Import | ast.ImportFrom):
        yield from (_as(alias) for alias in statement.names)
    else:
        targets = [node for node in ast.walk(statement) if isinstance(node, ast.Name)]
        bound = {node.id for node in targets if isinstance(node.ctx, ast.Store)}
        if bound:
            yield from sorted(bound)
        else:
            # `TABLE[key] = value`, `TABLE.update(...)`
            root = _root(statement)
            yield root if root in known else ""


def _root(statement: ast.stmt) -> str:
    """The name of the object that a statement changes, by assigning to a part of it or by calling a method of it."""
    node: ast.AST = statement
    if isinstance(statement, ast.Assign):
        node = statement.targets[0]
    elif isinstance(statement, ast.AugAssign | ast.AnnAssign):
        node = statement.target
    elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        node = statement.value.func
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""
