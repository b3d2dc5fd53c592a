"""Let kernels of Triton run on tensors of a CPU. Import this before anything that imports Triton.

The interpreter is Triton's own (`TRITON_INTERPRET=1`). Four things are added: the configuration of
the smallest blocks stands for the fastest, since there is nothing to time, and is asked for no
arguments that a kernel has not; loop variables and floats are tensors, as in compiled kernels,
where the interpreter leaves numbers of Python; and questions for the properties of a GPU are
answered."""

from __future__ import annotations

import ast
import collections
import contextlib
import math
import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

assert "TRITON_INTERPRET" not in os.environ or os.environ["TRITON_INTERPRET"] == "1"
os.environ["TRITON_INTERPRET"] = "1"

import triton  # noqa: E402
from triton.language.extra import libdevice  # noqa: E402
from triton.runtime import autotuner, interpreter  # noqa: E402

LAUNCHED: collections.Counter[str] = collections.Counter()
"""How often each kernel was launched, by its name."""


def _size(config: Any) -> int:
    return math.prod(
        value for value in config.kwargs.values() if isinstance(value, int) and value > 0
    )


def _smallest_blocks(self: Any, *args: Any, **kwargs: Any) -> Any:
    self.nargs = dict(zip(self.arg_names, args, strict=False))
    config = self.best_config = min(self.configs, key=_size)
    if config.pre_hook is not None:
        config.pre_hook({**self.nargs, **kwargs, **config.all_kwargs()})
    return self.fn.run(*args, **kwargs, **config.all_kwargs())


class _Tensors(interpreter.ASTTransformer):
    """What is assigned is a tensor, but None stays None; and so are the variables of loops over a
    range."""

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        self.generic_visit(node)
        node.value = _call("_tensor_or_none", node.value)
        return node

    def visit_For(self, node: ast.For) -> ast.AST:
        self.generic_visit(node)
        function = getattr(node.iter, "func", None)
        if "range" in (getattr(function, "id", ""), getattr(function, "attr", "")) and isinstance(
            node.target, ast.Name
        ):
            name = node.target.id
            value = _call("_tensor_or_none", ast.Name(name, ast.Load()))
            node.body.insert(0, ast.Assign([ast.Name(name, ast.Store())], value))
        return node


def _call(function: str, argument: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(function, ast.Load()), [argument], [])


def _tensor_or_none(value: Any) -> Any:
    return None if value is None else interpreter.interpreter_semantic.to_tensor(value, False)


_made = autotuner.Autotuner.__init__


def _known_keys(
    self: Any, fn: Any, arg_names: Any, configs: Any, key: Any, *args: Any, **kwargs: Any
) -> None:
    _made(
        self, fn, arg_names, configs, [name for name in key if name in arg_names], *args, **kwargs
    )


_converted = interpreter._implicit_cvt


def _with_floats(argument: Any) -> Any:
    if isinstance(argument, float):
        return triton.language.tensor(
            interpreter.TensorHandle(np.array([argument], np.float32), triton.language.float32),
            triton.language.float32,
        )
    return _converted(argument)


_run = interpreter.InterpretedFunction.run


def _counted(self: Any, *args: Any, **kwargs: Any) -> Any:
    LAUNCHED[self.fn.__name__] += 1
    return _run(self, *args, **kwargs)


_custom_op = torch.library.custom_op


def _on_any_device(name: str, *args: Any, device_types: Any = None, **kwargs: Any) -> Any:
    return _custom_op(name, *args, **kwargs)


class _Device(contextlib.nullcontext):
    """`torch.cuda.device` with no device to change to."""

    def __init__(self, *_: Any) -> None:
        super().__init__()


autotuner.Autotuner.__init__ = _known_keys
autotuner.Autotuner.run = _smallest_blocks
interpreter._implicit_cvt = _with_floats
# CUDA's own functions, of which the interpreter has none. Those of the language are replaced by it
# in each call.
libdevice.rsqrt = lambda x: triton.language.rsqrt(x)
libdevice.tanh = lambda x: 2 * triton.language.sigmoid(2 * x) - 1
interpreter._tensor_or_none = _tensor_or_none  # interpreted kernels see this module's names
interpreter.FunctionRewriter.ast_transformer = _Tensors()
interpreter.InterpretedFunction.run = _counted
torch.library.custom_op = _on_any_device
torch.cuda.device = _Device  # type: ignore[assignment, misc]
torch.cuda.get_device_capability = lambda *_: (9, 0)
torch.cuda.get_device_properties = lambda *_: SimpleNamespace(  # type: ignore[assignment]
    multi_processor_count=4, total_memory=2**33, major=9, minor=0
)
