"""`watch`: a document of a live training call against the same document alone, every so many calls."""

from __future__ import annotations

import copy
import pickle
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo.testing

import autopack
from autopack.attention import choose
from autopack.calls import packed, unpadded
from autopack.errors import Leak
from autopack.layout.packed import PackedLayout
from tests.conftest import llama, positions, token_ids
from tests.support.padded import build
from tests.support.training_calls import FLOAT32, lengths_of, noisy, padded, row, segments, trained

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


def shift_boundaries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant a leak: what sites are told of the second document begins one token late."""

    def shifted(model: Any, layout: Any, **others: Any) -> Any:
        bounds = layout.bounds.copy()
        bounds[1] += 1
        return scope(model, replace(layout, bounds=bounds, _derived={}), **others)

    scope = packed.Scope
    monkeypatch.setattr(packed, "Scope", shifted)
    monkeypatch.setattr(unpadded, "Scope", shifted)


def forget_boundaries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant a leak: attention takes every row for one document."""

    def attend(call: Any) -> Any:
        rows = PackedLayout.from_lengths([[call.layout.columns]] * call.layout.rows)
        return own.attend(replace(call, layout=rows, mask=None))

    own = choose.BACKENDS["sdpa"]
    monkeypatch.setitem(choose.BACKENDS, "sdpa", replace(own, attend=attend))


class Mixing(torch.nn.Module):
    """A layer of the user's that hands every token something of the one before it."""

    def __init__(self, inner: torch.nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.inner(states + 0.1 * torch.nn.functional.pad(states[:, :-1], (0, 0, 1, 0)))


def mix(model: Any) -> Any:
    layer = model.model.layers[0]
    layer.mlp = Mixing(layer.mlp)
    return model


@pytest.mark.parametrize("noise", [False, True], ids=["", "dropout"])
@pytest.mark.parametrize("form", [row, padded])
@pytest.mark.parametrize(("every", "plant"), [(1, shift_boundaries), (4, shift_boundaries), (2, forget_boundaries)])
def test_a_planted_leak_is_found_and_its_document_named(monkeypatch, form, noise, every, plant):
    model = build("llama")
    if noise:
        noisy(model)
    with autopack.enable(model, watch=every) as handle:
        trained(model, *(form(step) for step in range(every)))
        assert handle.watched.checks == 1
        plant(monkeypatch)
        with pytest.raises(autopack.LeakDetected, match=r"document \d \(row \d, columns") as raised:
            # Documents take turns, and not every one of the four is touched.
            trained(model, *(form(5 + step) for step in range(3 * every)))  # call every + 1 + step
        report = raised.value.report
        assert isinstance(report, Leak)
        assert report.document in ((0, 1) if plant is shift_boundaries else (1, 2, 3))
        assert report.step % every == 0
        assert report.error > report.tolerance == FLOAT32
        starts = sum(lengths_of(5 + report.step - every - 1)[: report.document]) if form is row else 0
        assert (report.row, report.columns[0]) == ((0, starts) if form is row else (report.document, 0))
        assert handle.watched.leaks == 1
        assert handle.watched.worst == report.error
        assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)


@pytest.mark.parametrize("noise", [False, True], ids=["", "dropout"])
def test_a_layer_that_mixes_tokens_is_found(noise):
    model = mix(build("llama"))
    if noise:
        noisy(model)
    with autopack.enable(model, watch=1, verify="never") as handle:
        trained(model, row(0))  # the first document has nobody before it
        with pytest.raises(autopack.LeakDetected) as raised:
            trained(model, row(1))
        assert raised.value.report.document == 1
        first, end = raised.value.report.columns
        assert [first, end] == [lengths_of(1)[0], sum(lengths_of(1)[:2])]
        assert handle.watched.leaks == 1


class Touching(torch.nn.Module):
    """Hands one token in the middle of a long row a little of the first."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        if states.shape[1] <= 40:
            return states
        column = torch.arange(states.shape[1])[:, None]
        return torch.where(column == 40, states + 3e-3 * states[:, :1], states)


def test_a_small_leak_at_one_token_of_many_is_found():
    model, lengths = build("llama"), (3, 39, 5)
    model.model.norm = torch.nn.Sequential(model.model.norm, Touching())
    ids = token_ids(columns=sum(lengths))
    given = {"input_ids": ids, "position_ids": positions(lengths), "labels": ids}
    with autopack.enable(model, watch=1, verify="never") as handle:
        trained(model, given)  # the first document is not the one
        with pytest.raises(autopack.LeakDetected) as raised:
            trained(model, given)
        assert raised.value.report.columns == (3, 42)
        assert handle.watched.worst < lengths[1] * FLOAT32, "its mean is no more than rounding"


def test_a_leak_of_the_layer_is_in_the_log_each_time(caplog):
    model = mix(build("llama"))
    with autopack.enable(model, watch=1, verify="never", watch_action="log") as handle:
        trained(model, *(row(step) for step in range(8)))
        found = [record for record in caplog.records if "found a leak" in record.getMessage()]
        assert len(found) == handle.watched.leaks >= 6
        assert "leaking" in repr(handle)


def test_labels_at_boundaries_are_part_of_it(monkeypatch):
    """With dropout the call is run once more, and the loss that the document's labels make is compared too."""
    model = noisy(build("llama"))
    with autopack.enable(model, watch=1) as handle:
        monkeypatch.setattr(packed, "without_boundaries", lambda labels, *_: labels)
        trained(model, row(0))
        with pytest.raises(autopack.LeakDetected) as raised:
            trained(model, *(row(step) for step in range(1, 5)))
        assert raised.value.report.field == "loss"
        assert handle.watched.leaks == 1


def picture(model: Any) -> dict[str, Any]:
    """All state of a model and of the generators."""
    found = {name: value.clone() for name, value in (*model.named_parameters(), *model.named_buffers())}
    found["torch"] = torch.get_rng_state()
    numbers = {f"{name}.{key}": v for name, m in model.named_modules() for key, v in vars(m).items()}
    plain = {key: value for key, value in numbers.items() if isinstance(value, int | float | str)}
    return {**found, **plain, "random": random.getstate(), "numpy": str(np.random.get_state())}


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        same = torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name]
        assert same, name


@pytest.mark.sampled(5)
@pytest.mark.parametrize("model_type", ["gpt2", "llama", "mamba", "qwen2_moe"])
@pytest.mark.parametrize("checkpointing", [None, True, False])
def test_training_is_bit_for_bit_what_it_is_without(model_type, checkpointing):
    pictures, losses = [], []
    for watch in (0, 2):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        model = noisy(build(model_type, attn_implementation="eager"))
        if checkpointing is not None:
            model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
            model.enable_input_require_grads()
        with autopack.enable(model, watch=watch) as handle:
            outputs = trained(model, *((segments, padded)[step % 2](step) for step in range(6)))
            assert handle.watched is None if watch == 0 else handle.watched.checks == 3
            assert handle.tally.batches == 3
        pictures.append(picture(model))
        losses.append([output.loss.item() for output in outputs])
    assert losses[0] == losses[1]
    assert_same(*pictures)


class Drawing(torch.nn.Module):
    """A layer that draws from every generator to no effect, counts its calls, and writes to what its graph holds."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("one", torch.ones(()))
        self.calls = 0

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.calls += 1
        drawn = torch.rand(()) + random.random() + float(np.random.random())
        return states * self.one.mul_(1.0) + 0.0 * drawn


def test_what_a_layer_draws_and_counts_is_what_it_is_without():
    pictures = []
    for watch in (0, 1):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        model = build("llama")
        model.model.norm = torch.nn.Sequential(model.model.norm, Drawing())
        with autopack.enable(model, watch=watch, verify="never") as handle:
            trained(model, *((row, padded)[step % 2](step) for step in range(6)))
            assert handle.watched is None if watch == 0 else handle.watched.checks == 6
        pictures.append(picture(model))
    assert pictures[0]["model.norm.1.count"] == 6
    assert_same(*pictures)


def test_outputs_that_wait_are_not_read():
    model = build("llama")
    with autopack.enable(model, watch=1):
        output = model(**padded(0))
        assert type(output).__name__ == "CausalLMOutputWithPast"
        waits = type(output) is not type(copy.copy(output))
        assert waits
        (gradient,) = torch.autograd.grad(output.loss, output.logits)
        assert gradient.abs().max() > 0


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
    with autopack.enable(model, watch=2, verify="never", watch_action="log") as handle:
        seen = []
        handle.watched._judged = lambda call, document, runs, step: seen.append(document.place[0])
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
    with autopack.enable(mix(model), verify="never") as handle:
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
        return states * torch.rand(states.shape[-1])


def test_what_cannot_be_compared_is_skipped_and_said():
    model = build("llama")
    model.model.norm = torch.nn.Sequential(model.model.norm, Jumpy())
    with autopack.enable(model, watch=1, verify="never") as handle:
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
