"""Find out if code outside reads a model's output at padding, by the gradient that comes back.

Without its padding a batch gives zeros there, which does not matter to code that masks them out. A
sum over all columns or a score of all of them is another number then. So the first batches that are
differentiated run as they came.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from autopack.errors import UnsupportedModel
from autopack.inspection.state import State
from autopack.layout.forms import Frame, rows_first
from autopack.layout.host import upload

logger = logging.getLogger(__name__)

LOOKS = (
    "whether its results at padding are read is found out in this call, by the gradient that they "
    "get"
)
LOOKS_AT_STATE = "whether a module keeps state of all columns is found out in this call"
_BLIND = "nobody can tell whether its results at padding are read: they get no gradient"


class Look(partial):
    """Gradient hook that only observes an output, and does not count as asking for its gradient."""


class PaddingRead:
    """Observations whether code outside of one model reads its results at padding."""

    def __init__(self) -> None:
        self.ran = 0  # batches that have run without their padding
        self.looks = 0  # batches that ran as they came, to find it out
        self.due_at = 1  # the number of the padded batch from which on the next one does
        self.answered = False  # whether a gradient has come back to one that ran as it came
        # the module that keeps state, and what it writes, where one does
        self.writes: str | None = None
        # the part of its output that is read at padding, where one is
        self.where: str | None = None
        self._looked_at: list[weakref.ref[Tensor]] = []
        """The tokens of batches that ran as they came: checkpoints repeat them in backward."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_looked_at": []}

    def why_to_keep(self, tokens: Tensor, has_labels: bool, trained: bool) -> str | None:
        """Return why a batch, `tokens` (rows, columns, ...), keeps its padding; None if it may go.

        A loss that the model makes of labels does not read padding; others are outside of it. No
        gradient comes back to a model that is not `trained`.
        """
        if self.where is not None:
            return (
                f"{self.where} of its output was read at padding: a gradient came back to it there"
            )
        if has_labels or not torch.is_grad_enabled():
            return None
        if not trained and not tokens.requires_grad:
            return _BLIND
        if _is_in_backward():
            return LOOKS if any(ref() is tokens for ref in self._looked_at) else None
        return LOOKS if self.is_due() or not self.answered else None

    def why_state_stays(self, model: nn.Module) -> str | None:
        """Return why a batch keeps its padding for modules with state; None if it may go."""
        if self.writes is not None:
            return f"{self.writes} in a training call, and keeps state of all columns as stock does"
        return LOOKS_AT_STATE if self.is_due() and not _is_in_backward() and State(model) else None

    def look_at_state(self, state: State, counts: bool) -> None:
        """Note the state that a padded call wrote; count it as a check if it `counts`."""
        self.writes = self.writes or state.changed()
        if counts and not _is_in_backward():
            self.looks += 1
            self.due_at = 2 * (self.ran + self.looks)

    def is_due(self) -> bool:
        """Return True if the next batch is to keep its padding as a check: the 1st, 2nd, 4th ..."""
        return self.ran + self.looks + 1 >= self.due_at

    def look(
        self,
        output: Any,
        sides: list[tuple[str, np.ndarray]],
        tokens: Tensor | None = None,
        refuses: bool = False,
    ) -> None:
        """Put hooks on an output's tensors that note gradients at padding, or raise if `refuses`.

        The batch ran as it came; or else it ran without its padding, and gradients there raise
        (`refuses`).

        `sides` are masks of real tokens, (rows, columns), each with the prefix of its parts' names
        in the output.
        """
        if _is_in_backward() or torch._C._are_functorch_transforms_active():
            return
        self.looks += not refuses
        self.due_at = 2 * (self.ran + self.looks)
        if tokens is not None:
            self._forget(tokens)
            self._looked_at.append(weakref.ref(tokens))
        found = [(name, value) for name, value in _named_tensors("", output) if value.requires_grad]
        shown = 0
        for name, value in found:
            real = next(real for prefix, real in sides if name.startswith(prefix))
            axis = Frame(*real.shape).axis_of_output(name.partition("[")[0], value)
            if axis is not None:
                padding = upload(~real, value.device)
                value.register_hook(
                    Look(self._check_gradient, name or "output", padding, axis, refuses)
                )
                shown += 1
        self.answered |= shown == 0  # there is nothing at padding that anybody could read

    def note_unpadded(self, tokens: Tensor | None) -> None:
        """Count a batch that runs without its padding now, and forget its `tokens`."""
        if not _is_in_backward():
            self.ran += 1
            self._forget(tokens)

    def _forget(self, tokens: Tensor | None) -> None:
        """Forget a batch's `tokens`, and those of all batches that no longer exist."""
        self._looked_at = [
            ref for ref in self._looked_at if ref() is not None and ref() is not tokens
        ]

    def refuse(self, name: str) -> None:
        """Note that output `name` was read at padding, and raise `UnsupportedModel`."""
        self.where = name
        raise UnsupportedModel(
            f"a gradient came back to {name} at padding of a batch that autopack ran without it: "
            "something beside the loss of its labels reads there what stock gives, and got zeros. "
            "Padded batches keep their padding from now on, so run this step again; "
            "autopack.enable(model, unpad=False) keeps it from the beginning.",
            code="unpad-refused",
        )

    def _check_gradient(
        self,
        name: str,
        padding: Tensor,
        axis: int,
        refuses: bool,
        gradient: Tensor | None,
    ) -> None:
        """Note that output `name` is read if its gradient is not zero at padding; or raise."""
        # A step that a scaler of losses will skip tells nothing: infinity times a mask of zero is
        # no zero.
        if gradient is None or not bool(gradient.isfinite().all()):
            return
        self.answered |= not refuses
        found = gradient[padding.reshape(-1)] if axis == 0 else rows_first(gradient, axis)[padding]
        if self.where is not None or not bool((found != 0).any()):
            return
        if refuses:
            self.refuse(name)
        else:
            self.where = name
            logger.warning(
                "Code behind the model reads its output at padding (%s), so padded batches keep "
                "their padding from now on. If that code should not read padding, mask it out "
                "there.",
                name,
            )


def _is_in_backward() -> bool:
    """Return True if a backward pass is running, where checkpoints repeat earlier calls."""
    return torch._C._current_graph_task_id() != -1


def _named_tensors(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield (path from `name`, tensor) for all tensors in nested mappings and sequences."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from _named_tensors(f"{name}.{key}" if name else str(key), part)
    elif isinstance(value, tuple | list):
        for number, part in enumerate(value):
            yield from _named_tensors(f"{name}[{number}]", part)
