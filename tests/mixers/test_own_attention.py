"""Attention, positions and whole models in code of their own: documents alone, in every form that
could go wrong."""

import logging

import pytest
import torch

import autopack
from autopack import registry, tiny
from autopack.registry import first_position
from tests.conftest import LEAK, positions, spans
from tests.support.refusals import refused

ROWS = ((5, 1, 9, 5), (2, 14, 4))
ENCODERS = sorted(
    {t for f in registry.families() for t in f.model_types} & set(tiny.types_for("masked-lm"))
)
DEBERTA = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 4, "share_att_key": True,
           "norm_rel_ebd": "layer_norm", "conv_kernel_size": 3, "conv_act": "gelu"}  # fmt: skip


NO_TOKENS_MEET = {"perceiver", "mra"}
"""Perceiver predicts no tokens, and MRA attends to nothing without its kernels: test_mra.py has
sums in their place."""


@pytest.mark.parametrize("model_type", sorted(set(ENCODERS) - NO_TOKENS_MEET))
def test_masked_language_models(model_type):
    """Of every covered type; autopack.audit holds logits, influence and gradients in all call
    modes."""
    try:
        model = tiny.build(model_type, task="masked-lm")
    except tiny.CannotBuild as reason:
        pytest.skip(str(reason))
    stock = autopack.audit(
        model, modes=("all-ones mask", "two rows"), training=(False,), gradients=False
    )
    assert stock.worst > LEAK
    with autopack.enable(model, verify=False):
        report = autopack.audit(model, training=(True,))
        assert report.exact, str(report)


@pytest.mark.parametrize(("model_type", "options"), [("deberta-v2", DEBERTA), ("deberta", {"relative_attention": True,
                         "pos_att_type": ["c2p", "p2c"]})])  # fmt: skip
def test_disentangled_attention_and_its_convolution(model_type, options):
    model = tiny.build(model_type, task="masked-lm", **options)
    with autopack.enable(model, verify=False):
        report = autopack.audit(model)
        assert report.exact, str(report)


IN_BLOCKS = [
    *((name, {}) for name in ("bloom", "gptj", "xlm", "rembert")),
    # Outputs of other forms: I-BERT gives tuples in a tuple, SqueezeBERT a dictionary.
    *((name, {"task": "masked-lm"}) for name in ("ibert", "squeezebert", "tapas")),
]


@pytest.mark.parametrize(("model_type", "options"), IN_BLOCKS)
def test_attention_weights_of_packed_rows_stand_in_blocks(model_type, options):
    model, task = tiny.build(model_type, **options), "task" in options
    ids, layers = tiny.tokens(model.config, 2, 20), slice(-1 if task else 0, None)
    where, cached = (
        positions(*ROWS, start=first_position(model.config)),
        {} if task else {"use_cache": False},
    )
    with autopack.enable(model):
        found = model(input_ids=ids, position_ids=where, output_attentions=True).attentions[layers]
    for row, lengths in enumerate(ROWS):
        for a, b in spans(lengths):
            own = model(input_ids=ids[row : row + 1, a:b], output_attentions=True, **cached)
            for whole, weights in zip(found, own.attentions[layers], strict=True):
                block = whole[row, :, a:b].clone()
                assert torch.allclose(block[..., a:b], weights[0], atol=1e-4 if task else 1e-5)
                block[..., a:b] = 0
                assert not block.any()


@pytest.mark.parametrize("model_type", ["reformer", "blt", "cpmant"])
def test_a_model_that_runs_documents_alone_warns_of_it(model_type, caplog):
    """That it has their loss is in tests/calls/test_items_in_batch.py."""
    model = tiny.build(model_type)
    ids = tiny.tokens(model.config, 2, 20)
    call = {"input_ids": ids, "labels": ids, "position_ids": positions((5, 9, 6), (2, 14, 4))}
    with caplog.at_level(logging.WARNING, logger="autopack"), autopack.enable(model):
        found, as_tuple = model(**call), model(**call, return_dict=False)
    assert [r.levelname for r in caplog.records if r.name.startswith("autopack")] == ["WARNING"]
    assert "one document after another" in caplog.text
    assert torch.equal(as_tuple[0], found.loss)
    assert torch.equal(as_tuple[1], found.logits)


def test_codebooks_are_never_mixed_up():
    """Rows of audio codes are several to an example; a layout of them cannot be followed, and is
    not."""
    model = tiny.build("musicgen", decoder={"num_codebooks": 2})
    ids = tiny.tokens(model.config, 2, 12)
    with autopack.enable(model, verify=False), refused("other-tokens"):
        model(input_ids=ids, position_ids=positions((5, 7), (5, 7)))


@pytest.mark.parametrize(
    ("model_type", "task"),
    [("xlnet", "causal-lm"), ("cpmant", "causal-lm"), ("funnel", "masked-lm")],
)
def test_labels_at_padding_of_a_model_that_leaves_it_out(model_type, task):
    """Without this they would silently be no part of the loss, or be compared with what is made of
    nothing."""
    model = tiny.build(model_type, task=task)
    row = {
        "input_ids": tiny.tokens(model.config, 1, 18),
        "attention_mask": torch.tensor([[1] * 7 + [2] * 9 + [0] * 2]),
    }
    labels = row["input_ids"].clone()
    with autopack.enable(model):
        with refused("wrong-labels"):
            model(**row, labels=labels)
        labels[:, 16:] = -100
        assert model(**row, labels=labels).loss.isfinite()
