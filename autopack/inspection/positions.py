"""Token positions that models choose, for a document alone and in a padded batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopack.inspection.configs import text_config


@dataclass(frozen=True)
class Numbering:
    """The rule by which a model numbers tokens if a call brings no positions.

    `start` is the position of a document's first token. With `after_pad_token` it is `pad_token_id
    + 1` instead, and all tokens but the padding token are counted. `uncounted` is a token that is
    not counted and stands at the position of its number. With `along_mask` positions add up the
    attention mask, which skips padding. `changed` is True if releases of transformers differ in
    that. `relative` is True if only differences between positions count, so that a document may
    begin before `start`.
    """

    start: int = 0
    after_pad_token: bool = False
    along_mask: bool = False
    changed: bool = False
    relative: bool = False
    uncounted: int | None = None

    def first_position(self, config: Any) -> int:
        """Return the position of the first token of a document for models of this config.

        Raises `ValueError` for a RoBERTa-like config without the `pad_token_id` that its positions
        start after.
        """
        if not self.after_pad_token:
            return self.start
        text = text_config(config)
        pad_token_id = getattr(text, "pad_token_id", None)
        if not isinstance(pad_token_id, int):
            raise ValueError(
                f"{text.model_type}: wanted config.pad_token_id, found {pad_token_id}; pass "
                "first_position"
            )
        return pad_token_id + 1

    def earliest_position(self, model: Any, config: Any) -> int:
        """Return the least position at which a document may begin with unchanged results.

        A table of positions allows only the usual beginning; rotations know differences alone.
        """
        first = self.first_position(config)
        return 0 if self.relative or not first or rotates(model, config) else first

    def is_known(self, adds_up_mask: bool) -> bool:
        """Return True if `in_padded_batch` is right for padding that is not on the right.

        `adds_up_mask` is True if the model's code adds up a mask, as most releases of most models
        do not.
        """
        return self.along_mask or not (adds_up_mask or self.changed)

    def in_padded_batch(self, config: Any, mask: Tensor, input_ids: Tensor | None) -> Tensor:
        """Return a padded batch's positions in models of this config: int64 (rows, columns).

        Most models use the column's number, whatever the mask.
        """
        if self.along_mask:
            return mask.long().cumsum(1) - 1
        counted = self.of_counted(config, input_ids)
        if counted is not None:
            return counted
        return torch.arange(mask.shape[1], device=mask.device).expand(
            mask.shape
        ) + self.first_position(config)

    def of_counted(
        self, config: Any, input_ids: Tensor | None, starts: Tensor | None = None
    ) -> Tensor | None:
        """Return positions that skip one uncounted token: int64 (rows, columns), or None.

        `starts` (rows, columns) are the columns in which the documents of tokens begin, where rows
        hold several.
        """
        skipped = self.first_position(config) - 1 if self.after_pad_token else self.uncounted
        if skipped is None or input_ids is None or input_ids.dim() != 2:
            return None
        counted = input_ids.ne(skipped).long()
        number = counted.cumsum(1)
        if starts is not None:
            number = number - (number - counted).gather(1, starts)
        return number * counted + skipped


def rotates(model: Any, config: Any = None) -> bool:
    """Return True if positions rotate queries and keys, and no position table adds to tokens."""
    tables = {m.num_embeddings for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    known = getattr(text_config(config or model.config), "max_position_embeddings", None)
    return known not in tables and any("inv_freq" in module._buffers for module in model.modules())


AFTER_PAD_TOKEN = Numbering(after_pad_token=True)
