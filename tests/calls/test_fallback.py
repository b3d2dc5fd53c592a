"""Models that `autopack run` has enabled run a call that is refused as stock would, also one
further in."""

import logging

import pytest
import torch
from transformers import LlamaForCausalLM

import autopack
from tests.conftest import error, llama, positions, token_ids
from tests.support.refusals import refused

LENGTHS = (5, 19)
IDS = token_ids(2, sum(LENGTHS))
FIVE_ONES = torch.ones_like(IDS).index_fill(1, torch.arange(19, 24), 0)


class BringsPositions(LlamaForCausalLM):
    """Declares documents to its backbone alone, and wants the cache as well."""

    def forward(self, input_ids=None, attention_mask=None, **options):
        where = (
            positions(LENGTHS).expand(len(input_ids), -1) if input_ids.shape == IDS.shape else None
        )
        states = self.model(
            input_ids, attention_mask, position_ids=where, use_cache=True
        ).last_hidden_state
        return self.lm_head(states)


def _built():
    torch.manual_seed(0)
    return BringsPositions(llama().config).double().eval()


@pytest.mark.parametrize(
    "mask", [None, torch.ones_like(IDS), FIVE_ONES], ids=["no mask", "all ones", "padded"]
)
def test_a_call_further_in_is_stocks(mask, caplog):
    model, stock = _built(), _built()
    with autopack.enable(model) as handle:
        with refused("cache-given"):
            model(input_ids=IDS, attention_mask=mask)
        handle.enabled.lenient = True
        with caplog.at_level(logging.WARNING):
            found = model(input_ids=IDS, attention_mask=mask)
        assert error(found, stock(input_ids=IDS, attention_mask=mask)) == 0.0
        assert (
            "runs as it would have without autopack: LlamaModel cannot run packed rows: a cache"
            in caplog.text
        )
        assert sum(handle.enabled.tally.refused.values()) == 1
