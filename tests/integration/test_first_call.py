"""When a model is enabled under `autopack run`: its first call in training, and no other."""

import copy
import gc
import pickle
from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, PreTrainedModel

import autopack
from autopack import patching, tiny
from autopack.calls.hooks import EntryHook
from autopack.launch import first_call
from autopack.launch import session as sessions
from autopack.launch.first_call import FirstCall
from autopack.launch.session import Session
from autopack.launch.settings import RunSettings
from tests.conftest import FLOAT32, error
from tests.integration.test_trainer_logs import trainer
from tests.support import padded
from tests.support.dpo import preferences
from tests.support.refusals import refused
from tests.support.trained import losses_of

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


@pytest.fixture
def session(monkeypatch, tmp_path):
    """Autopack as `autopack run` starts it, but for models that are made here by `waiting` only."""
    found = Session(
        RunSettings.read({"AUTOPACK_SUBPROCESSES": "0"}), started=True, reports=tmp_path
    )
    monkeypatch.setattr(sessions, "current", found)
    return found


def waiting(model_type="llama", **options):
    """A model in training that waits as all models do that are made under `autopack run`."""
    model = tiny.build(model_type, attn_implementation="sdpa", **options).train()
    for part in reversed(list(model.modules())):
        if hasattr(part, "get_input_embeddings"):
            first_call._wait(part)
    return model


def batch():
    return padded.batch("causal LM", padded.mask_of((9, 5)))


def hooks(model):
    return [
        hook
        for part in model.modules()
        for hook in part._forward_pre_hooks.values()
        if isinstance(hook, FirstCall)
    ]


def packed(model):
    """How many padded batches of an enabled model ran as packed rows."""
    return model._autopack_enabled.tally.batches


def report(session, capsys):
    capsys.readouterr()
    session.report()
    return capsys.readouterr().err.splitlines()


CALLERS = {
    "the model": lambda model: model,
    "its forward": lambda model: lambda **arguments: model.forward(**arguments),
    "compiled": lambda model: torch.compile(model, backend="eager"),
}


@pytest.mark.parametrize("caller", CALLERS.values(), ids=CALLERS)
def test_the_first_call_in_training_is_packed_once_and_no_hook_is_left(session, caller):
    """Those without gradients wait in any mode."""
    model, stock = waiting(), tiny.build("llama", attn_implementation="sdpa").train()
    call = caller(model)
    assert len(hooks(model)) == 2
    with torch.no_grad():
        call(**batch())
        model.eval()
        call(**batch())
    with torch.inference_mode():
        model(**batch())
    assert not autopack.is_enabled(model)
    assert len(hooks(model)) == 2
    model.train()
    found, expected = call(**batch()), stock(**batch())
    assert torch.allclose(found.loss, expected.loss, rtol=FLOAT32)
    assert error(found.logits[0], expected.logits[0]) < FLOAT32
    assert packed(model) == 1
    assert hooks(model) == []
    assert not any(
        part._forward_pre_hooks_with_kwargs.keys() - part._forward_pre_hooks
        for part in model.modules()
    )
    assert torch.allclose(call(**batch()).loss, expected.loss, rtol=FLOAT32)
    assert packed(model) == 2
    torch._dynamo.reset()


@pytest.mark.parametrize("caller", [CALLERS["the model"], CALLERS["its forward"]])
def test_a_backbone_called_on_its_own_enables_the_whole_model(session, caller):
    model = waiting()
    arguments = {name: value for name, value in batch().items() if name != "labels"}
    caller(model.model)(**arguments)
    assert autopack.is_enabled(model)
    assert packed(model) == 0, "whether padding is read is found out first"
    with torch.no_grad():
        caller(model.model)(**arguments)
    assert packed(model) == 1
    model(**batch())
    assert packed(model) == 2


def test_a_forward_on_the_instance_that_is_called_directly_leaves_the_model_until_it_is_called(
    session, capsys
):
    model = waiting()
    own = type(model).forward
    model.forward = lambda **arguments: own(model, **arguments)
    model.forward(**batch())
    assert not autopack.is_enabled(model)
    (outcome,) = map(str, session._outcomes)
    assert outcome.endswith(
        "left as it is: its forward is called directly, and not the model itself"
    )
    model(**batch())
    assert packed(model) == 1
    assert "enabled" in report(session, capsys)[0]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_wait_on_their_own(session, copied, monkeypatch):
    """In a process without `autopack run` they are as they were."""
    model = waiting()
    other, elsewhere = copied(model), copied(model)
    other(**batch())
    assert autopack.is_enabled(other)
    assert not autopack.is_enabled(model)
    model(**batch())
    assert packed(model) == packed(other) == 1
    monkeypatch.setattr(sessions, "current", None)
    elsewhere(**batch())
    assert not autopack.is_enabled(elsewhere)


def test_a_model_that_the_script_enabled_is_its_own(session, capsys):
    model = waiting()
    handle = autopack.enable(model, unpad=False)
    model(**batch())
    assert model._autopack_enabled is handle.enabled
    assert hooks(model) == []
    assert sum(isinstance(hook, EntryHook) for hook in model._forward_pre_hooks.values()) == 1
    (line,) = report(session, capsys)
    told = (
        "autopack: LlamaForCausalLM (llama) enabled by the script; padded batches stay as they "
        "come; trained: 1 call,"
    )
    assert line.startswith(told)


def test_a_replica_of_data_parallel_is_left_alone(session, capsys):
    model = waiting()
    model._is_replica = True
    model(**batch())
    assert not autopack.is_enabled(model)
    assert hooks(model) == []
    assert "torch.nn.DataParallel" in capsys.readouterr().err


def test_an_error_of_any_kind_leaves_the_model_as_it_is_and_is_raised_with_strict(
    session, monkeypatch, capsys
):
    def fail(*_, **__):
        raise KeyError("some\nbug")

    monkeypatch.setattr("autopack.enabling.enable.enable", fail)
    model = waiting()
    for _ in range(2):
        model(**batch())
    assert capsys.readouterr().err == (
        "autopack: warning: LlamaForCausalLM (llama) left as it is: KeyError: 'some\\nbug'\n"
    )
    session.settings = replace(session.settings, strict=True)
    with pytest.raises(KeyError):
        waiting()(**batch())


def test_the_report_is_quiet_on_demand(session, capsys):
    waiting()(**batch())
    assert len(report(session, capsys)) == 1
    session.settings = replace(session.settings, quiet=True)
    waiting()(**batch())
    assert report(session, capsys) == []


REFUSED = {
    "input_ids": tiny.tokens(None, 1, 9),
    "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]]),
    "use_cache": True,
}


def test_packed_rows_that_ask_for_a_cache_run_as_without_autopack_and_are_counted(session, caplog):
    model, stock = waiting(), tiny.build("llama", attn_implementation="sdpa").train()
    for _ in range(2):
        assert error(model(**REFUSED).logits, stock(**REFUSED).logits) < FLOAT32
    model(**batch())
    assert packed(model) == 1
    said = [
        record.message for record in caplog.records if "as it would have without" in record.message
    ]
    assert len(said) == 1
    assert "cannot run packed rows: a cache is wanted" in said[0]
    (outcome,) = map(str, session._outcomes)
    assert (
        "2 calls ran as without autopack: LlamaForCausalLM cannot run packed rows: a cache"
        in outcome
    )
    session.settings = replace(session.settings, strict=True)
    strict = waiting()
    strict(**batch())
    with refused("cache-given"):
        strict(**REFUSED)


def test_a_model_without_a_forward_leaves_that_of_torch_alone(session):
    class Nothing(PreTrainedModel):
        config_class = LlamaConfig

    before = nn.Module.forward
    model = Nothing(LlamaConfig())
    first_call._wait(model)
    assert nn.Module.forward is before
    assert len(hooks(model)) == 1


def test_many_models_that_wait_share_a_site_and_leave_nothing(session):
    before = dict(patching._installed)
    models = [waiting() for _ in range(3)]
    assert len(patching._installed) > len(before)
    models[0](**batch())
    del models
    gc.collect()
    assert patching._installed == before


def test_a_model_that_is_trained_in_evaluation_mode_is_enabled_and_a_frozen_one_is_not(
    session, capsys
):
    """Lightning trains what comes from `from_pretrained` in the mode that it comes in."""
    model, frozen = waiting().eval(), waiting("gpt2").eval().requires_grad_(False)
    stock = tiny.build("llama", attn_implementation="sdpa").eval()
    with torch.no_grad():
        model(**batch())  # the check before training
    for which in (model, stock):
        which(**batch()).loss.backward()
    frozen(**batch())
    assert packed(model) == 1
    for found, expected in zip(model.parameters(), stock.parameters(), strict=True):
        assert torch.allclose(found.grad, expected.grad, rtol=FLOAT32, atol=1e-6)
    enabled, reference = report(session, capsys)
    assert enabled.startswith(
        "autopack: LlamaForCausalLM (llama) enabled; 1 padded batch packed inside"
    )
    assert reference.startswith(
        "autopack: GPT2LMHeadModel (gpt2) left as it is: it was not trained"
    )


def test_the_reference_of_a_dpo_trainer_is_enabled_with_the_model(session, tmp_path):
    found = []
    for enabled in (True, False):
        made = [
            waiting() if enabled else tiny.build("llama", attn_implementation="sdpa").train()
            for _ in range(2)
        ]
        run = preferences(tmp_path, *made)
        run.train()
        found.append(losses_of(run))
        if enabled:
            assert packed(made[0]) == packed(made[1]) == 10
        autopack.disable(made)
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_another_frozen_model_beside_it_is_not(session, tmp_path):
    """Of a teacher that a trainer of one's own holds, nobody knows what is read."""
    model, teacher = waiting(), waiting("gpt2").eval()
    run = trainer(tmp_path, model=model, max_steps=2)
    run.ref_model = teacher
    run.train()
    assert packed(model)
    assert not autopack.is_enabled(teacher)
    autopack.disable(model)
