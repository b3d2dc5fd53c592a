"""What users run models in every day, with models and subclasses of any type: PEFT, accelerate,
Trainer, threads."""

import concurrent.futures

import pytest
import torch

import autopack
from autopack import tiny
from autopack.enabling import prove
from tests.engine import WHEN, Call, check, form_of
from tests.subjects import DECODERS, alternating, build, crossed, subclass
from tests.support.trained import checkpointed, with_lora
from tests.unfamiliar.properties import Property, table
from tests.unfamiliar.test_subclasses import names_some

EARLY_AND_LATE = ["before", "before", "after", "after"]


def call_of(model_type, **options):
    """The way in which a type is called, whatever it is wrapped in."""
    return Call(form=form_of(build(model_type)), **options)


def both(model_type, *_):
    return call_of(model_type).both


def thin(model_type, *_):
    model = build(model_type)
    subclass(model, names_some)
    return model


def adapted(model):
    # PEFT refuses the outputs of Mamba's mixers.
    targets = ["in_proj"] if model.config.model_type in ("mamba", "mamba2") else "all-linear"
    return with_lora(model, targets, task_type="CAUSAL_LM")


def hooked(model):
    """The hooks of accelerate on every module, as `dispatch_model` leaves them: forwards on the
    instances."""
    hooks = pytest.importorskip("accelerate.hooks")
    for module in model.modules():
        hooks.add_hook_to_module(module, hooks.AlignDevicesHook(execution_device="cpu"))


def prepared(model):
    accelerate = pytest.importorskip("accelerate")
    return accelerate.Accelerator(cpu=True).prepare(model)


def put(model, setting):
    return setting(model)


ACCELERATED = alternating(crossed(DECODERS, [hooked, prepared], 1), EARLY_AND_LATE)
CHECKPOINTED = alternating(crossed(DECODERS, [True, False], 1), EARLY_AND_LATE)


@table([
    Property("peft", crossed(DECODERS, WHEN, 1), adapted, both, WHEN),
    Property("peft of a thin subclass", ["llama", "gpt2", "qwen2_moe", "bloom"], adapted, both, WHEN, make=thin),
    Property("accelerate", ACCELERATED, put, both, WHEN, usual=2),
    Property("accelerate with a thin subclass", [("llama", hooked), ("llama", prepared)], put, both, WHEN, make=thin),
    Property("gradient checkpointing of a thin subclass",
             [case for case in CHECKPOINTED if build(case[0]).supports_gradient_checkpointing], checkpointed, both,
             WHEN, make=thin),
])  # fmt: skip
def test_an_environment(subject, case):
    subject.hold(*case)


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
        prove, "proof_by_twin", lambda model, *rest: (found.append(model), proof(model, *rest))[1]
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
