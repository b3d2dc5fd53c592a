"""Outputs of an unpadded call in the form that the caller expects: padded again, and only what is read.

A model output keeps its packed tensors until somebody reads them; logits that nobody reads cost nothing. What is read
is an ordinary tensor, zero at padding, and stays in the output.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from transformers.utils import ModelOutput

from autopack.errors import UnsupportedModel
from autopack.layout.padding import Padding
from autopack.layout.pair import Pair


@torch._dynamo.disable
def restore(output: Any, padding: Padding | Pair, pooled: bool = True) -> Any:
    """The output of a model that ran on the packed row of a padded batch, as the batch would have given it.

    `pooled` says that a pooler was handed the rows of the batch, so that the output may hold vectors (rows, channels).

    Raises `UnsupportedModel` for a tensor whose place in the batch is not known.
    """
    if isinstance(output, ModelOutput):
        return _restore_lazily(output, padding, pooled)
    if isinstance(output, Mapping):
        restored = {name: _restorer(name, value, padding.of(name), pooled)(value) for name, value in output.items()}
        return type(output)(restored)  # type: ignore[call-arg]
    if isinstance(output, tuple | list):
        return type(output)(_restorer(None, part, padding.of(None), pooled)(part) for part in output)
    return _restorer(None, output, padding.of(None), pooled)(output)


def loss_of(output: Any) -> torch.Tensor | None:
    """The loss in an output of any form, as one number; None where there is none."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is None and isinstance(output, tuple) and output and not hasattr(output, "_fields"):
        loss = output[0] if isinstance(output[0], torch.Tensor) and output[0].dim() == 0 else None
    if loss is None and isinstance(output, torch.Tensor) and output.dim() == 0:
        loss = output
    if not isinstance(loss, torch.Tensor) or not loss.is_floating_point():
        return None
    return loss.sum() if loss.dim() else loss


def _keep(value: Any) -> Any:
    return value


def _restorer(name: str | None, value: Any, padding: Padding | None, pooled: bool) -> Callable[[Any], Any]:
    """How to bring one output into the form of the batch; `_keep` where it has it already."""
    if padding is None:
        return _keep
    if isinstance(value, tuple | list):
        parts = [_restorer(name, part, padding, False) for part in value]  # one for each layer
        if all(part is _keep for part in parts):
            return _keep
        return lambda values: type(values)(part(v) for part, v in zip(parts, values, strict=True))
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return _keep
    if pooled and value.dim() == 2 and value.shape[0] == padding.rows:
        return _keep
    if tuple(value.shape[:2]) == (1, padding.tokens):
        return padding.restore
    if value.dim() == 2 and value.shape[0] == padding.tokens:
        return padding.restore_flat  # router logits
    raise UnsupportedModel(
        f"autopack ran a padded batch of shape {padding.shape} as one row of {padding.tokens} tokens, and "
        f"{name or 'an output'} of shape {tuple(value.shape)} cannot be brought back "
        f"into the form of the batch. Use autopack.enable(model, unpad='never')."
    )


class _Waiting:
    """An output that has not been read yet. It is restored as if that had been done when the forward ended."""

    __slots__ = ("grad", "inference", "restorer", "value")

    def __init__(self, value: Any, restorer: Callable[[Any], Any]):
        self.value = value
        self.restorer = restorer
        self.grad = torch.is_grad_enabled()
        self.inference = torch.is_inference_mode_enabled()

    def fetch(self) -> Any:
        with torch.inference_mode(self.inference), torch.set_grad_enabled(self.grad):
            return self.restorer(self.value)


def _restore_lazily(output: ModelOutput, padding: Padding | Pair, pooled: bool) -> ModelOutput:
    restorers = {name: _restorer(name, value, padding.of(name), pooled) for name, value in output.items()}
    waiting = {name: restorer for name, restorer in restorers.items() if restorer is not _keep}
    if waiting:
        for name, restorer in waiting.items():
            output[name] = _Waiting(output[name], restorer)
        object.__setattr__(output, "__class__", _lazy(type(output)))
    return output


@cache
def _lazy(cls: Any) -> Any:
    """A subclass of a model output class that restores what is read, and is the class itself once all has been."""

    def read(output: Any, name: str) -> Any:
        value = OrderedDict.__getitem__(output, name)
        if type(value) is _Waiting:
            value = value.fetch()
            cls.__setitem__(output, name, value)
            if not any(type(v) is _Waiting for v in OrderedDict.values(output)):
                object.__setattr__(output, "__class__", cls)
        return value

    def read_all(output: Any) -> Any:
        for name in OrderedDict.keys(output):
            read(output, name)
        return output  # an instance of the class itself by now

    class Lazy(cls):
        def __getattribute__(self, name: str) -> Any:
            value = super().__getattribute__(name)
            return read(self, name) if type(value) is _Waiting else value

        def __getitem__(self, key: Any) -> Any:
            if isinstance(key, str):
                return read(self, key)
            names = list(self.keys())[key]
            return read(self, names) if isinstance(names, str) else tuple(read(self, name) for name in names)

        def get(self, key: Any, default: Any = None) -> Any:
            return read(self, key) if key in self else default

        def items(self) -> Any:
            return read_all(self).items()

        def values(self) -> Any:
            return read_all(self).values()

        def __reduce__(self) -> Any:
            return read_all(self).__reduce__()

    Lazy.__name__, Lazy.__qualname__, Lazy.__doc__ = cls.__name__, cls.__qualname__, cls.__doc__
    return Lazy
