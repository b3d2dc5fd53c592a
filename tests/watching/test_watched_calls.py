"""`watch`: which calls are counted and checked, beside copies, autocast, compilation, trainers and threads."""

from __future__ import annotations

import copy
import pickle
import random
import threading

import pytest
import torch
import torch._dynamo.testing

import autopack
from tests.conftest import llama, token_ids
from tests.support.mixing import mix, shift_boundaries
from tests.support.padded import build
from tests.support.training_calls import FLOAT32, noisy, padded, row, trained

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


def test_only_training_calls_that_pack_or_unpad_count():
    model = build("llama")
    with autopack.enable(model, watch=1) as handle:
        with torch.no_grad():
            model(**row(0))
        model.eval()
        model(**row(0))
        model.train()
        model(input_ids=token_ids(), labels=token_ids())
        assert handle.watched.checks == 0
        trained(model, row(0), padded(1))
        assert handle.watched.checks == 2
        trained(model.model, *[])
        model.model(**{name: value for name, value in row(2).items() if name != "labels"})
        assert handle.watched.checks == 3


def test_documents_take_turns():
    model = mix(build("llama"))
    with autopack.enable(model, watch=2, verify=False, watch_action="log") as handle:
        seen = []
        handle.watched._judged = lambda call, document, runs, step: seen.append(document.number)
        trained(model, *(row(step) for step in range(12)))
        assert seen == [0, 1, 2, 3, 0, 1]


def test_it_says_what_it_did_and_ends_with_the_handle():
    model = build("llama")
    handle = autopack.enable(model, watch=3)
    trained(model, *(row(step) for step in range(7)))
    assert "every 3 training calls; 2 checked, worst relative error" in repr(handle)
    assert "2 checked" in handle._repr_html_()
    autopack.disable(model)
    before = handle.watched.checks
    trained(model, *(padded(step) for step in range(7)))
    assert handle.watched.checks == before
    again = autopack.enable(model)
    assert again.watched is None
    assert "watched" not in repr(again)
    again.remove()


def test_the_environment_asks_for_it_and_the_argument_wins(monkeypatch):
    model = build("llama")
    monkeypatch.setenv("AUTOPACK_WATCH", "2")
    monkeypatch.setenv("AUTOPACK_WATCH_ACTION", "log")
    with autopack.enable(model) as handle:
        assert handle.watched.every == 2
        assert autopack.enable(model) is handle
    with autopack.enable(model, watch=5) as handle, pytest.raises(ValueError, match="watch=5"):
        autopack.enable(model, watch=6)
    with autopack.enable(model, watch=0) as handle:
        assert handle.watched is None
    with autopack.enable(mix(model), verify=False) as handle:
        trained(model, *(row(step) for step in range(8)))
        assert handle.watched.leaks > 0
    for name, value in (("AUTOPACK_WATCH", "often"), ("AUTOPACK_WATCH_ACTION", "ignore")):
        monkeypatch.setenv(name, value)
        with pytest.raises(ValueError, match=f"{name} must be .* found '{value}'"):
            autopack.enable(model)
        monkeypatch.delenv(name)
    for wrong in ({"watch": -1}, {"watch": True}, {"watch": 1.5}, {"watch_action": "ignore"}):
        with pytest.raises(ValueError, match="must be"):
            autopack.enable(model, **wrong)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_is_watched_by_itself(duplicate):
    model = build("llama")
    handle = autopack.enable(model, watch=1)
    trained(model, row(0))
    twin = duplicate(model)
    found = twin.__dict__["_autopack_handle"]
    trained(twin, row(1), row(2))
    assert (handle.watched.checks, found.watched.checks) == (1, 3)
    handle.remove()
    found.remove()


def test_an_audit_is_not_training():
    model = llama(dtype=torch.float32).train()
    with autopack.enable(model, watch=1) as handle:
        assert autopack.audit(model).exact
        assert handle.watched.checks == 0
        trained(model, row(0))
        assert handle.watched.checks == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_under_autocast_rounding_is_that_of_autocast(dtype, monkeypatch):
    model = noisy(build("llama"))
    with autopack.enable(model, watch=1) as handle:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            trained(model, *(row(step) for step in range(8)))
        assert handle.watched.checks == 8
        assert handle.watched.worst < (0.1 if dtype == torch.bfloat16 else FLOAT32)
        shift_boundaries(monkeypatch)
        with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(autopack.LeakDetected) as raised:
            trained(model, *(row(step) for step in range(8)))
        assert raised.value.report.tolerance == 0.1


def test_a_model_that_is_compiled_as_one_graph_stays_one():
    torch._dynamo.reset()
    model = build("llama")
    handle = autopack.enable(model, watch=2)
    trained(torch.compile(model, backend="eager", fullgraph=True), *[row(0)] * 4)
    assert handle.watched.checks == 2
    handle.remove()
    torch._dynamo.reset()


@pytest.mark.exhaustive
@pytest.mark.parametrize("regional", [False, True])
def test_compiled_models_are_checked_and_compiled_no_more_than_without(regional):
    frames = []
    for watch in (0, 2):
        counter = torch._dynamo.testing.CompileCounter()
        torch._dynamo.reset()
        model = build("llama")
        handle = autopack.enable(model, watch=watch)
        if regional:
            for layer in model.model.layers:
                layer.compile(backend=counter)
        trained(model if regional else torch.compile(model, backend=counter), *[row(0)] * 6, *[padded(0)] * 6)
        if handle.watched is not None:
            assert handle.watched.checks == 6
            assert handle.watched.worst < FLOAT32
        frames.append(counter.frame_count)
        handle.remove()
    assert frames[0] == frames[1] > 0
    torch._dynamo.reset()


def test_the_models_of_a_trainer(tmp_path):
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    trainer = Trainer(model=build("llama"), args=TrainingArguments(tmp_path, report_to=[], use_cpu=True))
    with autopack.enable(trainer, watch=3) as handles:
        assert handles.handles["model"].watched.every == 3
        assert autopack.enable(trainer).handles["model"] is handles.handles["model"]


def test_lora_in_a_wrapper():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, lora_dropout=0.3, init_lora_weights=False, target_modules=["q_proj", "v_proj"])
    wrapped = peft.get_peft_model(build("llama"), config).train()
    with autopack.enable(wrapped, watch=1) as handle:
        trained(wrapped, row(0), padded(1))
        assert handle.watched.checks == 2
        assert handle.watched.worst < FLOAT32


class Jumpy(torch.nn.Module):
    """A layer that draws numbers of its own in training, at a rate that nobody can see."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return states * random.random()


def test_what_cannot_be_compared_is_skipped_and_said():
    model = build("llama")
    model.model.norm = torch.nn.Sequential(model.model.norm, Jumpy())
    with autopack.enable(model, watch=1, verify=False) as handle:
        trained(model, row(0), row(1))
        assert handle.watched.checks == 0
        assert handle.watched.skipped == {"its forward draws random numbers that autopack cannot switch off": 2}
        assert "2 skipped: its forward draws" in repr(handle)


def test_transforms_are_left_alone():
    model = build("llama")
    parameters = dict(model.named_parameters())
    with autopack.enable(model, watch=1) as handle:
        given = row(0)
        torch.func.grad(lambda p: torch.func.functional_call(model, p, (), given).loss)(parameters)
        assert handle.watched.checks == 0


def test_threads_that_train_one_model_leave_its_dropout_on():
    """A check switches dropout off; another one that began meanwhile would take that for the model's own rate."""
    model = noisy(build("llama"))
    rates = [module.attention_dropout for module in model.modules() if hasattr(module, "attention_dropout")]
    assert any(rates)
    failures: list[BaseException] = []
    model.train()

    def train() -> None:
        try:
            for step in range(8):
                model(**row(step)).loss.backward()
        except BaseException as error:
            failures.append(error)

    with autopack.enable(model, watch=1) as handle:
        threads = [threading.Thread(target=train) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures, failures
        assert handle.watched.checks == 24
    assert [m.attention_dropout for m in model.modules() if hasattr(m, "attention_dropout")] == rates
