"""The auditor finds leaks where they are and none where there are none, and leaves the model as it
was."""

import copy

import numpy as np
import pytest
import torch

import autopack
from autopack import tiny
from autopack.auditing.cases import FORMS, ROUTER
from autopack.auditing.compare import BOUNDS
from tests.conftest import LEAK, attributes, llama, same
from tests.subjects import build

FEW = ("default", "use_cache=False")


def _verdicts(report):
    return {result.name: report.is_exact(result) for result in report.results}


@pytest.fixture(scope="module")
def stock_report():
    return autopack.audit(llama(dtype=torch.float32))


@pytest.fixture(scope="module")
def enabled_report():
    with autopack.enable(llama(dtype=torch.float32)) as handle:
        return autopack.audit(handle.model)


def test_stock_llama_leaks_wherever_a_mask_or_a_cache_comes_along(stock_report):
    verdicts = _verdicts(stock_report)
    assert verdicts["use_cache=False, eval"]
    for mode in (
        "default",
        "all-ones mask",
        "padding mask",
        "segment ids",
        "two rows",
        "thresholds",
    ):
        assert not verdicts[f"{mode}, eval"], mode
    for mode in ("default", "padding mask", "two rows"):
        assert not verdicts[f"{mode}, train"], mode
    assert not any("padded" in name for name in verdicts), (
        "padded batches of stock are what they are compared with"
    )
    assert not stock_report.exact
    assert not stock_report.enabled
    assert stock_report.worst > LEAK


def test_enabled_llama_is_exact_in_every_mode(enabled_report):
    wanted = {f"{mode}, eval" for mode in FORMS if mode != ROUTER}
    wanted |= {f"{mode}, train" for mode, form in FORMS.items() if form.trains}
    assert set(_verdicts(enabled_report)) == wanted
    assert all(_verdicts(enabled_report).values()), enabled_report
    assert enabled_report.exact
    assert enabled_report.enabled
    assert enabled_report.worst <= BOUNDS[torch.float32].results
    assert enabled_report.worst_gradient <= 10 * BOUNDS[torch.float32].results


def test_influence_says_who_changes_whom(stock_report, enabled_report):
    leaks = stock_report.influence
    assert np.isnan(np.diag(leaks)).all()
    later = np.tril(np.ones_like(leaks, dtype=bool), k=-1)
    first_row = leaks[:4, :4]  # a causal model: documents change only those after them
    assert (first_row[later[:4, :4]] > LEAK).all()
    assert (first_row[later[:4, :4].T] == 0).all()
    clean = enabled_report.influence
    assert (clean[~np.isnan(clean)] == 0).all()


def test_a_router_loss_that_is_no_number_in_stock_keeps_no_labels_from_packed_rows():
    """By eager attention in float64 stock has none for padded batches of mixtures."""
    with autopack.enable(build("qwen2_moe", attn_implementation="eager")) as handle:
        assert handle.enabled.proof.why_not_labels is None


def test_loss_across_boundaries_counts_as_a_leak(stock_report):
    by_name = {result.name: result for result in stock_report.results}
    assert by_name["use_cache=False, eval"].loss <= stock_report.loss_tolerance
    assert by_name["default, eval"].loss > stock_report.loss_tolerance


class LeakyInTraining(torch.nn.Module):
    """Mixes a token into the next one, but only in train mode."""

    def forward(self, states):
        return states + states.roll(1, dims=1) if self.training else states


def test_a_leak_in_training_alone_is_found():
    model = llama(dtype=torch.float32)
    model.model.layers[0].mlp = torch.nn.Sequential(LeakyInTraining(), model.model.layers[0].mlp)
    with autopack.enable(model, verify=False):
        verdicts = _verdicts(autopack.audit(model, modes=FEW))
    assert verdicts == {
        f"{mode}, {when}": when == "eval" for mode in FEW for when in ("eval", "train")
    }


def test_a_call_that_raises_is_reported_as_raised():
    model = llama(dtype=torch.float32)

    def dislike_masks(module, args, kwargs):
        if kwargs.get("attention_mask") is not None:
            raise ZeroDivisionError("no masks please")

    model.register_forward_pre_hook(dislike_masks, with_kwargs=True)
    report = autopack.audit(
        model, modes=("use_cache=False", "all-ones mask"), training=(False,), gradients=False
    )
    fine, raised = report.results
    assert report.is_exact(fine)
    assert raised.failure == "ZeroDivisionError: no masks please"
    assert not report.exact
    assert report.worst == float("inf")
    assert np.isfinite(report.influence[0, 1])


@pytest.mark.parametrize("enable", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_the_model_and_the_random_state_are_left_as_they_were(enable, training):
    model = tiny.build("llama", attn_implementation="sdpa", attention_dropout=0.1).train(training)
    model.model.layers[0].eval()  # modes may differ within a model
    model.lm_head.weight.requires_grad_(False)
    model.model.norm.weight.grad = torch.ones_like(model.model.norm.weight)
    if enable:
        autopack.enable(model)
    before, weights = attributes(model), copy.deepcopy(model.state_dict())
    torch.manual_seed(5)
    state = torch.get_rng_state()
    # dropout is off while the auditor trains
    assert autopack.audit(model, modes=FEW).exact == enable
    assert torch.equal(torch.get_rng_state(), state)
    assert same(attributes(model), before)
    assert all(torch.equal(weights[k], v) for k, v in model.state_dict().items())
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert list(grads) == ["model.norm.weight"]
    assert (grads["model.norm.weight"] == 1).all()
    autopack.disable(model)


def test_frozen_models_can_be_audited():
    model = llama(dtype=torch.float32).requires_grad_(False)
    with autopack.enable(model):
        report = autopack.audit(model, modes=FEW, training=(False,))
    assert report.exact
    assert all(result.gradient is None for result in report.results)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"modes": ("default", "upside down")},
            "modes must be among default, .*; found upside down",
        ),
        ({"lengths": (5,)}, r"two or more documents of at least one token; found \(5,\)"),
        ({"lengths": (5, 0)}, r"found \(5, 0\)"),
        ({"training": ()}, r"training must name False, True or both; found \(\)"),
        ({"modes": ("router loss",)}, "one that this model has; found 'router loss': it has none"),
    ],
)
def test_options_that_make_no_sense_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        autopack.audit(llama(), **arguments)


@pytest.mark.parametrize("lengths", [(1, 1), (1, 9, 2), (6, 6, 6)])
def test_any_lengths_are_measured(lengths):
    with autopack.enable(llama()) as handle:
        report = autopack.audit(
            handle.model, lengths=lengths, modes=("default", "two rows"), training=(False,)
        )
    assert report.exact, report
    assert report.lengths == lengths
    assert all((result.loss is None) == (max(lengths) == 1) for result in report.results)
