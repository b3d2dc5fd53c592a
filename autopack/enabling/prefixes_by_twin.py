"""Whether a model gives rows that begin alike what stock gives them, where that is computed once: asked of its twin."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedModel

from autopack.auditing.auditor import TOLERANCE
from autopack.enabling.attach import detach
from autopack.enabling.by_twin import enabled_like, parts_outside, precisions_of, with_what_is_on
from autopack.enabling.reading import callable_part
from autopack.errors import AutopackError
from autopack.proving import kept
from autopack.proving import twin as twins
from autopack.proving.apart import apart
from autopack.proving.twin import NoTwin
from autopack.runtime.model import EnabledModel
from autopack.runtime.scope import stock
from autopack.tiny import tokens

_ROWS, _COLUMNS, _PREFIX, _MIDDLE = 4, 26, 12, 7
"""Rows of a tree and their tokens; what all begin with, and what half of them go on with."""
_GRADIENTS = 10
"""Gradients may differ by so many times as much as outputs: sums over all tokens cancel in them."""


def why_apart(model: PreTrainedModel, enabled: EnabledModel) -> str | None:
    """Why a model would not give the same, in words; None where its twin does. Its own weights have no part in it."""
    key = None
    if not enabled.runs_other_code:
        key = kept.key_of(model, "prefixes", enabled.options.backend, enabled.implementations())
    found = None if key is None else kept.load(key)
    if found is None:
        try:
            found = {"why": apart(lambda: _asked(model, enabled))}
        except NoTwin as error:
            found = {"why": f"no twin of it tells whether it gives the same: {error}"}
        if key is not None:
            kept.store(key, found)
    return found["why"]


def _asked(model: PreTrainedModel, enabled: EnabledModel) -> str | None:
    dtypes, device = precisions_of(model, enabled)
    failure: Exception | None = None
    for dtype in dtypes:
        try:
            return _differs(model, enabled, dtype, device)
        except AutopackError as error:
            return f"its twin refuses it: {error}".partition(". ")[0]
        except NoTwin:
            raise
        except Exception as error:  # a class may compute nothing at this size, or know no float64
            failure = error
    raise NoTwin(f"it raised {type(failure).__name__}: {failure}")


def _differs(model: PreTrainedModel, enabled: EnabledModel, dtype: torch.dtype, device: str) -> str | None:
    whole = with_what_is_on(model, twins.of(model, dtype, device))
    parts_outside(whole, model)  # what the twin has none of has to look at one token at a time
    twin = whole.model.eval()
    twin_enabled = enabled_like(twin, enabled, share="always", unpad="always")
    try:
        with twin_enabled.settling():
            part = callable_part(twin_enabled)
            call = _tree(twin, device)
            with stock(twin_enabled):
                wanted = _results(part, call)
            before = twin_enabled.tally.training.shared
            found = _results(part, call)
            if twin_enabled.tally.training.shared == before:
                raise NoTwin("it takes none of the tokens together")
    finally:
        detach(twin, twin_enabled)
    if wanted.keys() != found.keys() or not wanted:
        return "its twin gives other outputs"
    for name, value in wanted.items():
        scale = float(value.abs().max())
        error = float((found[name] - value).abs().nan_to_num(float("inf")).max()) if value.numel() else 0.0
        bound = TOLERANCE[dtype] * (_GRADIENTS if name.startswith("gradient") else 1)
        # What casts to float32 in code of its own rounds as float32 does.
        bound = max(bound, TOLERANCE[torch.float32]) if dtype == torch.float64 else bound
        if error > bound * max(scale, 1e-6):
            return f"its twin gives another {name.partition(' ')[0]}, by {error / max(scale, 1e-6):.0e} of its size"
    return None


def _tree(model: Any, device: str) -> dict[str, torch.Tensor]:
    """A batch whose rows begin alike, two of them for longer, one of them twice, and one that shares nothing.

    It has no padding, which heads look for in ways of their own.
    """
    drawn = tokens(model.config, 1, 4 * _COLUMNS)[0]
    prefix, middle, rest = drawn.split([_PREFIX, _MIDDLE, len(drawn) - _PREFIX - _MIDDLE])
    rows = []
    for number in range(_ROWS):
        begun = torch.cat([prefix, middle]) if number < _ROWS // 2 else prefix
        end, rest = rest.split([_COLUMNS - len(begun), len(rest) - _COLUMNS + len(begun)])
        rows.append(torch.cat([begun, end]))
    ids = torch.stack([*rows, rest[:_COLUMNS], rows[0]])
    return {"input_ids": ids.to(device), "attention_mask": torch.ones_like(ids).to(device)}


def _results(model: Any, call: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Every output at real tokens, and the gradients of a sum of them."""
    mask = call["attention_mask"].bool()
    labels = call["input_ids"].masked_fill(~mask, -100)
    found: dict[str, torch.Tensor] = {}
    for number, given in enumerate([{}, {"labels": labels}] if _predicts_tokens(model) else [{}]):
        model.zero_grad(set_to_none=True)
        output = model(**call, **given, use_cache=False, return_dict=True)
        whole: Any = 0.0
        for name, value in _tensors(output):
            values = value[mask] if value.shape[:2] == mask.shape else value
            found[f"{name} {number}"] = values.detach()
            whole = whole + (values.float() * _weights(values)).sum()
        whole.backward()
        gradients = [p.grad.detach().flatten() for p in model.parameters() if p.grad is not None]
        found[f"gradient {number}"] = torch.cat(gradients)
    return found


def _weights(values: torch.Tensor) -> torch.Tensor:
    return torch.linspace(0.5, 1.5, values.numel(), device=values.device).reshape(values.shape)


def _predicts_tokens(model: Any) -> bool:
    return type(model).__name__.endswith(("ForCausalLM", "LMHeadModel"))


def _tensors(output: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in output.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.requires_grad:
            yield name, value
