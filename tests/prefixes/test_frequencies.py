"""Documents that begin alike, in models whose rotary frequencies depend on the longest position of a call."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import autopack
from autopack import tiny
from autopack.inspection.modules import row_dependent_rotaries
from autopack.tiny.models import randomize
from tests.support.padded import packs_at_once
from tests.support.prefixes import group, padded

LIMIT = 48
"""Positions up to which frequencies are those of short documents."""
LENGTHS = {"short": (32, (9, 14, 5)), "both": (32, (9, 44, 5)), "long": (52, (9, 24, 5))}
"""Tokens of the common beginning, and of what each document goes on with."""
EXACT = 1e-5
"""Of float64: some types compute frequencies or choose experts in float32. Frequencies of another document: 1e-2."""
CASES = [
    (kind, model_type) for kind in ("dynamic", "longrope") for model_type in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
]


def build(kind, model_type):
    """A tiny model with such frequencies, in float64; None where its type has none."""
    try:
        plain = tiny.build(model_type)
    except tiny.CannotBuild:
        return None
    config = copy.deepcopy(plain.config)
    ropes = getattr(config, "rope_parameters", None)
    if not isinstance(ropes, dict):
        return None
    found = {name: len(b) for name, b in plain.named_buffers() if name.endswith("inv_freq") and "original" not in name}
    parts = {name: part for name, part in ropes.items() if isinstance(part, dict)} or {"": ropes}
    for name, rope in parts.items():
        size = next((size for buffer, size in found.items() if name in buffer), 1)
        rope.update(rope_type=kind, factor=4.0, original_max_position_embeddings=LIMIT)
        rope.update(short_factor=[1.0] * size, long_factor=[2.0 + n for n in range(size)])
        rope.setdefault("rope_theta", 1e4)
    config.max_position_embeddings = LIMIT if kind == "dynamic" else 4 * LIMIT
    config.original_max_position_embeddings = LIMIT
    try:
        model = AutoModelForCausalLM.from_config(config, attn_implementation=plain.config._attn_implementation)
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError):
        return None
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # grouped kernels know no float64
    randomize(model, 0)
    return (
        model.double().eval() if row_dependent_rotaries(model) and runs(copy.deepcopy(model).double().eval()) else None
    )


def runs(model):
    """Whether stock runs it: PhiMoE wants more of its frequencies, some types have several widths of them."""
    try:
        with torch.no_grad():
            model(input_ids=torch.arange(3, 7)[None], use_cache=False)
    except (KeyError, RuntimeError):
        return False
    return True


def scored(model, calls):
    """The logits of real tokens in some calls, and the gradients of a sum of them in which each counts otherwise."""
    logits = [model(**given, use_cache=False).logits[real] for given, real in calls]
    found = torch.cat([each.reshape(-1, each.shape[-1]) for each in logits])
    model.zero_grad()
    (found * torch.linspace(0.5, 1.5, found.numel(), dtype=found.dtype).reshape(found.shape)).sum().backward()
    gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return found.detach(), torch.cat(gradients)


def forget(model, stock):
    """Undo what the last calls have left: dynamic frequencies stay those of a longer row, in stock's calls too."""
    for used, fresh in zip(row_dependent_rotaries(model), row_dependent_rotaries(stock), strict=True):
        for name in [name for name in vars(used) if name.endswith("max_seq_len_cached")]:
            setattr(used, name, getattr(fresh, name, used.original_max_seq_len))
        used._buffers.update({name: value.clone() for name, value in fresh._buffers.items()})


def agree(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        if not other.isfinite().all():
            return  # stock gives no number for padded batches of some types in float64, or no gradient
        counted = other.abs() < torch.finfo(other.dtype).max / 2
        assert float((one - other)[counted].abs().max()) < EXACT * float(other[counted].abs().max())


def check(model, stock, documents, handle, saved):
    """Compare packed rows with each document alone, and a padded batch with stock's."""
    documents = sorted(documents, key=len)  # stock's dynamic frequencies stay those of a longer row
    every = torch.ones(1, 1, dtype=torch.bool)
    alone = [({"input_ids": each[None]}, every.expand(1, len(each))) for each in documents]
    ids, positions = torch.cat(documents), torch.cat([torch.arange(len(each)) for each in documents])
    packed = [({"input_ids": ids[None], "position_ids": positions[None]}, every.expand(1, len(ids)))]
    before = handle.tally.training.shared
    forget(model, stock)
    agree(scored(model, packed), scored(copy.deepcopy(stock), alone))
    assert handle.tally.training.shared - before in (saved, 0)
    batch = padded(documents)
    as_batch = [(batch, batch["attention_mask"].bool())]
    forget(model, stock)
    agree(scored(model, as_batch), scored(copy.deepcopy(stock), as_batch))


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("kind", "model_type"), CASES)
def test_every_type(kind, model_type):
    """Documents on both sides of the threshold, with and without sharing, one kind after the other."""
    stock = build(kind, model_type)
    if stock is None:
        pytest.skip("this type has no such frequencies")
    for share in (True, False):
        model = copy.deepcopy(stock).train()
        try:
            with packs_at_once(model, share=share) as handle:
                for name, (prompt, rests) in LENGTHS.items():
                    saved = 2 * prompt if name == "short" and share else 0
                    check(model, stock, group(prompt, rests), handle, saved)
        except autopack.AutopackError as refused:
            pytest.skip(f"it is refused: {refused}")


@pytest.mark.parametrize(("kind", "model_type"), [("dynamic", "llama"), ("longrope", "phi3"), ("longrope", "olmo3")])
def test_documents_share_below_the_threshold(kind, model_type):
    stock = build(kind, model_type)
    model = copy.deepcopy(stock).train()
    with autopack.enable(model) as handle:
        check(model, stock, group(*LENGTHS["both"]), handle, 0)
        assert any("rotary frequencies of its own" in reason for reason in handle.tally.apart)
        before = handle.tally.training.shared
        check(model, stock, group(*LENGTHS["short"]), handle, 64)
        assert handle.tally.training.shared >= before + 64
