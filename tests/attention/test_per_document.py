"""Attention once per document: equally long documents are a batch, and one call of the model's
function."""

from functools import partial

import pytest
import torch
from transformers import AttentionInterface
from transformers.models.llama.modeling_llama import LlamaAttention

import autopack
from autopack import tiny
from tests.conftest import FLOAT64, alone, error, llama, token_ids
from tests.engine import Call, declared, must_be_exact
from tests.subjects import build
from tests.support.refusals import refused

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


MANY_SHORT = (5, 2, 9, 5, 5, 2, 9, 9, 2, 5, 2, 9)


@pytest.mark.parametrize(
    ("lengths", "calls"),
    [((6, 6, 6), 1), ((6, 7, 5), 3), ((18,), 1), (MANY_SHORT, 3), ((40, 20) * 4, 8)],
)
def test_calls_of_the_attention_function(monkeypatch, lengths, calls):
    seen, sdpa = [], AttentionInterface._global_mapping["sdpa"]

    def counted(module, query, *args, **kwargs):
        seen.append(query.shape[0])
        return sdpa(module, query, *args, **kwargs)

    model, ids = llama("sdpa", num_hidden_layers=1), token_ids(columns=sum(lengths))
    expected = alone(model, ids, lengths)
    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", counted)
    with autopack.enable(model, verify=False), torch.no_grad():
        found = model(input_ids=ids, **declared(model, "cu_seq_lens", lengths)).logits
        assert error(found, expected) <= FLOAT64
        assert len(seen) == calls
        assert sum(seen) == len(lengths)


@pytest.mark.parametrize("kind", ["gemma2", "gemma3_text", "llama4_text", "modernbert"])
def test_many_short_documents_are_those_alone(kind):
    """Windows and chunks of these types are shorter than some documents."""
    task = "masked-lm" if kind == "modernbert" else "causal-lm"
    must_be_exact(
        partial(build, kind, task), Call(lengths=MANY_SHORT, shifts=task == "causal-lm").row
    )


@pytest.mark.parametrize("lengths", [(3, 1), (1, 3), (2, 2), (1, 1, 1, 1), (4,)])
def test_as_many_tokens_as_heads(lengths):
    """Sinks of this type are (rows, heads, columns, 1), and which axis is which cannot be told by
    their sizes."""
    assert tiny.config("inkling2_text").num_attention_heads == 4
    call = Call(labels=None, form="cu_seq_lens", lengths=lengths)
    must_be_exact(partial(tiny.build, "inkling2_text"), ((call.packed, call.alone),))


def test_an_attention_of_ones_own_whose_axes_cannot_be_told_apart_is_refused():
    class Gated(LlamaAttention):
        """Scales what it attends to by a gate (rows, columns, heads, 1)."""

        def forward(self, hidden_states, position_embeddings, attention_mask=None, **kwargs):
            gate = hidden_states[..., : self.config.num_attention_heads, None].sigmoid()
            return super().forward(
                hidden_states, position_embeddings, attention_mask, gate=gate, **kwargs
            )

    def gated(module, query, key, value, mask, gate, **options):
        found, weights = sdpa(module, query, key, value, mask, **options)
        assert gate.shape[:3] == found.shape[:3]
        return found * gate, weights

    def gated_llama():
        model = llama("sdpa", num_hidden_layers=1)
        model.model.layers[0].self_attn.__class__ = Gated
        model.set_attn_implementation("gated")
        return model

    sdpa = AttentionInterface._global_mapping["sdpa"]
    AttentionInterface.register("gated", gated)
    try:
        model, stock = gated_llama(), gated_llama()
        heads = model.config.num_attention_heads
        fits, unclear = (
            {"input_ids": token_ids(columns=n), **declared(model, "cu_seq_lens", (n - 1, 1))}
            for n in (heads + 3, heads)
        )
        with autopack.enable(model, verify=False), torch.no_grad():
            found = model(**fits).logits
            with refused("attention-unknown"):
                model(**unclear)
        assert error(found, alone(stock, fits["input_ids"], (heads + 2, 1))) <= FLOAT64
    finally:
        del AttentionInterface._global_mapping["gated"]
