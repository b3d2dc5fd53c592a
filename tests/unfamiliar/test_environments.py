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
from tests.unfamiliar.common import (
    DECODERS,
    IGNORED,
    LENGTHS,
    Result,
    Way,
    alternating,
    build,
    check,
    crossed,
    declared,
    exact_or_refused,
    ids,
    must_be_exact,
    subclass,
)
from tests.unfamiliar.test_losses import per_sequence, smoothed, summed
from tests.unfamiliar.test_subclasses import names_some, passes_all_on

pytestmark = pytest.mark.sampled(2)

WHEN = ("before", "after")


def way_of(model_type: str, **options: Any) -> Way:
    """The way in which a type is called, whatever it is wrapped in."""
    return Way(form="position_ids" if "position_ids" in declared(build(model_type)) else "segments", **options)


def thin(model_type: str) -> Any:
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


@pytest.mark.parametrize(("model_type", "when"), crossed(DECODERS, WHEN, 1))
def test_peft(model_type, when):
    must_be_exact(model_type, way_of(model_type).both, adapted, when)


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "qwen2_moe", "bloom"])
def test_peft_of_a_thin_subclass(model_type):
    must_be_exact(partial(thin, model_type), way_of(model_type).both, adapted)


def hooked(model: Any) -> None:
    """The hooks of accelerate on every module, as `dispatch_model` leaves them: forwards on the instances."""
    hooks = pytest.importorskip("accelerate.hooks")
    for module in model.modules():
        hooks.add_hook_to_module(module, hooks.AlignDevicesHook(execution_device="cpu"))


def prepared(model: Any) -> Any:
    accelerate = pytest.importorskip("accelerate")
    return accelerate.Accelerator(cpu=True).prepare(model)


@pytest.mark.parametrize(("model_type", "change", "when"), alternating(
    crossed(DECODERS, [hooked, prepared], 1), ["before", "before", "after", "after"]
))  # fmt: skip
def test_accelerate(model_type, change, when):
    must_be_exact(model_type, way_of(model_type).both, change, when)


@pytest.mark.parametrize("change", [hooked, prepared])
def test_accelerate_with_a_thin_subclass(change):
    must_be_exact(partial(thin, "llama"), way_of("llama").both, change)


class Documents(torch.utils.data.Dataset):
    """Examples without padding."""

    def __len__(self) -> int:
        return 2 * len(LENGTHS)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        tokens = ids(seed=index // len(LENGTHS))[0].split(LENGTHS)[index % len(LENGTHS)].tolist()
        return {"input_ids": tokens, "labels": tokens}


def pad(examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    longest = max(len(example["input_ids"]) for example in examples)

    def column(name: str, value: int) -> torch.Tensor:
        return torch.tensor([example[name] + [value] * (longest - len(example[name])) for example in examples])

    tokens = column("input_ids", 0)
    return {
        "input_ids": tokens,
        "labels": column("labels", IGNORED),
        "attention_mask": (column("labels", IGNORED) >= 0).long(),
    }


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
    "compute_loss_func": (
        transformers.Trainer,
        {"compute_loss_func": of_outputs},
    ),
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


@pytest.mark.parametrize(("model_type", "reentrant", "when"), alternating(
    crossed(DECODERS, [True, False], 1), ["before", "before", "after", "after"]
))  # fmt: skip
def test_gradient_checkpointing_of_a_thin_subclass(model_type, reentrant, when):
    if not build(model_type).supports_gradient_checkpointing:
        pytest.skip(f"{model_type} cannot checkpoint")
    must_be_exact(partial(thin, model_type), way_of(model_type).both, partial(checkpointed, reentrant=reentrant), when)


@pytest.mark.parametrize("model_type", ["llama", "qwen2_moe", "gpt2", "bloom", "mamba", "mpt"])
def test_a_copy_of_an_enabled_subclass(model_type):
    way = way_of(model_type)
    expected = way.alone(thin(model_type))
    model = thin(model_type)
    with autopack.enable(model):
        way.packed(model)
        other = copy.deepcopy(model)
    try:
        check(way.packed(other), expected)
        check(way.padded(other), way.padded(thin(model_type)))
    finally:
        autopack.disable(other)


@pytest.mark.parametrize("model_type", ["llama", "bloom", "mamba", "qwen2_moe"])
def test_two_threads_with_two_layouts(model_type):
    """Each thread has its own documents, in one model at once."""
    way = way_of(model_type, labels=None)
    model, stock = thin(model_type), thin(model_type)
    row, batch = way.alone(stock), way.padded(stock)
    failures: list[BaseException] = []

    def run(call: Any, expected: Result) -> None:
        try:
            for _ in range(8):
                with torch.no_grad():
                    check(call(model), expected)
        except BaseException as error:
            failures.append(error)

    with autopack.enable(model):
        threads = [
            threading.Thread(target=run, args=args)
            for args in ((way.packed, row), (way.padded, batch))
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
    way, model = way_of("llama", labels=None), thin("llama")
    expected = way.alone(model)
    autopack.enable(model)
    copied = copy.deepcopy(model)
    autopack.disable(model)
    proofs.clear()
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        found = list(threads.map(way.packed, [copied] * 4))
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
    exact_or_refused(partial(thin, "llama"), way_of("llama", labels=None).both, compiled)
    torch._dynamo.reset()


class Lightning(nn.Module):
    """A module of the user's around the model, which hands everything on."""

    def __init__(self, inner: Any):
        super().__init__()
        self.inner, self.config = inner, inner.config

    def forward(self, **batch: Any) -> Any:
        return self.inner(**batch)


@pytest.mark.parametrize(("model_type", "when"), crossed(["llama", "gpt2", "bloom", "mamba"], WHEN, 1))
def test_a_module_around_a_thin_subclass(model_type, when):
    def wrapped(model: Any) -> Any:
        subclass(model, passes_all_on)
        return Lightning(model)

    must_be_exact(model_type, way_of(model_type).both, wrapped, when)
