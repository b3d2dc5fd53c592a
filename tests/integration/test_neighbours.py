"""A sample of compat.neighbours, and what an audit must leave as the neighbours had it."""

import pytest
import torch

import autopack
from autopack import tiny
from compat.neighbours import __main__ as neighbours
from compat.neighbours.measure import Scenario, llama, measure, wrapping
from tests.integration.documents import measured_exact

pytestmark = pytest.mark.usefixtures("nothing_left_behind")
SAMPLE = (
    "cpu_offload",
    "layers on disk",
    "deepcopy",
    "save_on_cpu",
)


@pytest.mark.parametrize("name", SAMPLE)
def test_a_neighbour_is_exact(name):
    scenario = next(each for key, each in neighbours.scenarios().items() if name in key)
    pytest.importorskip(scenario.neighbour)
    for order in scenario.orders:
        measured_exact(scenario, order)


def test_a_neighbour_that_mixes_documents_is_found():
    """The negative control: what is compared is what the enabled model gives, packed and padded."""

    def mixing(model):
        if autopack.is_enabled(model):
            model.register_forward_hook(_mixed)
        return model

    scenario = Scenario("mixing", "a mean over the row", wrapping(mixing))
    row = measure(scenario, "before")
    assert row["packed"]["status"] in ("LEAKS", "refused")
    assert row["padded"]["status"] == "other numbers"
    assert "padded other numbers" in neighbours.wrong("", {"before": row})


def _mixed(module, args, output):
    output.logits = output.logits + output.logits.mean(dim=1, keepdim=True)
    return output


def test_the_record_and_its_page_are_up_to_date():
    assert neighbours.STUDY.stale() == []


def _hooks_of_opacus():
    """What counts forwards as Opacus's `GradSampleModule` does; its class says that it is of that
    package."""

    class GradSampleModule(torch.nn.Module):
        hooks_enabled = True

        def count(self, module, args, output):
            if self.hooks_enabled and torch.is_grad_enabled():
                module.weight.forwards = getattr(module.weight, "forwards", 0) + 1

    GradSampleModule.__module__ = "opacus.grad_sample"
    return GradSampleModule()


def test_an_audit_is_not_counted_by_opacus():
    model, hooks = llama().train(), _hooks_of_opacus()
    layer = model.model.layers[0].mlp.down_proj
    layer.register_forward_hook(hooks.count)
    with autopack.enable(model):
        ids = tiny.tokens(model.config, 1, 9)
        model(input_ids=ids, position_ids=torch.arange(9)[None] % 5, labels=ids).loss.backward()
    assert layer.weight.forwards == 1
    assert hooks.hooks_enabled


def test_bitsandbytes_packs_no_weights_in_an_audit():
    """Its 4-bit layers pack them in evaluation, where the CPU has AVX512-BF16, and pass no
    gradients on after that."""

    class Linear4bit(torch.nn.Linear):
        support_avx512bf16_for_cpu, packed = True, False

        def forward(self, x):
            if self.__dict__["support_avx512bf16_for_cpu"] and not self.training:
                self.packs.append(True)
            return super().forward(x)

    model = llama().train()
    layer = model.model.layers[0].mlp.down_proj
    layer.__class__, layer.packs = Linear4bit, []
    layer.support_avx512bf16_for_cpu = True
    with autopack.enable(model) as handle:
        assert "on a tiny copy of it" in handle.verified
        assert layer.packs == []
        assert layer.support_avx512bf16_for_cpu is True
        model.eval()(input_ids=tiny.tokens(model.config, 1, 5))
        assert layer.packs, "evaluation is the user's"
