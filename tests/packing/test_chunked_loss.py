"""`autopack.chunked_loss` gives transformers' loss and its gradients, and never makes a second copy of the logits."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaForCausalLM, PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

import autopack
from autopack import tiny
from autopack.packing import chunked_loss as module
from tests.conftest import LENGTHS, alone_loss, positions, spans, token_ids

ROUNDING = {torch.float32: 1e-6, torch.float64: 1e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}
"""Of gradients, by the dtype of the logits: probabilities are computed in float32 and rounded to that dtype."""


def drawn(seed: int, shape: tuple[int, ...], vocabulary: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Random logits and labels, some of which are -100, but for the last, whose label is a token."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(*shape, vocabulary, generator=generator).mul(3).to(dtype).requires_grad_()
    labels = torch.randint(vocabulary, shape, generator=generator)
    labels[torch.rand(shape, generator=generator) < 0.3] = -100
    labels[..., -1] = 0
    return logits, labels


def both(logits: torch.Tensor, labels: torch.Tensor, **given: object) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Loss and gradient of transformers' loss and of ours."""
    found = []
    for loss_function in (ForCausalLMLoss, autopack.chunked_loss):
        loss = loss_function(logits, labels, logits.shape[-1], **given)
        found.append((loss.detach(), *torch.autograd.grad(loss, logits)))
    return found


@given(
    st.integers(0, 2**16), st.integers(1, 3), st.integers(2, 40), st.integers(2, 50),
    st.sampled_from(sorted(ROUNDING, key=str)), st.integers(1, 500), st.sampled_from([None, 7, torch.tensor(11)]),
)  # fmt: skip
def test_loss_and_gradients(seed, rows, columns, vocabulary, dtype, chunk, items) -> None:
    logits, labels = drawn(seed, (rows, columns), vocabulary, dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_CHUNK", chunk)
        (loss, gradient), (ours, our_gradient) = both(logits, labels, num_items_in_batch=items)
    assert (ours.dtype, our_gradient.dtype) == (loss.dtype, dtype)
    torch.testing.assert_close(ours, loss, rtol=1e-5, atol=1e-6)
    divisor = float((labels[..., 1:] != -100).sum() if items is None else items)
    torch.testing.assert_close(our_gradient, gradient, rtol=0, atol=ROUNDING[dtype] / divisor)


def test_shifted_labels_and_another_ignored_label() -> None:
    logits, labels = drawn(0, (2, 9), 30, torch.float32)
    labels[labels == -100] = 29
    stock, ours = both(logits, labels, ignore_index=29)
    torch.testing.assert_close(ours, stock)
    stock, ours = both(logits, None, shift_labels=labels)
    torch.testing.assert_close(ours, stock)


def test_a_batch_without_targets_is_no_number_as_in_transformers() -> None:
    logits, labels = drawn(0, (1, 4), 5, torch.float32)
    stock, ours = both(logits, torch.full_like(labels, -100))
    assert stock[0].isnan()
    assert ours[0].isnan()


def test_a_label_outside_of_the_vocabulary() -> None:
    logits, labels = drawn(0, (1, 4), 5, torch.float32)
    with pytest.raises(autopack.InvalidPacking, match="wanted labels from 0 to 4, or -100 .* found 0 to 5"):
        autopack.chunked_loss(logits, torch.full_like(labels, 5), 5)


class Largest(TorchDispatchMode):
    """Bytes of new memory in tensors of at least `least` elements."""

    def __init__(self, least: int):
        super().__init__()
        self.least, self.bytes = least, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = {
            each.untyped_storage().data_ptr()
            for each in torch.utils._pytree.tree_leaves((args, kwargs))
            if isinstance(each, torch.Tensor)
        }
        found = function(*args, **(kwargs or {}))
        for each in torch.utils._pytree.tree_leaves(found):
            if isinstance(each, torch.Tensor) and each.untyped_storage().data_ptr() not in given:
                self.bytes += each.untyped_storage().nbytes() if each.numel() >= self.least else 0
        return found


@pytest.mark.parametrize(("dtype", "stock_copies"), [(torch.float32, 2), (torch.bfloat16, 6)])
def test_only_the_gradient_is_as_large_as_the_logits(dtype, stock_copies, monkeypatch) -> None:
    monkeypatch.setattr(module, "_CHUNK", 1000)
    logits, labels = drawn(0, (1, 60), 100, dtype)

    def copies(loss_function) -> float:
        with Largest(logits.numel()) as made:
            loss_function(logits, labels, 100).backward()
        return made.bytes / (logits.numel() * logits.element_size())

    assert copies(autopack.chunked_loss) == 1
    assert copies(ForCausalLMLoss) >= stock_copies


def chunked(kind: str, **given: object) -> PreTrainedModel:
    model = tiny.build(kind, dtype=torch.float32, **given).train()
    model.loss_function = autopack.chunked_loss
    return model


@pytest.mark.parametrize("kind", ["llama", "gemma3", "qwen3_moe", "mamba", "gpt2", "falcon_h1"])
def test_an_enabled_model_is_exact(kind, monkeypatch) -> None:
    monkeypatch.setattr(module, "_CHUNK", 500)
    model, stock = chunked(kind), tiny.build(kind, dtype=torch.float32).train()
    ids = token_ids()
    handle = autopack.enable(model)
    packed = {"input_ids": ids, "position_ids": positions(LENGTHS), "labels": ids, "use_cache": False}
    if kind == "mamba":
        packed["seq_idx"] = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))[None]
        del packed["position_ids"]
    loss = model(**packed).loss
    loss.backward()

    documents = [ids[:, a:b] for a, b in spans(LENGTHS)]
    targets = sum(LENGTHS) - len(LENGTHS)
    wanted = sum(stock(input_ids=each, labels=each, use_cache=False).loss * (each.shape[1] - 1) for each in documents)
    (wanted / targets).backward()
    torch.testing.assert_close(loss, wanted / targets, rtol=1e-5, atol=1e-5)
    for (name, one), other in zip(model.named_parameters(), stock.parameters(), strict=True):
        if other.grad is not None:
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-5, msg=name)

    mask = torch.tensor([[int(column < n) for column in range(max(LENGTHS))] for n in LENGTHS])
    padded = token_ids(len(LENGTHS), max(LENGTHS)).masked_fill(mask == 0, 0)
    batch = {"input_ids": padded, "attention_mask": mask, "labels": padded.masked_fill(mask == 0, -100)}
    torch.testing.assert_close(model(**batch).loss, stock(**batch).loss, rtol=1e-5, atol=1e-5)
    assert handle.tally.batches == 1
    handle.remove()
    assert model.loss_function is autopack.chunked_loss


class Thin(LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


def test_a_thin_subclass_is_exact():
    stock = tiny.build("llama")
    model = Thin(stock.config).train()
    model.load_state_dict(stock.state_dict())
    model.loss_function = autopack.chunked_loss
    ids = token_ids()
    with autopack.enable(model):
        loss = model(input_ids=ids, position_ids=positions(LENGTHS), labels=ids).loss
    torch.testing.assert_close(loss, alone_loss(stock, ids, LENGTHS), rtol=1e-5, atol=1e-5)


def test_gradients_by_torch_func() -> None:
    logits, labels = drawn(0, (2, 9), 30, torch.float32)
    found = torch.func.grad(lambda each: autopack.chunked_loss(each, labels, 30))(logits.detach())
    torch.testing.assert_close(found, both(logits, labels)[0][1])


def test_gradients_of_gradients() -> None:
    logits, labels = drawn(0, (2, 9), 30, torch.float32)
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
    found = []
    for loss_function in (ForCausalLMLoss, autopack.chunked_loss):

        def bent(logits, loss_function=loss_function):
            return (torch.func.grad(lambda x: loss_function(x, labels, 30))(logits) * weights).sum()

        loss = loss_function(logits, labels, 30)
        (gradient,) = torch.autograd.grad(loss, logits, create_graph=True)
        (scaled,) = torch.autograd.grad(loss.square(), logits, create_graph=True)
        found.append(
            [
                *(
                    torch.autograd.grad((each * weights).sum(), logits, retain_graph=True)[0]
                    for each in (gradient, scaled)
                ),
                torch.func.grad(bent)(logits.detach()),
            ]
        )
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-6)
    assert found[0][0].norm() > 1e-3


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("transform", ["hessian", "jvp", "vmap", "vmap of grad", "forward"])
def test_transforms_have_transformers_own_loss(transform, shifted) -> None:
    logits, labels = drawn(0, (2, 4), 5, torch.float32)
    logits, tangent, labels = logits.detach(), torch.ones_like(logits).cumsum(-1), labels.clamp(min=0)
    given = {"labels": None, "shift_labels": labels} if shifted else {"labels": labels}

    def derived(loss_function):
        def loss(each):
            return loss_function(each, vocab_size=5, **given)

        if transform == "hessian":
            return torch.func.hessian(loss)(logits)
        if transform == "jvp":
            return torch.func.jvp(loss, (logits,), (tangent,))
        if transform == "forward":
            with forward_ad.dual_level():
                return tuple(forward_ad.unpack_dual(loss(forward_ad.make_dual(logits, tangent))))
        each = torch.stack([logits, tangent])
        return torch.func.vmap(loss if transform == "vmap" else torch.func.grad(loss))(each)

    stock = derived(ForCausalLMLoss)
    assert torch.utils._pytree.tree_leaves(stock)[-1].abs().max() > 1e-3
    torch.testing.assert_close(derived(autopack.chunked_loss), stock, rtol=0, atol=0)


@pytest.mark.parametrize(("kind", "task"), [("bert", "masked-lm"), ("whisper", "causal-lm")])
def test_a_model_with_another_loss_is_refused(kind, task) -> None:
    model = chunked(kind, task=task)
    with pytest.raises(autopack.UnsupportedModel, match="chunked_loss is the loss of causal language models"):
        autopack.enable(model)
    assert not autopack.is_enabled(model)
    del model._loss_function
    autopack.enable(model)


def test_compiled_code_has_transformers_own_loss() -> None:
    logits, labels = drawn(0, (2, 9), 30, torch.float32)
    compiled = torch.compile(autopack.chunked_loss, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(logits, labels, 30), ForCausalLMLoss(logits, labels, 30))


def test_copies_and_pickles_keep_it() -> None:
    model = chunked("llama")
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other.loss_function is autopack.chunked_loss
