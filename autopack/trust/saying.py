"""What a piece of Python says, as a text that does not change with its comments, layout or annotations.

Left out is also what cannot matter to a result: docstrings and the decorators that write them, messages of errors,
and lines that only log. The text is the same in every version of Python.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

DOCUMENTING = frozenset(
    "auto_docstring add_start_docstrings add_start_docstrings_to_model_forward add_end_docstrings "
    "add_code_sample_docstrings replace_return_docstrings requires".split()
)
"""Decorators of transformers that return what they are given, with another docstring or if packages are installed."""
_LOGGING = frozenset(("logger", "warnings"))
_SKIPPED = frozenset(("ctx", "kind", "type_comment", "type_params", "annotation", "returns", "type_ignores"))


def told(*nodes: ast.AST) -> str:
    """The text of some statements or expressions."""
    found: list[str] = []
    for node in nodes:
        _tell(node, found)
    return " ".join(found)


def kept(node: ast.AST) -> Iterator[ast.AST]:
    """A node and all nodes inside it that its text is made of."""
    waiting = [node]
    while waiting:
        node = waiting.pop()
        if not is_said(node):
            continue
        yield node
        children = (child for name in node._fields if name not in _SKIPPED for child in _children(node, name))
        waiting += [child for child in children if isinstance(child, ast.AST)]


def is_said(node: ast.AST) -> bool:
    """Whether a node has a part in the text."""
    if isinstance(node, ast.Expr):
        value = node.value
        return not (isinstance(value, ast.Constant) and isinstance(value.value, str)) and not _only_logs(value)
    if isinstance(node, ast.If):
        return name_of(node.test) != "TYPE_CHECKING" or bool(node.orelse)
    return not isinstance(node, ast.Pass)


def name_of(node: ast.AST) -> str:
    """The last name of a (called) name or attribute; empty for anything else."""
    if isinstance(node, ast.Call):
        return name_of(node.func)
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _only_logs(value: ast.expr) -> bool:
    call = isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute)
    logs = call and isinstance(value.func.value, ast.Name) and value.func.value.id in _LOGGING  # type: ignore[attr-defined]
    # What an argument keeps or gives away is more than logging.
    return logs and not any(
        isinstance(n, (ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom)) for n in ast.walk(value)
    )


def _children(node: ast.AST, name: str) -> list[Any]:
    """What the text has of a field of a node."""
    found = getattr(node, name, None)
    if name == "decorator_list":
        return [each for each in found if name_of(each) not in DOCUMENTING]  # type: ignore[union-attr]
    if isinstance(node, ast.Raise):
        # The error is raised whatever it says.
        return [found.func if name == "exc" and isinstance(found, ast.Call) else found] if found is not None else []
    if isinstance(node, ast.Assert) and name == "msg":
        return []
    if isinstance(node, ast.If) and name == "body" and name_of(node.test) == "TYPE_CHECKING":
        return []
    if isinstance(node, ast.JoinedStr):
        return _joined(node.values)
    if isinstance(found, list):
        return [each for each in found if not isinstance(each, ast.AST) or is_said(each)]
    return [] if found is None else [found]


def _joined(values: list[ast.expr]) -> list[ast.expr]:
    """The parts of an f-string, neighbouring texts as one."""
    found: list[ast.expr] = []
    for value in values:
        if isinstance(value, ast.Constant):
            if found and isinstance(found[-1], ast.Constant):
                value = ast.Constant(str(found.pop().value) + str(value.value))  # type: ignore[attr-defined]
            if not value.value:
                continue
        found.append(value)
    return found


def _tell(node: Any, found: list[str]) -> None:
    if isinstance(node, ast.Name):
        found.append(node.id)
    elif isinstance(node, ast.Constant):
        found.append(f"{type(node.value).__name__}:{node.value!a}")
    elif isinstance(node, ast.AnnAssign) and node.value is not None:
        _tell_all("Assign", ([node.target], [node.value]), found)
    elif isinstance(node, ast.Assign):
        _tell_all("Assign", (node.targets, [node.value]), found)
    elif isinstance(node, ast.AST):
        if is_said(node):
            kind = type(node).__name__
            _tell_all(kind, (_children(node, name) for name in node._fields if name not in _SKIPPED), found)
    else:
        found.append(str(node))


def _tell_all(kind: str, fields: Any, found: list[str]) -> None:
    found.append(f"({kind}")
    for children in fields:
        found.append("[")
        for child in children:
            _tell(child, found)
        found.append("]")
    found.append(")")
