"""Whether a model can be called with parts of packed rows that ranks share: asked of its twin, on threads as ranks."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from transformers import PreTrainedModel

from autopack.auditing.left_as_found import left_as_found
from autopack.enabling import twin_calls
from autopack.enabling.attach import detach
from autopack.enabling.by_twin import enabled_like
from autopack.enabling.reading import callable_part
from autopack.enabling.twin_calls import MakeTwin, Results
from autopack.inspection.randomness import drawing_nothing
from autopack.layout import IGNORED_LABEL
from autopack.packing.sequence_parallel import shard_rows
from autopack.proving.ranks import ThreadGroup, ranks_of_threads, run_together
from autopack.proving.twin import NoTwin
from autopack.registry import first_position
from autopack.runtime.model import EnabledModel, Labels
from autopack.tiny import tokens

_RANKS = 2
_LENGTHS = ((7, 60, 29), (50, 11, 35))
"""Documents of two rows of 96 columns, of which a rank has 48: one is longer than a part, none ends with one."""


def why_apart(model: PreTrainedModel, enabled: EnabledModel, labels: Labels) -> str | None:
    """Why ranks that share rows would not get what one rank gets of whole rows, in words; None where its twin's do.

    With labels a call asks for a loss too. Those of all parts have to add up: of `num_items_in_batch` tokens where the
    loss is of shifted labels, else by the tokens that each part counts.
    """

    def ask(make: MakeTwin, dtype: torch.dtype) -> str | None:
        wanted = _on_one(make(), enabled, None, labels)
        groups = ranks_of_threads(_RANKS)
        models = {group: make() for group in groups}
        with drawing_nothing(models[groups[0]]):  # what one thread puts back, another may have drawn from
            parts = run_together(groups, lambda group: _on_one(models[group], enabled, group, labels))
        return twin_calls.difference(_together(parts), wanted, dtype)

    return twin_calls.why_not(model, enabled, f"parts of rows, {labels} labels", ask)


def _on_one(twin: PreTrainedModel, like: EnabledModel, group: ThreadGroup | None, labels: Labels) -> Results:
    """Outputs and gradients of this rank's part; those of whole rows where there is no group."""
    twin_enabled = enabled_like(twin, like, sequence_parallel=group)
    try:
        with twin_enabled.settling():
            if callable_part(twin_enabled) is not twin:
                raise NoTwin("its own forward cannot be called with tokens and positions by their names")
            found: Results = {}
            for training, padded in itertools.product((False, True), repeat=2):
                with left_as_found(twin):  # without dropout
                    twin.train(training)
                    made = _results(twin, _batch(twin, labels, padded), group, labels)
                found |= {f"{name} {training} {padded}": value for name, value in made.items()}
            return found
    finally:
        detach(twin, twin_enabled)


def _batch(model: Any, labels: Labels, padded: bool) -> dict[str, Any]:
    """Packed rows; the last document of each is padding, if so."""
    count, columns = len(_LENGTHS), sum(_LENGTHS[0])
    ids = tokens(model.config, count, columns).to(model.device)
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in _LENGTHS])
    batch: dict[str, Any] = {"input_ids": ids}
    batch["position_ids"] = positions.to(ids) + first_position(model.config)
    ignored = positions.to(ids) == 0
    if padded:
        filled = torch.tensor([columns - row[-1] for row in _LENGTHS])
        real = torch.arange(columns) < filled[:, None]
        batch["attention_mask"] = real.to(ids)
        ignored |= ~real.to(ignored)
    if labels != "no":
        batch["labels"] = ids.masked_fill(ignored, IGNORED_LABEL)
        if labels == "shifted":
            batch["num_items_in_batch"] = int((~ignored).sum())
    return batch


def _results(model: Any, batch: dict[str, Any], group: ThreadGroup | None, labels: Labels) -> Results:
    shape, mask = batch["input_ids"].shape, batch.get("attention_mask")
    counted = torch.ones_like(batch["input_ids"]) if mask is None else mask
    given, share = batch, 1.0
    if group is not None:
        given = shard_rows(batch, group.rank, group.ranks, shift_labels=labels == "shifted")
        if labels == "as they are":  # a mean over the tokens of this part
            share = int((given["labels"] != IGNORED_LABEL).sum()) / int((batch["labels"] != IGNORED_LABEL).sum())
    model.zero_grad(set_to_none=True)
    output = model(**given, use_cache=False, return_dict=True)
    found: Results = {}
    whole: Any = 0.0
    for name, value in twin_calls.tensors_of(output):
        if name == "loss":
            value = value * share
            whole = whole + value
        else:
            # What stands in padding is nobody's.
            weights = twin_calls.weights_of((*shape, *value.shape[2:]), value)
            real = counted.to(value).reshape(*shape, *[1] * (value.dim() - 2)).expand_as(weights)
            if group is not None:
                weights, real = group.part(weights, 1), group.part(real, 1)
            value = value * real
            whole = whole + (value * weights).sum() / counted.numel()
        found[name] = value.detach()
    whole.backward()
    return {**found, "gradient": twin_calls.gradients_of(model)}


def _together(parts: list[Results]) -> Results:
    """The outputs of all parts side by side; losses and gradients add up."""
    by_name = {name: [part[name] for part in parts] for name in parts[0]}
    return {
        name: torch.stack(found).sum(0) if name.startswith(("loss ", "gradient ")) else torch.cat(found, dim=1)
        for name, found in by_name.items()
    }
