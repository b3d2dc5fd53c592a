"""Convolutions, scans and heads that follow documents: what each document gets alone, and its
gradients."""

import dataclasses
import importlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import conv1d, silu

import autopack
from autopack import registry, tiny
from autopack.inspection import modules, releases
from autopack.layout.packed import PackedLayout
from autopack.mixers import AtOperations, EqualRows
from autopack.mixers.operations import OPERATIONS
from tests.conftest import FLOAT32, LEAK, alone, error, positions
from tests.support.refusals import refused

ROWS = ((5, 1, 9, 3), (2, 12, 4))


def layouts(most=12):
    def build(rows):
        width = max(map(sum, rows))
        return PackedLayout.from_lengths(
            [[*row, *([width - sum(row)] if sum(row) < width else [])] for row in rows]
        )

    return st.lists(
        st.lists(st.integers(1, most), min_size=1, max_size=6), min_size=1, max_size=3
    ).map(build)


def random(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()


def causal_convolution(layout, hidden, weight, bias=None, activation=None):
    def alone(hidden_states, weight, bias, activation):
        width = weight.shape[-1]
        tokens = hidden_states.shape[-1]
        found = conv1d(hidden_states, weight[:, None], bias, padding=width - 1, groups=len(weight))[
            ..., :tokens
        ]
        return found if activation is None else activation(found)

    return OPERATIONS["causal_conv1d_fn"](alone, layout, (hidden, weight, bias, activation), {})


def compare(layout, found, alone, inputs, atol=1e-12):
    """`found` is (rows, channels, tokens); `alone` gives one document (1, channels, tokens)."""
    expected = torch.zeros_like(found)
    for row, start, end in layout.spans:
        expected[row, :, start:end] = alone(row, start, end)[0]
    assert torch.allclose(found, expected, atol=atol)
    weights = random(*found.shape, seed=9).detach()
    wanted = torch.autograd.grad((expected * weights).sum(), inputs)
    for gradient, other in zip(
        torch.autograd.grad((found * weights).sum(), inputs), wanted, strict=True
    ):
        assert torch.allclose(gradient, other, atol=10 * atol)


@settings(max_examples=40)
@given(layouts(), st.integers(1, 7), st.booleans(), st.booleans())
def test_a_convolution_sees_zeros_before_every_document(layout, width, with_bias, with_activation):
    hidden, weight = random(layout.rows, 3, layout.columns), random(3, width, seed=1)
    bias = random(3, seed=2) if with_bias else None
    activation = silu if with_activation else None

    def convolve(row, start, end):
        part = hidden[row : row + 1, :, start:end]
        out = conv1d(part, weight[:, None], bias, padding=width - 1, groups=3)[:, :, : end - start]
        return out if activation is None else activation(out)

    found = causal_convolution(layout, hidden, weight, bias, activation)
    compare(layout, found, convolve, [hidden, weight, *([bias] if with_bias else [])])


def test_convolutions_of_two_widths_share_a_layout():
    layout = PackedLayout.from_lengths([[4, 3, 5]])
    hidden = random(1, 3, 12)
    for width in (2, 4, 3):
        weight = random(3, width, seed=width)
        alone = [
            conv1d(part, weight[:, None], padding=width - 1, groups=3)[:, :, : part.shape[-1]]
            for part in hidden.split([4, 3, 5], dim=2)
        ]
        assert torch.allclose(
            causal_convolution(layout, hidden, weight), torch.cat(alone, dim=2), atol=1e-12
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_convolution_in_half_precision_rounds_once(dtype):
    layout = PackedLayout.from_lengths([[5, 9]])
    hidden, weight = (
        tensor.detach().to(dtype) for tensor in (random(1, 4, 14), random(4, 4, seed=1))
    )
    found = causal_convolution(layout, hidden, weight)
    exact = causal_convolution(layout, hidden.double(), weight.double())
    assert found.dtype == dtype
    # the float32 sum may fall on the other side of a tie, never further
    assert torch.allclose(found.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-7)


def test_a_mixer_that_does_not_come_by_its_operations_is_refused(monkeypatch):
    """Inkling2's other convolution has taps of its own; said to be at the usual place, it would
    leak unseen."""
    family = next(f for f in registry.families() if "inkling2_text" in f.model_types)
    wrong = AtOperations(("causal_conv1d_fn",))
    mixers = {**family.mixers, "Inkling2DynamicShortConvolution": wrong}
    del mixers["Inkling2FullAttention"]  # which holds it, and runs on documents alone
    monkeypatch.setattr(registry, "_registered", [dataclasses.replace(family, mixers=mixers)])
    model = tiny.build("inkling2_text")
    ids = tiny.tokens(model.config, 1, 12)
    with (
        autopack.enable(model, verify=False),
        refused("other-code"),
    ):
        model(input_ids=ids, position_ids=positions((5, 7)))


@pytest.mark.parametrize("names", [(), ("scan",)])
def test_operations_are_named_as_autopack_knows_them(names):
    with pytest.raises(ValueError, match="takes names of .*; found (none|scan)"):
        AtOperations(names)


def test_operations_are_put_back_by_identity():
    from transformers.models.mamba2 import modeling_mamba2 as mamba2

    before = {name: getattr(mamba2, name) for name in ("causal_conv1d_fn", "mamba2_chunk_scan")}
    model, other = tiny.build("mamba2"), tiny.build("mamba2")
    ids = tiny.tokens(model.config, 1, 12)
    expected = other(input_ids=ids).logits
    with autopack.enable(model):
        assert mamba2.causal_conv1d_fn is not before["causal_conv1d_fn"]
        assert torch.equal(other(input_ids=ids).logits, expected)
    assert all(getattr(mamba2, name) is function for name, function in before.items())


class Layer(torch.nn.Module):
    """What the package `kernels` makes of such a function, and how it sets another forward."""

    def __init__(self, forward):
        super().__init__()
        self.forward = forward


@pytest.mark.parametrize("somebodys", [False, True], ids=["of transformers", "of somebody"])
@pytest.mark.parametrize("takes_bounds", [False, True])
def test_kernels_from_the_hub_are_told_or_get_one_document_per_row(
    monkeypatch, takes_bounds, somebodys
):
    from transformers.models.lfm2 import modeling_lfm2 as lfm2

    torch_function = lfm2.causal_conv1d_fn
    told = []

    def blind(x, weight, bias=None, activation=None):
        return torch_function(x, weight, bias, activation=activation)

    def seeing(x, weight, bias=None, seq_idx=None, activation=None):
        if seq_idx is None:
            return blind(x, weight, bias, activation)
        told.append(seq_idx)
        rows = [
            part for row, index in zip(x, seq_idx, strict=True) for part in _documents(row, index)
        ]
        parts = [blind(part[None], weight, bias, activation)[0] for part in rows]
        return torch.cat(parts, dim=-1).unflatten(-1, (len(x), -1)).transpose(0, 1)

    class Mine(lfm2.Lfm2ForCausalLM):
        def forward(self, *args, logits_to_keep=0, **kwargs):
            return super().forward(*args, logits_to_keep=logits_to_keep, **kwargs)

    model = tiny.build("lfm2")
    if somebodys:
        theirs = Mine(model.config).eval()
        theirs.load_state_dict(model.state_dict())
        model = theirs
    ids = tiny.tokens(model.config, 2, sum(ROWS[0]))
    expected = alone(model, ids, *ROWS)
    layer = Layer(torch_function)
    assert not releases.kernel_parameters(layer)
    layer.forward = seeing if takes_bounds else blind
    monkeypatch.setattr(lfm2, "causal_conv1d_fn", layer)
    with autopack.enable(model, check_every=0) as handle:
        assert not somebodys or "on a tiny copy" in handle.verified
        told.clear()
        assert error(model(input_ids=ids, position_ids=positions(*ROWS)).logits, expected) < FLOAT32
    assert lfm2.causal_conv1d_fn is layer
    mixers = modules.mixers(model, {"Lfm2ShortConv"})
    assert len(told) == (len(mixers) if takes_bounds else 0)
    if not takes_bounds:
        assert (
            error(
                model(input_ids=ids, position_ids=positions(*ROWS), use_cache=False).logits,
                expected,
            )
            > LEAK
        )


def _documents(row, index):
    return row.split(torch.unique_consecutive(index, return_counts=True)[1].tolist(), dim=-1)


def test_where_a_release_lacks_the_operations_another_way_is_taken(monkeypatch):
    """In releases before 5.23 they are not in the modeling files."""
    model = tiny.build("mamba2", dtype=torch.float64)
    module = importlib.import_module(type(model).__module__)
    family, _ = registry.look_up(model)
    assert isinstance(family.mixers["Mamba2Mixer"], AtOperations)
    monkeypatch.delattr(module, "mamba2_chunk_scan")
    family, reason = registry.look_up(model)
    assert reason is None
    assert isinstance(family.mixers["Mamba2Mixer"], EqualRows)
    assert family.mixers["Mamba2Mixer"].reads_padding
