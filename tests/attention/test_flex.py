"""flex_attention, through transformers' own mask and attention functions, on a stand-in of the kernel."""

from __future__ import annotations

import pytest
import torch

import autopack
from autopack import tiny
from autopack.inspection import masks
from compat.standins import flex_standin, set_implementation
from tests.support.refusals import refused

pytestmark = pytest.mark.skipif(not masks.has_mask_interface(), reason="this transformers has no mask interface")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("model_type", ["llama", "gemma2", "llama4_text"])
def test_packed_equals_alone(model_type):
    model = tiny.build(model_type)
    set_implementation(model, "flex_attention")
    with flex_standin():
        assert not autopack.audit(model, modes=("default",), gradients=False).exact, "negative control: stock leaks"
        autopack.enable(model, backend="flex")
        report = autopack.audit(model, modes=("default", "two rows"), training=(True,))
    assert report.exact, str(report)


def test_one_block_mask_per_kind_of_layer_and_forward(monkeypatch):
    from transformers import masking_utils

    model = tiny.build("gemma2")
    set_implementation(model, "flex_attention")
    made = []
    with flex_standin():
        create = masking_utils.create_block_mask
        monkeypatch.setattr(masking_utils, "create_block_mask", lambda *a, **k: made.append(1) or create(*a, **k))
        autopack.enable(model, verify=False)  # an audit would count
        positions = torch.cat([torch.arange(9), torch.arange(7)])[None]
        model(input_ids=tiny.tokens(model.config, 1, 16), position_ids=positions)
    assert len(made) == len(set(model.config.layer_types))


def test_a_backend_that_has_no_backward_here_is_refused_at_the_call():
    model = tiny.build("llama", attn_implementation="sdpa")
    autopack.enable(model, backend="flex")
    positions = torch.cat([torch.arange(9), torch.arange(7)])[None]
    with refused("backend-unavailable", match=r"backend='flex'.*off CUDA.*backend='auto'"):
        model(input_ids=tiny.tokens(model.config, 1, 16), position_ids=positions)


def test_sinks_are_refused_off_a_gpu():
    model = tiny.build("gpt_oss", attn_implementation="eager")
    autopack.enable(model, backend="flex")
    with torch.no_grad(), refused("backend-unavailable", match=r"backend='flex'.*attention sinks on a GPU"):
        model(input_ids=tiny.tokens(model.config, 1, 5), position_ids=torch.tensor([[0, 1, 0, 1, 2]]))


def test_a_block_mask_of_the_models_own_is_cut_by_documents(monkeypatch):
    """Such as OPT and BART make up to 4.57; here somebody has Llama make its own, one for all layers of a forward."""
    from torch.nn.attention.flex_attention import create_block_mask
    from transformers.models.llama import modeling_llama

    made = []

    def causal(batch, head, query, key):
        return query >= key

    def own_mask(*, inputs_embeds, **others):
        made.append(create_block_mask(causal, *inputs_embeds.shape[:1], None, *[inputs_embeds.shape[1]] * 2, "cpu"))
        return made[-1]

    monkeypatch.setattr(modeling_llama, "create_causal_mask", own_mask)
    model = tiny.build("llama")
    set_implementation(model, "flex_attention")
    with flex_standin():
        assert not autopack.audit(model, modes=("default",), gradients=False).exact, "negative control: stock leaks"
        autopack.enable(model, verify=False)
        made.clear()
        report = autopack.audit(model, modes=("default", "two rows"), training=(True,))
    assert report.exact, str(report)
    assert made


OWN_RULES = {
    "window": lambda batch, head, query, key: (query >= key) & (query - key < 4),
    "chunks of columns": lambda batch, head, query, key: (query >= key) & (query // 8 == key // 8),
    "first column for all": lambda batch, head, query, key: (query >= key) & ((query - key < 4) | (key == 0)),
}
"""Rules of BlockMasks that somebody makes; the last two depend on where in the row a document lies."""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", OWN_RULES)
def test_a_block_mask_that_counts_columns_is_refused(monkeypatch, name):
    from torch.nn.attention.flex_attention import create_block_mask
    from transformers.models.llama import modeling_llama

    def own_mask(*, inputs_embeds, **others):
        return create_block_mask(OWN_RULES[name], len(inputs_embeds), None, *[inputs_embeds.shape[1]] * 2, "cpu")

    monkeypatch.setattr(modeling_llama, "create_causal_mask", own_mask)
    model = tiny.build("llama")
    set_implementation(model, "flex_attention")
    with flex_standin():
        if name == "window":
            autopack.enable(model)
            assert autopack.audit(model, modes=("default", "two rows"), training=(True,)).exact
        else:
            with refused("not-exact"):
                autopack.enable(model)
