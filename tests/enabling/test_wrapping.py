"""What `enable` finds: models inside modules of the user's, and the models of trainers."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import nn
from transformers import TextClassificationPipeline

import autopack
from autopack import tiny
from tests.conftest import attributes, llama, positions, same, token_ids
from tests.support.padded import batch, mask_of
from tests.support.refusals import refused

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


class Holder(nn.Module):
    """A module of the user's, as a Lightning module is one."""

    def __init__(self, **models):
        super().__init__()
        self.layers = nn.ModuleDict(models)


def trainer(tmp_path, **more):
    pytest.importorskip("accelerate")
    arguments = transformers.TrainingArguments(output_dir=str(tmp_path), report_to=[], use_cpu=True)
    found = transformers.Trainer(model=llama(), args=arguments)
    for name, value in more.items():
        setattr(found, name, value)
    return found


HOLDERS = {
    "deep inside": lambda model: Holder(
        inner=Holder(wrapped=nn.Sequential(model)), other=nn.Linear(2, 2)
    ),
    "held twice": lambda model: Holder(one=model, other=nn.Sequential(model)),
    "an object": lambda model: SimpleNamespace(
        body=Holder(one=model), head=nn.Linear(2, 2), same=model, device="cpu"
    ),
    "compiled": torch.compile,
    "a pipeline": lambda model: TextClassificationPipeline(
        model=model, tokenizer=None, task="text-classification"
    ),
}


@pytest.mark.parametrize("hold", HOLDERS.values(), ids=HOLDERS)
def test_the_one_model_of_what_holds_it_is_found(hold):
    model = tiny.build("llama", task="sequence-classification")
    holder = hold(model)
    with autopack.enable(holder) as handle:
        assert handle.model is model
        assert autopack.is_enabled(holder)
        assert autopack.is_enabled(model)
        assert autopack.enable(model).enabled is handle.enabled
    assert not autopack.is_enabled(holder)
    autopack.enable(holder)
    autopack.disable(holder)
    assert not autopack.is_enabled(model)


def test_all_models_of_a_trainer_are_enabled_and_disabled(tmp_path):
    policy = trainer(
        tmp_path, ref_model=Holder(inside=llama()), reward_funcs=[len, tiny.build("gpt2")]
    )
    models = [policy.model, policy.ref_model.layers["inside"], policy.reward_funcs[1]]
    handle = autopack.enable(policy, unpad=False)
    assert list(handle.models) == ["model", "ref_model", "reward_funcs[1]"]
    assert [h.model for h in handle.models.values()] == models
    assert not any(h.enabled.options.unpad for h in handle.models.values())
    assert autopack.is_enabled(policy)
    assert "\n  ref_model: enabled, exact, no call yet\n    model:" in repr(handle)
    again = autopack.enable(policy)
    assert [h.enabled for h in again.models.values()] == [h.enabled for h in handle.models.values()]
    autopack.disable(policy)
    assert not any(map(autopack.is_enabled, models))
    with autopack.enable(policy):
        assert all(map(autopack.is_enabled, models))
    assert not any(map(autopack.is_enabled, models))


def test_a_reference_model_that_cannot_be_enabled_is_refused_and_nothing_is_changed(tmp_path):
    """It sees the same batches as the policy: one of the two enabled would be a silent
    difference."""
    policy = trainer(tmp_path, ref_model=tiny.build("falcon", alibi=True))
    before = attributes(policy.model)
    with refused("cannot-be-packed", match="FalconForCausalLM"):
        autopack.enable(policy)
    assert same(attributes(policy.model), before)
    with autopack.enable(policy.model):
        with refused("cannot-be-packed"):
            autopack.enable(policy)
        assert autopack.is_enabled(policy.model), "what was enabled before stays so"


def test_a_reward_model_that_cannot_be_enabled_is_left_alone_and_named(tmp_path):
    policy = trainer(tmp_path, reward_funcs=[tiny.build("falcon", alibi=True)])
    with autopack.enable(policy) as handle:
        assert list(handle.models) == ["model"]
        assert "FalconForCausalLM" in handle.left_alone["reward_funcs[0]"]
        assert "  reward_funcs[0]: left alone: FalconForCausalLM" in repr(handle)


SEVERAL = r"2 transformers models \(LlamaForCausalLM, GPT2LMHeadModel\)"
UNFIT = [
    *((lambda _, kind=kind: kind(one=llama(), other=tiny.build("gpt2")), SEVERAL)
      for kind in (Holder, SimpleNamespace)),
    *((lambda _, subject=subject: subject, None)
      for subject in (nn.Linear(2, 2), object, None, "meta-llama/Llama-3.2-1B",
                      SimpleNamespace(head=nn.Linear(2, 2)), tiny)),
    (partial(trainer, model_init=llama), "in your model_init"),
    (partial(trainer, model=nn.Linear(2, 2)), "holds no transformers model in its attribute 'model'"),
]  # fmt: skip
"""What holds several models, or none."""


@pytest.mark.parametrize(("make", "said"), UNFIT)
def test_what_holds_no_model_or_several_is_refused_with_the_way_out(make, said, tmp_path):
    with refused("which-model", match=said):
        autopack.enable(make(tmp_path))


class Pools(nn.Module):
    """A head of the user's own, which takes the mean over columns."""

    def __init__(self, backbone):
        super().__init__()
        self.backbone = backbone

    def forward(self, **batch):
        return self.backbone(**batch).last_hidden_state.mean(1)


PACKS = {"input_ids": token_ids(1, 9), "position_ids": positions((4, 5))}
AROUND = {
    "a head": (Pools, True),
    "a head in torch's wrapper": (lambda model: nn.DataParallel(Pools(model)), True),
    "torch's wrapper": (nn.DataParallel, False),
    "no forward": (lambda model: Holder(one=model), False),
    "nothing": (lambda model: model, False),
}


@pytest.mark.parametrize("name", AROUND)
@pytest.mark.parametrize("packed", [True, False])
def test_a_forward_around_the_model_is_said_not_to_be_checked(name, packed, caplog):
    wrap, said = AROUND[name]
    model = llama().model
    net = wrap(model)
    pads = {
        name: value
        for name, value in batch("causal LM", mask_of((9, 6))).items()
        if name != "labels"
    }
    with autopack.enable(net) as handle, torch.no_grad():
        for _ in range(2):
            (net if said else model)(**(PACKS if packed else pads))
        assert ("Pools.forward, which is not checked" in repr(handle)) == said
    assert len([line for line in caplog.messages if "Pools.forward runs around" in line]) == (
        said and packed
    )


class Steps(Pools):
    """A module whose training calls another method, as Lightning's does."""

    def training_step(self, batch):
        return self.backbone(**batch)


def test_a_forward_around_the_model_that_does_not_run_is_not_warned_of(caplog):
    net = Steps(llama().model)
    with autopack.enable(net), torch.no_grad():
        net.training_step(PACKS)
        assert "runs around" not in caplog.text
        net(**PACKS)
        assert (
            caplog.text.count("Pools.forward runs around")
            + caplog.text.count("Steps.forward runs around")
            == 1
        )
