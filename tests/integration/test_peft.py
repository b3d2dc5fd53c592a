"""PEFT around an enabled model, and an enabled model inside PEFT: exact, or refused."""

import copy
import tempfile
from functools import partial

import pytest
import torch

import autopack
from autopack import tiny
from compat.neighbours.adapters import _adapters
from compat.neighbours.measure import AFTER, BEFORE, Scenario, llama, perturb, wrapping
from tests.engine import Call, check, leaks
from tests.integration.documents import measured_exact
from tests.support.padded import batch, mask_of
from tests.support.refusals import refused
from tests.support.trained import checkpointed, with_lora

peft = pytest.importorskip("peft")

CALL = Call(form="position_ids")
TARGETS = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj", "v_proj"]}
METHODS = {name: partial(make, peft) for name, make in _adapters().items()}
PROMPTS = {name: METHODS.pop(name) for name in ("prompt tuning", "prefix tuning")}
PROMPTS["p-tuning"] = lambda: peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
METHODS |= {
    "LoRA on all linear layers and the embedding": lambda: peft.LoraConfig(
        r=4, task_type="CAUSAL_LM", target_modules=["q_proj", "o_proj", "down_proj", "embed_tokens"]
    ),
    "LoRA with a trained head": lambda: peft.LoraConfig(
        r=4, modules_to_save=["lm_head"], **TARGETS
    ),
}
BEYOND_THE_TOKEN = {
    "LILY": lambda: peft.LilyConfig(r=4, **TARGETS),
    "ADAPTION_PROMPT": lambda: peft.AdaptionPromptConfig(
        task_type="CAUSAL_LM", adapter_len=3, adapter_layers=1
    ),
    "SHADOW": lambda: peft.ShadowConfig(task_type="CAUSAL_LM"),
    "activated LoRA": lambda: peft.LoraConfig(r=4, alora_invocation_tokens=[9, 8], **TARGETS),
    "VeLoRA": lambda: peft.LoraConfig(r=4, velora_config=peft.VeloraConfig(), **TARGETS),
}
REFUSED = {**PROMPTS, **BEYOND_THE_TOKEN}


def _config(make):
    try:
        return make()
    except (AttributeError, TypeError) as error:
        pytest.skip(f"peft {peft.__version__} lacks it: {error}")


def _put_on_by_peft(make, change=lambda model: model):
    """What puts an adapter that adds something on a model, and changes what comes of it."""
    return lambda model: change(perturb(peft.get_peft_model(model, _config(make))))


def _put_on_by_transformers(model):
    model.add_adapter(METHODS["LoRA"]())
    return perturb(model)


def _loaded(model):
    """An adapter from disk."""
    with tempfile.TemporaryDirectory() as folder:
        peft.get_peft_model(llama(), METHODS["LoRA"]()).save_pretrained(folder)
        return perturb(peft.PeftModel.from_pretrained(model, folder, is_trainable=True))


def _mixed(model):
    model = peft.get_peft_model(model, METHODS["LoRA"](), mixed=True)
    model.add_adapter("other", peft.LoHaConfig(r=4, **TARGETS))
    model.set_adapter(["default", "other"])
    return perturb(model)


AFTERWARDS = {
    "merged": lambda model: model.merge_and_unload().requires_grad_(True),
    "copied": copy.deepcopy,
    "checkpointed": checkpointed,
    "checkpointed, reentrant": partial(checkpointed, reentrant=True),
}
EXACT = {
    **{method: _put_on_by_peft(make) for method, make in METHODS.items()},
    **{name: _put_on_by_peft(METHODS["LoRA"], change) for name, change in AFTERWARDS.items()},
    "put on by transformers": _put_on_by_transformers,
    "loaded": _loaded,
    "mixed": _mixed,
}
in_both_orders = pytest.mark.parametrize("order", [BEFORE, AFTER])


@in_both_orders
@pytest.mark.parametrize("name", EXACT)
def test_packed_rows_and_padded_batches_are_exact(name, order):
    scenario = Scenario("peft", name, wrapping(EXACT[name]))
    measured_exact(scenario, order, padded=("exact", "left as it came"))


@in_both_orders
def test_disable_through_the_wrapper_takes_everything_back(order):
    """Unpacked calls and generation are those of stock before that, too."""
    model = wrapping(EXACT["LoRA"])(order, autopack.enable)
    ids = tiny.tokens(model.config, 2, 9)

    def call():
        return [
            model(input_ids=ids).logits,
            model.generate(input_ids=ids, max_new_tokens=5, do_sample=False),
        ]

    enabled = call()
    autopack.disable(model)
    assert not autopack.is_enabled(model)
    assert not autopack.is_enabled(model.get_base_model())
    assert all(map(torch.equal, enabled, call()))
    assert leaks(CALL.packed(model), CALL.alone(model))


@pytest.mark.parametrize("kind", REFUSED)
def test_enabling_a_model_with_a_method_that_looks_beyond_the_token_is_refused(kind):
    model = peft.get_peft_model(llama(), _config(REFUSED[kind]))
    with refused("peft-method"):
        autopack.enable(model)
    CALL.packed(model)  # and it is left as it was


@pytest.mark.parametrize("kind", REFUSED)
def test_a_method_that_looks_beyond_the_token_is_refused_on_an_enabled_model_until_it_is_disabled(
    kind,
):
    config, model = _config(REFUSED[kind]), llama()
    handle = autopack.enable(model)
    with refused("peft-method"):
        peft.get_peft_model(model, config)
    check(CALL.packed(model), CALL.alone(llama()))  # the refusal left the model enabled
    handle.remove()
    model.requires_grad_(True)
    assert (
        peft.get_peft_model(model, config)(input_ids=tiny.tokens(model.config, 1, 7))
        .logits.isfinite()
        .all()
    )


@pytest.mark.parametrize("kind", PROMPTS)
def test_a_prompt_around_a_base_model_that_is_enabled_afterwards_is_refused_at_the_call(kind):
    base = llama()
    model = peft.get_peft_model(base, PROMPTS[kind]())
    autopack.enable(base)  # the prompt is not to be seen from here
    with refused("peft-method"):
        CALL.packed(model)
    autopack.disable(base)
    CALL.packed(model)


def test_a_second_adapter_is_judged_like_the_first():
    model = peft.get_peft_model(llama(), METHODS["LoRA"]())
    autopack.enable(model)
    with refused("peft-method"):
        model.add_adapter("second", _config(BEYOND_THE_TOKEN["activated LoRA"]))


def test_a_refused_adapter_put_on_by_transformers_itself_is_refused_too():
    model = llama()
    model.add_adapter(_config(BEYOND_THE_TOKEN["activated LoRA"]))
    with refused("peft-method"):
        autopack.enable(model)


def _rows():
    return batch("causal LM", mask_of((9, 5, 7)))


def _named():
    model = with_lora(llama(), task_type="CAUSAL_LM").eval()
    model.add_adapter("other", peft.LoraConfig(r=4, init_lora_weights=False, **TARGETS))
    return model, {"adapter_names": ["default", "other", "__base__"]}


def _numbered():
    config = peft.PolyConfig(r=4, n_tasks=3, n_skills=2, n_splits=2, init_weights=False, **TARGETS)
    return peft.get_peft_model(llama(), config).eval(), {"task_ids": torch.tensor([0, 2, 1])}


@pytest.mark.parametrize("build", [_named, _numbered])
def test_padding_stays_where_layers_are_given_something_for_each_row(build):
    torch.manual_seed(0)
    model, given = build()
    expected = model(**_rows(), **given)
    with autopack.enable(model) as handle:
        found = model(**_rows(), **given)
        assert "for each row" in str(handle.tally)
        assert torch.equal(found.logits, expected.logits)
        assert torch.equal(found.loss, expected.loss)
        if "adapter_names" in given:  # Poly has to be told
            model(**_rows())
            assert "packed inside" in str(handle.tally)


def _with_eva_weights(enables):
    """The adapters of a model whose EVA weights come of padded batches, enabled before or
    stock's."""
    torch.manual_seed(0)
    eva = peft.EvaConfig(rho=1.0)
    config = peft.LoraConfig(r=2, init_lora_weights="eva", eva_config=eva, **TARGETS)
    model = peft.get_peft_model(llama(), config, low_cpu_mem_usage=True)
    if enables:
        autopack.enable(model)
    batches = [batch("causal LM", mask_of((12, 9, 7, 5)), seed) for seed in range(4)]
    peft.initialize_lora_eva_weights(model, batches, show_progress_bar=False)
    return {name: value for name, value in model.state_dict().items() if "lora_A" in name}


def test_weights_that_eva_makes_of_what_comes_to_layers_are_those_of_stock():
    """Its hooks take tokens by the mask of the padded batch, so they get the padded form, as other
    hooks do."""
    if not hasattr(peft, "initialize_lora_eva_weights"):
        pytest.skip(f"peft {peft.__version__} has no EVA")
    stock, enabled = _with_eva_weights(False), _with_eva_weights(True)
    assert stock
    for name, value in stock.items():
        torch.testing.assert_close(enabled[name], value, rtol=0, atol=0)
