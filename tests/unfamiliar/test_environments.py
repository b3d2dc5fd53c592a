"""What users run models of any type in every day: PEFT, threads, hooks for hidden states."""

import concurrent.futures

import pytest
import torch

import autopack
from autopack import tiny
from autopack.enabling import prove
from tests.engine import WHEN, Call, check, form_of, must_be_exact
from tests.subjects import DECODERS, build, crossed, subclass
from tests.support.trained import with_lora
from tests.unfamiliar.test_subclasses import names_some


def call_of(model_type, **options):
    """The way in which a type is called, whatever it is wrapped in."""
    return Call(form=form_of(build(model_type)), **options)


def thin(model_type):
    model = build(model_type)
    subclass(model, names_some)
    return model


def adapted(model):
    # PEFT refuses the outputs of Mamba's mixers.
    targets = ["in_proj"] if model.config.model_type in ("mamba", "mamba2") else "all-linear"
    return with_lora(model, targets, task_type="CAUSAL_LM")


@pytest.mark.parametrize(("model_type", "when"), crossed(DECODERS, WHEN, 1))
def test_adapters_of_any_type(model_type, when):
    must_be_exact(model_type, call_of(model_type).both, adapted, when)


@pytest.mark.parametrize("model_type", ["llama", "bloom", "mamba", "qwen2_moe"])
def test_two_threads_with_two_layouts(model_type):
    """Each thread has its own documents, in one model at once."""
    call = call_of(model_type, labels=None)
    model, stock = thin(model_type), thin(model_type)
    calls = [(call.packed, call.alone(stock)), (call.padded, call.padded(stock))] * 2

    def run(each):
        run, expected = each
        for _ in range(8):
            with torch.no_grad():
                check(run(model), expected)

    with autopack.enable(model), concurrent.futures.ThreadPoolExecutor(4) as threads:
        list(threads.map(run, calls))


@pytest.fixture
def proofs(monkeypatch):
    """The models that were proven meanwhile."""
    found = []
    proof = prove.proof_by_twin
    monkeypatch.setattr(
        prove,
        "proof_by_twin",
        lambda enabled, *rest: (found.append(enabled), proof(enabled, *rest))[1],
    )
    return found


def test_hooks_that_transformers_puts_on_for_hidden_states_are_no_change(proofs):
    model = thin("llama")
    with autopack.enable(model):
        assert len(proofs) == 1
        before = len(model.model.layers[0]._forward_hooks)
        model(input_ids=tiny.tokens(model.config, 1, 12), output_hidden_states=True)
        model(input_ids=tiny.tokens(model.config, 1, 12))
        assert len(model.model.layers[0]._forward_hooks) > before
        assert len(proofs) == 1
