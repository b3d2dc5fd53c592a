"""A Llama of the user's own that mixes tokens under a condition, and batches that meet it."""

from itertools import pairwise

import torch
from transformers import LlamaForCausalLM

from autopack import tiny
from tests.conftest import alone
from tests.conftest import error as relative_error
from tests.engine import counted

EXACT, LEAK = 1e-4, 1e-2
"""Of the deviation of logits in float32: rounding leaves about 1e-6, and what leaks here starts
near 0.5."""


class Conditional(LlamaForCausalLM):
    """Model of the user's that mixes tokens in the calls for which `mixes` is true.

    `mixes` gets all arguments of the forward; `change` maps the embedded tokens to mixed ones.
    """

    mixes = staticmethod(lambda self, **given: False)
    change = staticmethod(lambda states: states + 0.5 * states.cumsum(1))

    def forward(self, input_ids=None, inputs_embeds=None, **kwargs):
        states = self.get_input_embeddings()(input_ids) if inputs_embeds is None else inputs_embeds
        if type(self).mixes(
            self, input_ids=input_ids, inputs_embeds=inputs_embeds, states=states, **kwargs
        ):
            states = type(self).change(states)
        return super().forward(inputs_embeds=states, **kwargs)


def build(mixes=None, **config):
    """Return a Llama of class `Conditional` with a condition; None mixes in no call."""
    stock = tiny.build("llama", **config)
    members = {} if mixes is None else {"mixes": staticmethod(mixes)}
    model = type("Users", (Conditional,), {**members, "__module__": __name__})._from_config(
        stock.config
    )
    model.load_state_dict(stock.state_dict())
    return model.eval()


def row(*lengths, rows=1, seed=0):
    """Return packed rows as arguments, all of documents of the same lengths."""
    ids = tiny.tokens(tiny.config("llama"), rows, sum(lengths), seed=seed)
    where = counted(lengths).expand(rows, -1)
    return {"input_ids": ids, "position_ids": where}


def lengths_of(batch):
    """Return the lengths of the documents in a packed row, from its positions."""
    starts = [
        *(batch["position_ids"][0] == 0).nonzero().flatten().tolist(),
        batch["position_ids"].shape[1],
    ]
    return [end - start for start, end in pairwise(starts)]


def error(model, stock, batch):
    """Return the largest error of logits against documents alone, over their deviation."""
    ids = batch["input_ids"]
    with torch.no_grad():
        return relative_error(
            model(**batch).logits, alone(stock, ids, *[lengths_of(batch)] * len(ids))
        )
