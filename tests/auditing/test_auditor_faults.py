"""The auditor finds faults of every kind that it claims to look for, and none in models that have
none.

Faults are planted in models, or in autopack, so that each is there whatever autopack serves; every
test has a control."""

import copy
from typing import ClassVar

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import BertModel, LlamaForCausalLM

import autopack
from autopack import tiny
from autopack.auditing.cases import FORMS, ROUTER
from autopack.calls.rows import Unpadded
from autopack.enabling import by_twin
from autopack.layout import IGNORED_LABEL
from autopack.proving.twin import NoTwin
from tests.conftest import LEAK, alone_loss
from tests.enabling.test_asking import as_class
from tests.engine import counted
from tests.proving.untouched import Mine
from tests.support.padded import batch as padded
from tests.support.padded import mask_of, packs_at_once, put_a_fault_into_unpadding
from tests.unfamiliar.test_losses import per_sequence

PACKED = ("default", "use_cache=False", "padding mask", "two rows")
PADDED = tuple(name for name, form in FORMS.items() if form.is_padded and name != ROUTER)


def enabled(model, **options):
    autopack.enable(model, verify=False, **options)
    return model


class KeepsBoundaries(LlamaForCausalLM):
    """Its loss has a term for every token, that at the boundary of two documents too, whatever
    label is ignored."""

    def forward(self, *args, **kwargs):
        labels = kwargs.pop("labels", None)
        output = super().forward(*args, **kwargs)
        if labels is not None:
            targets = labels.where(labels != IGNORED_LABEL, kwargs["input_ids"])[:, 1:]
            output.loss = cross_entropy(output.logits[:, :-1].flatten(0, 1), targets.flatten())
        return output


@pytest.mark.parametrize("kind", [LlamaForCausalLM, Mine, KeepsBoundaries])
def test_what_it_says_of_a_loss_is_so(kind):
    ids = tiny.tokens(None, 1, 12)
    expected = alone_loss(as_class(kind), ids, (5, 7))
    model = enabled(as_class(kind))
    report = autopack.audit(model, modes=PACKED)
    found = model(input_ids=ids, position_ids=counted((5, 7)), labels=ids).loss
    assert (report.labels is None) == bool(abs(found - expected) < 1e-4 * expected)


class Scaled(torch.autograd.Function):
    """Hands a tensor on, and back a share of its gradient."""

    @staticmethod
    def forward(ctx, states, share):
        ctx.share = share
        return states.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.share, None


class FaultyWhenPacked(LlamaForCausalLM):
    """What it makes of rows of several documents is right but for the loss, or for the
    gradients."""

    fault = ""

    def forward(self, input_ids, position_ids=None, labels=None, **kwargs):
        packed = position_ids is not None and int((position_ids == 0).sum()) > 1
        output = super().forward(input_ids, position_ids=position_ids, labels=labels, **kwargs)
        if packed and self.fault == "loss" and output.loss is not None:
            output.loss = output.loss * 1.05
        if packed and self.fault == "gradients":
            output.logits = Scaled.apply(output.logits, 0.5)
        return output


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_half_precision_hides_no_wrong_loss_and_no_wrong_gradient(dtype):
    model = enabled(as_class(FaultyWhenPacked, dtype=dtype))
    options = {"modes": ("default", "two rows"), "training": (True,)}
    assert autopack.audit(model, **options).exact, "control"
    model.fault = "loss"
    report = autopack.audit(model, **options)
    assert report.packed is None
    assert "the loss is off by 5.0e-02" in report.labels
    model.fault = "gradients"
    assert "gradients are off by" in autopack.audit(model, **options).packed


class TakesNoLabelOfAnyForm(LlamaForCausalLM):
    def forward(self, input_ids, labels=None, **kwargs):
        if labels is not None:
            raise RuntimeError("labels must be a dictionary")
        return super().forward(input_ids, **kwargs)


class OtherWithoutCache(LlamaForCausalLM):
    """Shares something only where there is a cache, which packed rows have not."""

    def forward(self, *args, use_cache=None, **kwargs):
        output = super().forward(*args, use_cache=use_cache, **kwargs)
        if use_cache is not False:
            output["logits"] = output.logits.roll(1, dims=-1)
        return output


class OtherAloneWithoutCache(LlamaForCausalLM):
    """A document alone gets other logits where no cache is to be filled, as Doge's with SDPA."""

    def forward(self, *args, use_cache=None, position_ids=None, **kwargs):
        output = super().forward(*args, use_cache=use_cache, position_ids=position_ids, **kwargs)
        if use_cache is False and position_ids is None:
            output["logits"] = output.logits.roll(1, dims=-1)
        return output


def hooked(model, hook):
    model.register_forward_hook(hook)
    return model


def bert():
    return BertModel(tiny.config("bert")).eval()


def one_pooled(module, args, output):
    output["pooler_output"] = output.pooler_output[:1]
    return output


def shifted_states(module, args, output):
    if output.hidden_states is not None:
        output["hidden_states"] = tuple(states.roll(1, dims=1) for states in output.hidden_states)
    return output


ODD_SHAPE = "pooler_output has shape (1, 64), which is not made of those alone: (1, 64), (1, 64)"
FOUND = {
    "no labels": (lambda: as_class(TakesNoLabelOfAnyForm), PACKED, "labels", (
                                                                                 "no labels were "
                                                                                 "found that its "
                                                                                 "loss"
                                                                             )),
    "a pooled field of another shape": (lambda: hooked(bert(), one_pooled), PACKED, "packed", ODD_SHAPE),
    "a field beside the logits": (
        lambda: hooked(tiny.build("llama"), shifted_states), ("default", "every output"), "packed", "hidden_states["
    ),
    "other results of the default call": (lambda: as_class(OtherWithoutCache), PACKED, "packed", "logits are off by"),
    "other results without a cache": (
        lambda: as_class(OtherAloneWithoutCache), PACKED, "packed", "in mode 'use_cache=False, eval' logits are off by"
    ),
    "nothing": (bert, PACKED, "", ""),
    "nothing, in every output": (lambda: tiny.build("llama"), (*PACKED, "every output"), "", ""),
}  # fmt: skip
"""Models, call modes, the verdict that a fault changes, and its words."""


@pytest.mark.parametrize("name", FOUND)
def test_a_fault_changes_one_verdict(name):
    make, modes, verdict, words = FOUND[name]
    report = autopack.audit(enabled(make()), modes=modes, training=(False,))
    for each in ("packed", "labels"):
        assert words in getattr(report, each) if each == verdict else getattr(report, each) is None
    if name == "no labels":
        assert "loss: not measured, because RuntimeError: labels must be a dictionary" in str(
            report
        )
    elif name == "a field beside the logits":
        assert {result.mode: report.is_exact(result) for result in report.results}["default"]
    else:
        assert report.exact is not bool(verdict)


@pytest.mark.parametrize("unpad", [True, False])
def test_what_it_says_of_padded_batches_is_so(unpad):
    model = tiny.build("llama", attn_implementation="sdpa")
    model.loss_function = per_sequence  # every row of a batch counts alike
    batch = padded("masked LM", mask_of((9, 4)))
    expected = model(**batch).loss.detach()
    report = autopack.audit(enabled(model, unpad=unpad), modes=(*PACKED, *PADDED))
    error = float((model(**batch).loss.detach() - expected).abs() / expected)
    assert (report.padded is None) == (error < 1e-5), f"{error}, {report.padded}"
    assert any(result.kind == "padded" for result in report.results) == unpad


def no_twin(*_):
    raise NoTwin("nobody makes one here")


@pytest.mark.parametrize("seen_by", ["twin", "check"])
def test_padded_batches_that_a_twin_or_a_check_finds_wrong_stay_as_they_came(monkeypatch, seen_by):
    stock = tiny.build("llama", attn_implementation="sdpa").train()
    if seen_by == "check":
        monkeypatch.setattr(by_twin.twins, "of", no_twin)
    put_a_fault_into_unpadding(monkeypatch, "logits")
    model, batch = copy.deepcopy(stock), padded("backbone", mask_of((9, 4)))
    with packs_at_once(model) as handle:
        assert torch.equal(model(**batch).logits, stock(**batch).logits)
        (reason,) = handle.tally.left
        when = {"twin": "its twin was audited", "check": "its first batch was checked"}[seen_by]
        assert reason.startswith(f"it was not exact without its padding when {when}: ")


def test_a_shape_that_padding_should_have_is_found(monkeypatch):
    model = enabled(tiny.build("llama", attn_implementation="sdpa"))
    monkeypatch.setattr(Unpadded, "finish", lambda self, ended, module, output: output)
    assert (
        "logits has shape (1, 33, 128); stock gives (4, 12, 128)"
        in autopack.audit(model, modes=PADDED).padded
    )


def leaks_past(column):
    """Mixes each token into the next one, in columns of the row past a number."""

    def hook(module, args):
        (states,) = args
        far = torch.arange(states.shape[1], device=states.device) >= column
        return (torch.where(far[:, None], states + states.roll(1, dims=1), states),)

    return hook


@pytest.mark.parametrize("column", [40, 300])
def test_a_leak_past_a_threshold_is_found(column):
    model = tiny.build("llama", max_position_embeddings=4096)
    model.model.layers[0].mlp.register_forward_pre_hook(leaks_past(column))
    enabled(model)
    usual = tuple(
        name for name, form in FORMS.items() if not (form.own_documents or form.is_padded)
    )
    assert autopack.audit(model, modes=usual, gradients=False).exact
    assert "thresholds" not in {
        result.mode for result in autopack.audit(model, gradients=False).results
    }
    model.config.attention_chunk = column
    report = autopack.audit(model, gradients=False)
    assert "thresholds" in {result.mode for result in report.results if not report.is_exact(result)}


class CarriesSomeTokens(LlamaForCausalLM):
    """Hands something of certain tokens to all that come after them in a row, which no loss
    shows."""

    carriers = frozenset()
    rows: ClassVar[list[torch.Tensor]] = []

    def forward(self, input_ids, **kwargs):
        self.rows.append(input_ids)
        output = super().forward(input_ids, **kwargs)
        carried = torch.isin(input_ids, torch.tensor([*self.carriers], dtype=torch.long)).cumsum(1)
        output.logits = output.logits + 0.1 * carried[..., None]
        return output


@pytest.mark.parametrize("mode", ["default", "two rows"])
def test_a_leak_that_shows_only_where_a_document_is_replaced_is_found(mode):
    """Every document as it stands gets what it gets alone, since none of them has such a token."""
    model = enabled(as_class(CarriesSomeTokens))
    options = {"lengths": (7, 12, 5, 9), "modes": (mode,), "training": (False,), "gradients": False}
    model.rows.clear()
    assert autopack.audit(model, **options).exact
    base, *replaced = ({*ids.flatten().tolist()} for ids in model.rows if ids.shape[1] == 33)
    model.carriers = frozenset(set().union(*replaced) - base)
    report = autopack.audit(model, **options)
    (result,) = report.results
    assert result.error <= report.tolerance
    assert result.worst_influence > LEAK
    assert "one document changes another by" in report.packed
    assert not report.exact


def test_gradients_of_padded_batches_are_compared():
    model = enabled(tiny.build("llama", attn_implementation="sdpa"))
    packed = 0.9  # the share of the gradient of a packed row
    hooked(
        model.model.norm,
        lambda module, args, output: Scaled.apply(output, packed if len(output) == 1 else 1.0),
    )
    report = autopack.audit(model, modes=("right-padded",))
    assert "gradients are off by" in report.padded
    assert autopack.audit(model, modes=("right-padded",), gradients=False).padded is None
