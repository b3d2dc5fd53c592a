"""Whether a model gives rows that begin alike what stock gives them, where that is computed once: asked of its twin."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from autopack.auditing.left_as_found import left_as_found
from autopack.enabling import twin_calls
from autopack.enabling.attach import detach
from autopack.enabling.by_twin import enabled_like
from autopack.enabling.reading import callable_part
from autopack.enabling.twin_calls import MakeTwin, Results
from autopack.proving.twin import NoTwin
from autopack.runtime.model import EnabledModel
from autopack.runtime.scope import stock
from autopack.tiny import tokens

_ROWS, _COLUMNS, _PREFIX, _MIDDLE = 4, 26, 12, 7
"""Rows of a tree and their tokens; what all begin with, and what half of them go on with."""


def why_apart(model: PreTrainedModel, enabled: EnabledModel) -> str | None:
    """Why a model would not give the same, in words; None where its twin does. Its own weights have no part in it."""

    def ask(make: MakeTwin, dtype: torch.dtype) -> str | None:
        twin = make()
        twin_enabled = enabled_like(twin, enabled, share="always", unpad="always")
        try:
            with twin_enabled.settling():
                part = callable_part(twin_enabled)
                call = _tree(twin)
                wanted: Results = {}
                found: Results = {}
                for training in (False, True):
                    with left_as_found(twin):  # without dropout
                        twin.train(training)
                        with stock(twin_enabled):
                            wanted |= _results(part, call, training)
                        before = _shared(twin_enabled)
                        found |= _results(part, call, training)
                        if _shared(twin_enabled) == before:
                            raise NoTwin("it takes none of the tokens together")
        finally:
            detach(twin, twin_enabled)
        return twin_calls.difference(found, wanted, dtype)

    return twin_calls.why_not(model, enabled, "prefixes", ask)


def _shared(enabled: EnabledModel) -> int:
    return enabled.tally.training.shared + enabled.tally.evaluation.shared


def _tree(model: Any) -> dict[str, torch.Tensor]:
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
    ids = torch.stack([*rows, rest[:_COLUMNS], rows[0]]).to(model.device)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _results(model: Any, call: dict[str, torch.Tensor], training: bool) -> Results:
    """In this mode every output at real tokens, and the gradients of a sum of them."""
    mask = call["attention_mask"].bool()
    labels = call["input_ids"].masked_fill(~mask, -100)
    found: Results = {}
    for number, given in enumerate([{}, {"labels": labels}] if _predicts_tokens(model) else [{}]):
        model.zero_grad(set_to_none=True)
        output = model(**call, **given, use_cache=False, return_dict=True)
        whole: Any = 0.0
        for name, value in twin_calls.tensors_of(output):
            values = value[mask] if value.shape[:2] == mask.shape else value
            found[f"{name} {number} {training}"] = values.detach()
            whole = whole + (values * twin_calls.weights_of(values.shape, values)).sum()
        whole.backward()
        found[f"gradient {number} {training}"] = twin_calls.gradients_of(model)
    return found


def _predicts_tokens(model: Any) -> bool:
    return type(model).__name__.endswith(("ForCausalLM", "LMHeadModel"))
