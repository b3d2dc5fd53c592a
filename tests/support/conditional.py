"""A Llama of the user's own that mixes tokens under a condition, and batches that meet it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from transformers import LlamaForCausalLM

from autopack import tiny

EXACT, LEAK = 1e-4, 1e-2
"""Of the deviation of logits in float32: rounding leaves about 1e-6, and what leaks here starts near 0.5."""


class Conditional(LlamaForCausalLM):
    """A model of the user's that mixes tokens in some calls: `mixes` gets all that its forward does.

    `change` is what it makes of embedded tokens then.
    """

    mixes: Callable[..., Any] = staticmethod(lambda self, **given: False)
    change: Callable[[torch.Tensor], torch.Tensor] = staticmethod(lambda states: states + 0.5 * states.cumsum(1))

    def forward(self, input_ids=None, inputs_embeds=None, **kwargs):
        states = self.get_input_embeddings()(input_ids) if inputs_embeds is None else inputs_embeds
        if type(self).mixes(self, input_ids=input_ids, inputs_embeds=inputs_embeds, states=states, **kwargs):
            states = type(self).change(states)
        return super().forward(inputs_embeds=states, **kwargs)


def build(mixes=None, **config):
    stock = tiny.build("llama", **config)
    members = {} if mixes is None else {"mixes": staticmethod(mixes)}
    model = type("Users", (Conditional,), {**members, "__module__": __name__})._from_config(stock.config)
    model.load_state_dict(stock.state_dict())
    return model.eval()


def row(*lengths, rows=1, seed=0):
    """Packed rows, all of the same documents."""
    ids = tiny.tokens(tiny.config("llama"), rows, sum(lengths), seed=seed)
    where = torch.cat([torch.arange(length) for length in lengths]).expand(rows, -1)
    return {"input_ids": ids, "position_ids": where}


def lengths_of(batch):
    starts = [*(batch["position_ids"][0] == 0).nonzero().flatten().tolist(), batch["position_ids"].shape[1]]
    return [end - start for start, end in pairwise(starts)]


def error(model, stock, batch):
    """The largest difference of logits to documents alone, of their deviation."""
    with torch.no_grad():
        found, worst = model(**batch).logits, 0.0
        for ids, logits in zip(batch["input_ids"], found, strict=True):
            sizes = lengths_of(batch)
            for part, got in zip(ids.split(sizes), logits.split(sizes), strict=True):
                wanted = stock(input_ids=part[None], use_cache=False).logits[0]
                worst = max(worst, float((got - wanted).abs().max() / wanted.std()))
    return worst
