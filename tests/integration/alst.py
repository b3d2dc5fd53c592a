"""A stand-in for DeepSpeed's sequence parallelism, after
`UlyssesSPAttentionHF.register_with_transformers` of 0.19.

DeepSpeed itself is no package of these tests; `python -m compat.engines "shared
rows zero3"` runs it where it is installed."""

import sys
from types import ModuleType

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from autopack.runtime.row_group import RowGroup

NAME = "deepspeed.runtime.sequence_parallel.ulysses_sp"
_SOURCE = """
def make(uattn):
    def uattn_wrapper(module, query, key, value, attention_mask, *args, **kwargs):
        return uattn(module, query, key, value, None, *args, **kwargs)
    return uattn_wrapper
"""


class Exchange(torch.nn.Module):
    """What is around the attention function `attn`: tokens of all ranks and some heads, and
    back."""

    def __init__(self, attn, group, in_eval):
        super().__init__()
        self.attn, self.process_group, self.disable_in_eval = attn, group, not in_eval

    def forward(self, module, query, key, value, mask, *_, **kwargs):
        if not module.training and self.disable_in_eval:
            return self.attn(module, query, key, value, mask, **kwargs)
        rows = RowGroup(self.process_group)

        def exchanged(states, dim):
            return (
                rows.exchange(states.unflatten(dim, (rows.ranks, -1)).movedim(dim, 0))
                .movedim(0, 2)
                .flatten(2, 3)
            )

        whole = [exchanged(states, 1) for states in (query, key, value)]
        output, weights = self.attn(module, *whole, mask, scaling=kwargs["scaling"])
        return exchanged(output, 1), weights


def register(group, implementation="sdpa", in_eval=False):
    """Put an exchange around the function of an implementation, where models look first; returns
    what stands there."""
    made = ModuleType(NAME)
    sys.modules.setdefault(NAME, made)
    exec(_SOURCE, made.__dict__)
    function = made.make(Exchange(ALL_ATTENTION_FUNCTIONS[implementation], group, in_eval))
    ALL_ATTENTION_FUNCTIONS[implementation] = function
    return function
