"""What users run models in every day, with models and subclasses of any type: PEFT, accelerate, Trainer, threads."""

from __future__ import annotations

import concurrent.futures
import copy
import threading
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import autopack
from autopack import tiny
from autopack.enabling import prove
from tests.engine import IGNORED, LENGTHS, WHEN, Call, Property, Result, check, form_of, ids, in_rows, table, verdict
from tests.subjects import DECODERS, alternating, build, crossed, subclass
from tests.unfamiliar.test_losses import per_sequence, smoothed, summed
from tests.unfamiliar.test_subclasses import names_some, passes_all_on

EARLY_AND_LATE = ["before", "before", "after", "after"]


def call_of(model_type: str, **options: Any) -> Call:
    """The way in which a type is called, whatever it is wrapped in."""
    return Call(form=form_of(build(model_type)), **options)


def both(model_type: str, *_: Any) -> Any:
    return call_of(model_type).both


def thin(model_type: str, *_: Any) -> Any:
    model = build(model_type)
    subclass(model, names_some)
    return model


def adapted(model: Any) -> Any:
    """Low-rank adapters whose weights are drawn at random, the same ones every time."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    # PEFT refuses the outputs of Mamba's mixers.
    targets = ["in_proj"] if model.config.model_type in ("mamba", "mamba2") else "all-linear"
    config = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config)


def hooked(model: Any) -> None:
    """The hooks of accelerate on every module, as `dispatch_model` leaves them: forwards on the instances."""
    hooks = pytest.importorskip("accelerate.hooks")
    for module in model.modules():
        hooks.add_hook_to_module(module, hooks.AlignDevicesHook(execution_device="cpu"))


def prepared(model: Any) -> Any:
    accelerate = pytest.importorskip("accelerate")
    return accelerate.Accelerator(cpu=True).prepare(model)


class Documents(torch.utils.data.Dataset):
    """Examples without padding."""

    def __len__(self) -> int:
        return 2 * len(LENGTHS)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        tokens = ids(seed=index // len(LENGTHS))[0].split(LENGTHS)[index % len(LENGTHS)].tolist()
        return {"input_ids": tokens, "labels": tokens}


def pad(examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    parts = [torch.tensor(example["input_ids"]) for example in examples]
    labels = in_rows(parts, value=IGNORED)
    return {"input_ids": in_rows(parts), "labels": labels, "attention_mask": (labels >= 0).long()}


class Criterion(transformers.Trainer):
    """An own criterion outside of the model."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        labels = inputs["labels"]
        output = model(**{name: value for name, value in inputs.items() if name != "labels"})
        loss = smoothed(output.logits, labels)
        return (loss, output) if return_outputs else loss


class PerSequence(Criterion):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        output = model(**inputs)
        loss = per_sequence(output.logits, inputs["labels"])
        return (loss, output) if return_outputs else loss


class Penalised(transformers.Trainer):
    """The model's loss, and something on top of it."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        loss, output = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
        mask = inputs["attention_mask"][..., None]
        loss = loss + 0.01 * (output.logits.square() * mask).sum() / mask.sum()
        return (loss, output) if return_outputs else loss


def trained(model: Any, kind: Any, path: Any, **options: Any) -> Result:
    """The parameters after two steps on padded batches, with Trainer's own arguments."""
    arguments = transformers.TrainingArguments(
        output_dir=str(path),
        use_cpu=True,
        report_to=[],
        per_device_train_batch_size=len(LENGTHS),
        num_train_epochs=1,
        learning_rate=1e-2,
        save_strategy="no",
        disable_tqdm=True,
        optim="sgd",
        max_grad_norm=0.0,
    )
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer = kind(model=model, args=arguments, train_dataset=Documents(), data_collator=pad, **options)
    trainer.train()
    moved = {name: p.detach() - before[name] for name, p in model.named_parameters()}
    return Result([torch.zeros(2, 2)], torch.ones(()), moved)


def of_outputs(output: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    """A `compute_loss_func`."""
    return summed(output.logits, labels)


TRAINERS = {
    "Trainer": (transformers.Trainer, {}),
    "a criterion": (Criterion, {}),
    "per sequence": (PerSequence, {}),
    "a penalty": (Penalised, {}),
    "compute_loss_func": (transformers.Trainer, {"compute_loss_func": of_outputs}),
}


@pytest.mark.parametrize(
    ("name", "model_type"), crossed(list(TRAINERS), ["gpt_neox", "bloom", "llama", "opt", "gpt2"], 2)
)
@pytest.mark.parametrize("is_thin", [False, True], ids=["stock", "subclass"])
def test_a_trainer(name, model_type, is_thin, tmp_path):
    kind, options = TRAINERS[name]
    make = partial(thin if is_thin else build, model_type)
    expected = trained(make().train(), kind, tmp_path, **options)
    assert max(float(moved.abs().max()) for moved in expected.gradients.values()) > 1e-4
    model = make().train()
    with autopack.enable(model):
        found = trained(model, kind, tmp_path, **options)
    expected.documents = found.documents = [torch.arange(2.0)]
    check(found, expected)


def checkpointed(model: Any, reentrant: bool) -> None:
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})


class Lightning(nn.Module):
    """A module of the user's around the model, which hands everything on."""

    def __init__(self, inner: Any):
        super().__init__()
        self.inner, self.config = inner, inner.config

    def forward(self, **batch: Any) -> Any:
        return self.inner(**batch)


def around_a_thin_subclass(model: Any) -> Any:
    subclass(model, passes_all_on)
    return Lightning(model)


def put(model: Any, setting: Any) -> Any:
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
    Property("a module around a thin subclass", crossed(["llama", "gpt2", "bloom", "mamba"], WHEN, 1),
             around_a_thin_subclass, both, WHEN),
])  # fmt: skip
def test_an_environment(subject, case):
    subject.hold(*case)


@pytest.mark.parametrize("model_type", ["llama", "qwen2_moe", "gpt2", "bloom", "mamba", "mpt"])
def test_a_copy_of_an_enabled_subclass(model_type):
    call = call_of(model_type)
    expected = call.alone(thin(model_type))
    model = thin(model_type)
    with autopack.enable(model):
        call.packed(model)
        other = copy.deepcopy(model)
    try:
        check(call.packed(other), expected)
        check(call.padded(other), call.padded(thin(model_type)))
    finally:
        autopack.disable(other)


@pytest.mark.parametrize("model_type", ["llama", "bloom", "mamba", "qwen2_moe"])
def test_two_threads_with_two_layouts(model_type):
    """Each thread has its own documents, in one model at once."""
    call = call_of(model_type, labels=None)
    model, stock = thin(model_type), thin(model_type)
    row, batch = call.alone(stock), call.padded(stock)
    failures: list[BaseException] = []

    def run(each: Any, expected: Result) -> None:
        try:
            for _ in range(8):
                with torch.no_grad():
                    check(each(model), expected)
        except BaseException as error:
            failures.append(error)

    with autopack.enable(model):
        threads = [
            threading.Thread(target=run, args=args)
            for args in ((call.packed, row), (call.padded, batch))
            for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures, failures[0]


@pytest.fixture
def proofs(monkeypatch):
    """The models that were proven meanwhile."""
    found: list[Any] = []
    proof = prove.proof_by_twin
    monkeypatch.setattr(prove, "proof_by_twin", lambda model, *rest: (found.append(model), proof(model, *rest))[1])
    return found


def test_threads_that_call_a_copy_wait_until_one_of_them_has_proven_it(proofs):
    call, model = call_of("llama", labels=None), thin("llama")
    expected = call.alone(model)
    autopack.enable(model)
    copied = copy.deepcopy(model)
    autopack.disable(model)
    proofs.clear()
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        found = list(threads.map(call.packed, [copied] * 4))
    autopack.disable(copied)
    for result in found:
        check(result, expected)
    assert proofs == [copied]


def test_hooks_that_transformers_puts_on_for_hidden_states_are_no_change(proofs):
    model = thin("llama")
    with autopack.enable(model):
        assert len(proofs) == 1
        before = len(model.model.layers[0]._forward_hooks)
        model(input_ids=tiny.tokens(model.config, 1, 12), output_hidden_states=True)
        model(input_ids=tiny.tokens(model.config, 1, 12))
        assert len(model.model.layers[0]._forward_hooks) > before
        assert len(proofs) == 1


@pytest.mark.exhaustive
def test_a_compiled_subclass():
    torch._dynamo.reset()
    compiled = partial(torch.compile, backend="eager", dynamic=True)
    verdict(partial(thin, "llama"), call_of("llama", labels=None).both, compiled)
    torch._dynamo.reset()
