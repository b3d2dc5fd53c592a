"""An audit of somebody's very model keeps to its budget, finds what leaks, and says what it has left out."""

from __future__ import annotations

import copy
import time
from itertools import count

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

import autopack
from autopack import tiny
from autopack.auditing import budget as budgets
from autopack.auditing.auditor import EVERY_MODE
from autopack.auditing.budget import Budget
from autopack.auditing.gradients import Projections, gradients, projections
from autopack.auditing.within import ESSENTIAL, FURTHER, audit_within
from autopack.enabling import prove
from autopack.enabling.reading import LENGTHS
from autopack.layout import IGNORED_LABEL
from tests.proving.foreign_parts import _AveragesBack, _ClipsBack
from tests.support.padded import put_a_fault_into_unpadding
from tests.support.refusals import refused

ROUNDING = 1e-5
"""Of float32, in a sum of products of a few hundred numbers."""
MOST = 1 << 30


class Own(LlamaForCausalLM):
    """A class that nobody can make from its configuration alone, so that it has no twin."""

    calls = 0

    def __init__(self, config, mlp):
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = mlp(config)

    def forward(self, *args, **kwargs):
        type(self).calls += 1
        return super().forward(*args, **kwargs)


class Constructed(LlamaForCausalLM):
    """The same, with the forward of transformers."""

    def __init__(self, config, mlp):
        super().__init__(config)


class MixesInTraining(LlamaMLP):
    """Tokens get a mean over the row, but in training alone."""

    def forward(self, states):
        return super().forward(states + states.mean(1, keepdim=True) if self.training else states)


class Mixes(LlamaMLP):
    """Tokens get a mean over the row."""

    def forward(self, states):
        return super().forward(states + states.mean(1, keepdim=True))


class MixesBack(LlamaMLP):
    """Exact forward; gradients have their mean over the row taken off."""

    def forward(self, states):
        return super().forward(_AveragesBack.apply(states))


class ClipsBack(LlamaMLP):
    """Exact forward, and backward for others; the gradient of one weight is clipped for all tokens together."""

    def forward(self, states):
        return _ClipsBack.apply(self.act_fn(self.gate_proj(states)) * self.up_proj(states), self.down_proj.weight)


class KeepsBoundaries(Own):
    """Its loss compares the last token of a document with the first of the next, whatever label is ignored."""

    def forward(self, *args, labels=None, **kwargs):
        output = super().forward(*args, **kwargs)
        if labels is not None:
            targets = labels.where(labels != IGNORED_LABEL, kwargs["input_ids"])[:, 1:]
            output.loss = F.cross_entropy(output.logits[:, :-1].flatten(0, 1), targets.flatten())
        return output


class HeedsNoLabel(Own):
    """Its loss is the same whatever the labels."""

    def forward(self, *args, labels=None, **kwargs):
        output = super().forward(*args, **kwargs)
        if labels is not None:
            output.loss = F.cross_entropy(output.logits[:, :-1].flatten(0, 1), kwargs["input_ids"][:, 1:].flatten())
        return output


def built(mlp=LlamaMLP, cls=Own, **fields):
    config = tiny.config("llama", **fields)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = cls(config, mlp)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.1)
    return model.eval()


def proof_of(model, **options):
    with autopack.enable(model, **options) as handle:
        return handle.enabled.proof


@pytest.fixture(autouse=True)
def of_large_models(monkeypatch):
    """Tiny models are audited within the budget of large ones, and not in every call form."""
    monkeypatch.setattr(prove, "BUDGET", Budget())


@pytest.fixture
def nothing_kept(monkeypatch):
    """Gradients of tiny models are projected too, which are held where they are as small as theirs."""
    monkeypatch.setattr(budgets, "LEAST_KEPT", 0)


@pytest.mark.usefixtures("nothing_kept")
class TestFinds:
    def test_nothing_in_a_model_that_is_exact(self):
        proof = proof_of(built())
        assert proof.source == "audit"
        assert proof.how.startswith("by an audit of this very model within 64 forwards and 10% of the weights, ")
        assert proof.packed is proof.labels is None

    @pytest.mark.parametrize(
        ("mlp", "said"),
        [
            (Mixes, r"in mode '.*' logits are off by"),
            (MixesInTraining, r"in mode '.*, train' logits are off by"),
            (MixesBack, r"in mode '.*, train' gradients are off by"),
            (ClipsBack, r"in mode '.*, train' gradients are off by"),
        ],
    )
    def test_rows_that_leak(self, mlp, said):
        with refused("not-exact", match=said):
            autopack.enable(built(mlp))

    def test_a_loss_that_is_not_that_of_documents(self):
        proof = proof_of(built(cls=KeepsBoundaries))
        assert proof.packed is None
        assert "the loss is off by" in proof.labels

    def test_labels_that_are_not_found_soon_are_not_served(self):
        proof = proof_of(built(cls=HeedsNoLabel))
        assert proof.packed is None
        assert "no labels were found that its loss takes: not measured, because 32 forwards were made" in proof.labels

    @pytest.mark.parametrize("field", ["loss", "logits"])
    def test_a_padded_batch_that_is_another_one_without_padding(self, field, monkeypatch):
        model = built(cls=Constructed)
        assert proof_of(model).padded is None
        put_a_fault_into_unpadding(monkeypatch, field)
        proof = proof_of(model)
        assert "not exact without its padding when it was audited: in mode 'right-padded, train'" in proof.padded
        assert proof.packed is proof.labels is None


class TestBudget:
    def test_what_is_essential_and_what_is_further_is_all_that_there_is(self):
        assert {name for name, _ in ESSENTIAL} | set(FURTHER) == set(EVERY_MODE) - {"one beginning"}

    def test_forwards_are_counted_and_not_exceeded(self):
        model = built()
        with autopack.enable(model, verify=False):
            for forwards in (50, 64):
                Own.calls = 0
                found = audit_within(model, Budget(forwards), LENGTHS)
                assert found.forwards == Own.calls <= forwards // 2
                assert {"default", "right-padded"}.isdisjoint(found.left_out)

    def test_a_busy_machine_changes_nothing(self, monkeypatch):
        with monkeypatch.context() as patched:
            clock = count(step=3600)  # an hour is over at each look
            patched.setattr(time, "perf_counter", lambda: next(clock))
            busy = proof_of(built())
        assert busy.how == proof_of(built()).how

    def test_what_is_left_out_is_said(self, monkeypatch):
        monkeypatch.setattr(prove, "BUDGET", Budget(forwards=48))
        with autopack.enable(built()) as handle:
            assert "within 48 forwards" in handle.verified
            assert "left out: 'two rows', " in handle.verified
            assert handle.verified.endswith(", since 18 forwards were made")

    def test_a_model_of_which_too_little_is_known_is_refused(self, monkeypatch):
        monkeypatch.setattr(prove, "BUDGET", Budget(forwards=10))
        model = built()
        with refused("not-exact", match=r"within 10 forwards.*were made.*autopack\.audit\(model\)"):
            autopack.enable(model)
        assert not autopack.is_enabled(model)

    def test_what_was_found_is_said_where_the_rest_is_left_out(self):
        model = built(Mixes)
        with autopack.enable(model, verify=False):
            found = audit_within(model, Budget(forwards=14), LENGTHS)
        assert "logits are off by" in found.report.packed
        assert {"right-padded, train", "two rows"} <= found.left_out.keys()

    def test_calls_of_hundreds_of_tokens_are_made_where_they_fit(self, monkeypatch):
        model = built(max_position_embeddings=300)
        with autopack.enable(model, verify=False):
            assert "thresholds, eval" in [r.name for r in audit_within(model, Budget(200), LENGTHS).report.results]
            monkeypatch.setattr(budgets, "LEAST_BYTES", 0)
            assert "memory" in audit_within(model, Budget(200), LENGTHS).left_out["thresholds"]

    def test_a_small_model_is_run_in_every_call_form(self, monkeypatch):
        monkeypatch.setattr(prove, "BUDGET", None)
        said = proof_of(built()).how
        assert " within 256 forwards" in said
        assert "left out" not in said

    def test_a_model_is_left_as_it_was(self):
        model = built(ClipsBack).train()
        model.model.layers[0].mlp.requires_grad_(False)
        for number, parameter in enumerate(model.parameters()):
            parameter.grad = torch.full_like(parameter, number) if parameter.requires_grad else None
        called = []
        model.lm_head.weight.register_post_accumulate_grad_hook(lambda parameter: called.append(parameter))
        kept = {n: (p, p.detach().clone(), p.grad, copy.deepcopy(p.grad)) for n, p in model.named_parameters()}
        hooks = {n: dict(p._backward_hooks or {}) for n, p in model.named_parameters()}
        before = torch.get_rng_state()
        with refused("not-exact", match="gradients are off"):
            autopack.enable(model)
        assert torch.equal(before, torch.get_rng_state())
        assert model.training
        assert not called
        for name, parameter in model.named_parameters():
            same, values, grad, of_grad = kept[name]
            assert parameter is same
            assert torch.equal(parameter, values)
            assert parameter.grad is grad
            assert grad is None or torch.equal(grad, of_grad)
            assert dict(parameter._backward_hooks or {}) == hooks[name]


class Largest(TorchDispatchMode):
    """Knows the largest tensor that was made while it is on, of those that are no views of parameters."""

    def __init__(self, model):
        super().__init__()
        self.known = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        self.numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for each in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(each, torch.Tensor) and each.untyped_storage().data_ptr() not in self.known:
                self.numel = max(self.numel, each.untyped_storage().nbytes() // each.element_size())
        return result


class TestMemory:
    @pytest.mark.parametrize("tied", [False, True])
    def test_no_gradient_of_the_size_of_a_matrix_is_made(self, tied):
        fields = {"hidden_size": 256, "intermediate_size": 2048, "vocab_size": 4000, "tie_word_embeddings": tied}
        model = built(**fields)
        smallest = model.model.layers[0].mlp.up_proj.weight.numel()
        with autopack.enable(model, verify=False):
            with Largest(model) as largest:
                found = audit_within(model, Budget(), LENGTHS)
            assert found.report.packed is None
            assert found.report.worst_gradient < ROUNDING * 10
            assert largest.numel < smallest / 2
            with Largest(model) as control:
                autopack.audit(model, lengths=LENGTHS, modes=("default",))
            assert control.numel > smallest

    def test_what_needs_more_is_left_out_and_named(self, monkeypatch):
        monkeypatch.setattr(budgets, "LEAST_BYTES", 0)
        monkeypatch.setattr(prove, "BUDGET", Budget(memory=0.01))
        with autopack.enable(built(ClipsBack, hidden_size=64, intermediate_size=512)) as handle:
            wanted = "'gradients of model.layers.0.mlp.down_proj.weight, model.layers.1.mlp.down_proj.weight"
            assert wanted in handle.verified
            assert "since they need more than the memory" in handle.verified


def projected(matrix, number):
    generator = torch.Generator().manual_seed(number)
    left = torch.randn(8, matrix.shape[0], generator=generator)
    right = torch.randn(matrix.shape[1], 8, generator=generator)
    return left.to(matrix.dtype) @ matrix @ right.to(matrix.dtype)


def gpt2():
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=32)).eval()


def in_bfloat16():
    return built().to(torch.bfloat16)


def frozen():
    model = built()
    model.model.requires_grad_(False)
    model.model.layers[1].mlp.requires_grad_(True)
    return model


def with_a_padding_token():
    model = built()
    model.model.embed_tokens.padding_idx = 5
    return model


class TestProjections:
    @pytest.mark.parametrize(
        "make",
        [built, lambda: built(tie_word_embeddings=True), lambda: built(ClipsBack), gpt2, frozen, with_a_padding_token],
    )
    def test_are_those_of_the_gradients(self, make):
        model = make()
        ids = torch.arange(26).reshape(2, 13) % 50
        parameters = [p for p in model.parameters() if p.requires_grad]
        total = model(input_ids=ids, labels=ids).loss
        whole = gradients(total, parameters)
        for kept in (0, 4000, MOST):
            found = projections(total, parameters, kept, MOST)
            assert not found.left_out
            assert found.kept.keys() | found.projected.keys() == set(range(len(parameters)))
            for number, gradient in found.kept.items():
                torch.testing.assert_close(gradient, whole[number])
            for number, projection in found.projected.items():
                wanted = projected(whole[number].reshape(-1, whole[number].shape[-1]), number)
                assert float((projection - wanted).norm()) <= ROUNDING * float(wanted.norm())
            assert found.error(found) == 0
        assert not total._backward_hooks
        assert not any(parameter._backward_hooks for parameter in parameters)

    def test_in_low_precision(self):
        model, ids = in_bfloat16(), torch.arange(13)[None]
        parameters = list(model.parameters())
        total = model(input_ids=ids, labels=ids).loss
        whole = gradients(total, parameters)
        for number, projection in projections(total, parameters, 0, MOST).projected.items():
            wanted = projected(whole[number].float().reshape(-1, whole[number].shape[-1]), number)
            assert projection.dtype == torch.float32
            assert float((projection - wanted).norm()) <= 0.02 * float(wanted.norm())

    def test_show_what_changes_in_any_row_column_or_entry(self):
        parameter = nn.Parameter(torch.zeros(300, 200))
        matrix = torch.randn(300, 200, generator=torch.Generator().manual_seed(0))
        changes = [torch.zeros(300, 200) for _ in range(300)]
        for number, change in enumerate(changes):
            generator = torch.Generator().manual_seed(number)
            change[number] = torch.randn(200, generator=generator)
            change[:, number % 200] += torch.randn(300, generator=generator)
            change[number, number % 200] = 10.0
        expected = Projections([parameter], projected={0: projected(matrix, 7)})
        for change in changes:
            found = Projections([parameter], projected={0: projected(matrix + change, 7)})
            assert found.error(expected) > 0.2 * float(change.norm() / matrix.norm())
