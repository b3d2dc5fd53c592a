"""Batches that look padded and bring no mask: pointed out once, since none of their padding can be left out."""

from __future__ import annotations

import logging

import torch

from autopack.calls.call import Call
from autopack.inspection.configs import text_config
from autopack.layout.host import recall

logger = logging.getLogger(__name__)

_ALL_OF = 16
"""So many calls are all looked at; after them only those whose number is a power of two."""


def point_out(call: Call) -> None:
    """Warn, once for each model, where most rows of a batch without a mask end or begin with padding tokens.

    Looks at tokens that are on the host already, and waits for no device; of many calls at ever fewer.
    """
    tally, model = call.model.tally, call.model
    if tally.unmasked or call.outer is not None or model.is_settling or model.options.unpad == "never":
        return
    before = tally.training.calls + tally.evaluation.calls
    if before > _ALL_OF and before & (before - 1):
        return
    if call.arguments.get("attention_mask") is not None or call.continues:
        return
    if torch.jit.is_tracing() or torch._C._are_functorch_transforms_active():
        return
    ids = recall(call.arguments).get("input_ids", call.arguments.get("input_ids"))
    # By its exact type: one that is recorded has no values.
    if type(ids) is not torch.Tensor or ids.device.type != "cpu" or ids.dim() != 2 or ids.shape[1] < 3 or len(ids) < 2:
        return
    # Two of them: a text may well end with one, where it is also the token at the end of texts.
    tokens = ids.detach().numpy()
    twice = [tokens[tokens[:, one] == tokens[:, other], one] for one, other in ((-1, -2), (0, 1))]
    if max(map(len, twice)) < 2:
        return
    pad = text_config(call.config).pad_token_id
    if not isinstance(pad, int):
        return
    rows = max(int((each == pad).sum()) for each in twice)
    if rows < 2 or 2 * rows < len(ids):
        return
    tally.unmasked = True
    logger.warning(
        "a batch of %s looks padded, and brings no attention_mask: %s of its %s rows end or begin with several tokens "
        "that are pad_token_id (%s). Every column is taken for a token, as without autopack, and computed. Pass the "
        "attention_mask that the tokenizer or the collator makes, and padding is left out.",
        call.name,
        rows,
        len(ids),
        pad,
    )
