"""PEFT around an enabled model, and an enabled model inside PEFT: exact, or refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import autopack
from autopack import tiny
from tests.integration.documents import FLOAT32, LEAK, documents, packed, perturb, run_alone, run_packed
from tests.support.refusals import refused

peft = pytest.importorskip("peft")

TARGETS = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj", "v_proj"]}
METHODS = {
    "LoRA": lambda: peft.LoraConfig(r=4, **TARGETS),
    "LoRA on all linear layers and the embedding": lambda: peft.LoraConfig(
        r=4, task_type="CAUSAL_LM", target_modules=["q_proj", "o_proj", "down_proj", "embed_tokens"]
    ),
    "LoRA with a trained head": lambda: peft.LoraConfig(r=4, modules_to_save=["lm_head"], **TARGETS),
    "DoRA": lambda: peft.LoraConfig(r=4, use_dora=True, **TARGETS),
    "IA3": lambda: peft.IA3Config(feedforward_modules=[], **TARGETS),
    "VeRA": lambda: peft.VeraConfig(r=4, **TARGETS),
    "OFT": lambda: peft.OFTConfig(oft_block_size=4, **TARGETS),
    # Its regularisation is added once per call, and documents alone are several calls.
    "AdaLoRA": lambda: peft.AdaLoraConfig(init_r=4, total_step=10, orth_reg_weight=1e-12, **TARGETS),
}
PROMPTS = {
    "prompt tuning": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "p-tuning": lambda: peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "prefix tuning": lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
}
BEYOND_THE_TOKEN = {
    "LILY": lambda: peft.LilyConfig(r=4, **TARGETS),
    "ADAPTION_PROMPT": lambda: peft.AdaptionPromptConfig(task_type="CAUSAL_LM", adapter_len=3, adapter_layers=1),
    "SHADOW": lambda: peft.ShadowConfig(task_type="CAUSAL_LM"),
    "activated LoRA": lambda: peft.LoraConfig(r=4, alora_invocation_tokens=[9, 8], **TARGETS),
    "VeLoRA": lambda: peft.LoraConfig(r=4, velora_config=peft.VeloraConfig(), **TARGETS),
}


def _config(make: Callable[[], Any]) -> Any:
    try:
        return make()
    except (AttributeError, TypeError) as error:
        pytest.skip(f"peft {peft.__version__} lacks it: {error}")


def _llama(**options: Any) -> Any:
    return tiny.build("llama", attn_implementation="sdpa", **options)


def _enable_before(config: Any) -> Any:
    model = _llama()
    autopack.enable(model)
    return peft.get_peft_model(model, config)


def _enable_after(config: Any) -> Any:
    model = peft.get_peft_model(_llama(), config)
    autopack.enable(model)
    return model


ORDERS = {"enabled before": _enable_before, "enabled after": _enable_after}


@pytest.fixture(params=ORDERS.values(), ids=ORDERS)
def wrap(request: pytest.FixtureRequest) -> Callable[[Any], Any]:
    return request.param


@pytest.mark.parametrize("method", METHODS)
def test_documents_of_a_packed_row_get_the_logits_loss_and_gradients_that_they_get_alone(method, wrap):
    model = wrap(_config(METHODS[method]))
    perturb(model)
    texts = documents(model.config)
    found, wanted = run_packed(model, texts), run_alone(model, texts)
    assert wanted.gradients, "the adapter must be trained"
    assert found.error(wanted) < FLOAT32


@pytest.mark.parametrize("method", ["LoRA", "AdaLoRA"])
def test_without_autopack_they_leak(method):
    model = peft.get_peft_model(_llama(), METHODS[method]())
    perturb(model)
    texts = documents(model.config)
    assert run_packed(model, texts).error(run_alone(model, texts)) > LEAK


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_lora_is_exact_with_gradient_checkpointing_switched_on_through_the_wrapper(wrap, reentrant):
    model = wrap(METHODS["LoRA"]()).train()
    perturb(model)
    texts = documents(model.config)
    wanted = run_alone(model, texts)
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert run_packed(model, texts).error(wanted) < FLOAT32


def test_a_mixed_peft_model_is_exact():
    mixed = peft.get_peft_model(_llama(), METHODS["LoRA"](), mixed=True)
    mixed.add_adapter("other", peft.LoHaConfig(r=4, **TARGETS))
    mixed.set_adapter(["default", "other"])
    perturb(mixed)
    autopack.enable(mixed)
    texts = documents(mixed.config)
    assert run_packed(mixed, texts).error(run_alone(mixed, texts)) < FLOAT32


def test_an_adapter_put_on_by_transformers_itself_is_exact():
    model = _llama()
    autopack.enable(model)
    model.add_adapter(METHODS["LoRA"]())
    perturb(model)
    texts = documents(model.config)
    assert run_packed(model, texts).error(run_alone(model, texts)) < FLOAT32


def test_an_adapter_loaded_from_disk_onto_an_enabled_model_is_exact(tmp_path):
    trained = peft.get_peft_model(_llama(), METHODS["LoRA"]())
    perturb(trained)
    trained.save_pretrained(tmp_path)
    model = _llama()
    autopack.enable(model)
    loaded = peft.PeftModel.from_pretrained(model, tmp_path, is_trainable=True)
    texts = documents(model.config)
    assert run_packed(loaded, texts).error(run_alone(trained, texts)) < FLOAT32


def test_a_merged_model_stays_enabled_and_exact(wrap):
    model = wrap(METHODS["LoRA"]())
    perturb(model, 0.3)
    texts = documents(model.config)
    adapted = run_packed(model, texts)
    merged = model.merge_and_unload().requires_grad_(True)
    assert autopack.is_enabled(merged)
    found = run_packed(merged, texts)
    assert found.error(run_alone(merged, texts)) < FLOAT32
    # Merging adds the adapter to the weights: another order of the same sums.
    torch.testing.assert_close(found.logits, adapted.logits, atol=1e-4, rtol=1e-4)
    autopack.disable(merged)
    assert not autopack.is_enabled(merged)


def test_disable_through_the_wrapper_takes_everything_back(wrap):
    model = wrap(METHODS["LoRA"]())
    perturb(model)
    assert autopack.is_enabled(model)
    autopack.disable(model)
    assert not autopack.is_enabled(model)
    assert not autopack.is_enabled(model.get_base_model())
    texts = documents(model.config)
    assert run_packed(model, texts).error(run_alone(model, texts)) > LEAK


def test_a_copy_of_an_enabled_peft_model_is_exact(wrap):
    model = wrap(METHODS["LoRA"]())
    perturb(model)
    texts = documents(model.config)
    wanted = run_alone(model, texts)
    assert run_packed(copy.deepcopy(model), texts).error(wanted) < FLOAT32


def test_unpacked_calls_and_generation_of_an_enabled_peft_model_are_those_of_stock(wrap):
    model = wrap(METHODS["LoRA"]())
    perturb(model)
    ids = tiny.tokens(model.config, 2, 9)

    def call() -> list[torch.Tensor]:
        return [model(input_ids=ids).logits, model.generate(input_ids=ids, max_new_tokens=5, do_sample=False)]

    enabled = call()
    autopack.disable(model)
    assert all(map(torch.equal, enabled, call()))


@pytest.mark.parametrize("kind", PROMPTS)
def test_enabling_a_model_with_a_learned_prompt_is_refused(kind):
    model = peft.get_peft_model(_llama(), PROMPTS[kind]())
    with refused("peft-method", match=r"adapter 'default' is P\w+: it prepends .* Use LoRA"):
        autopack.enable(model)
    model(**packed(documents(model.config)))  # and it is left as it was


@pytest.mark.parametrize("kind", PROMPTS)
def test_a_learned_prompt_on_an_enabled_model_is_refused_until_it_is_disabled(kind):
    model = _llama()
    handle = autopack.enable(model)
    with refused("peft-method", match=r"P\w+ was put on a model that autopack enabled: it prepends"):
        peft.get_peft_model(model, PROMPTS[kind]())
    texts = documents(model.config)
    assert run_packed(model, texts).error(run_alone(model, texts)) < FLOAT32, "the refusal left the model enabled"
    handle.remove()
    for parameter in model.parameters():
        parameter.requires_grad = True
    assert peft.get_peft_model(model, PROMPTS[kind]())(input_ids=texts[0]).logits.isfinite().all()


@pytest.mark.parametrize("kind", PROMPTS)
def test_a_prompt_around_a_base_model_that_is_enabled_afterwards_is_refused_at_the_call(kind):
    base = _llama()
    model = peft.get_peft_model(base, PROMPTS[kind]())
    autopack.enable(base)  # the prompt is not to be seen from here
    with refused("peft-method", match="it prepends"):
        model(**packed(documents(base.config)))
    autopack.disable(base)
    model(**packed(documents(base.config)))


def test_a_prompt_on_another_model_is_none_of_our_business():
    enabled, other = _llama(), _llama()
    autopack.enable(enabled)
    model = peft.get_peft_model(other, PROMPTS["prompt tuning"]())
    assert model(input_ids=documents(other.config)[0]).logits.isfinite().all()


@pytest.mark.parametrize("kind", BEYOND_THE_TOKEN)
def test_enabling_a_model_with_a_method_that_looks_beyond_the_token_is_refused(kind):
    model = peft.get_peft_model(_llama(), _config(BEYOND_THE_TOKEN[kind]))
    with refused("peft-method", match=r"adapter 'default' is \w+: .* acts on every token alone"):
        autopack.enable(model)


@pytest.mark.parametrize("kind", BEYOND_THE_TOKEN)
def test_a_method_that_looks_beyond_the_token_is_refused_on_an_enabled_model(kind):
    config, model = _config(BEYOND_THE_TOKEN[kind]), _llama()
    with autopack.enable(model):
        with refused("peft-method"):
            peft.get_peft_model(model, config)
        texts = documents(model.config)
        assert run_packed(model, texts).error(run_alone(model, texts)) < FLOAT32, "the model is left as it was"
    peft.get_peft_model(model, config)


def test_a_second_adapter_is_judged_like_the_first():
    model = peft.get_peft_model(_llama(), METHODS["LoRA"]())
    autopack.enable(model)
    with refused("peft-method", match="activated LoRA"):
        model.add_adapter("second", _config(BEYOND_THE_TOKEN["activated LoRA"]))


def test_a_refused_adapter_put_on_by_transformers_itself_is_refused_too():
    model = _llama()
    model.add_adapter(_config(BEYOND_THE_TOKEN["activated LoRA"]))
    with refused("peft-method", match="activated LoRA"):
        autopack.enable(model)


def _rows() -> dict[str, torch.Tensor]:
    ids, mask = tiny.tokens(_llama().config, 3, 9), torch.ones(3, 9, dtype=torch.long)
    mask[1, 5:] = mask[2, 7:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def _named() -> tuple[Any, dict[str, Any]]:
    model = peft.get_peft_model(_llama(), peft.LoraConfig(r=4, init_lora_weights=False, **TARGETS)).eval()
    model.add_adapter("other", peft.LoraConfig(r=4, init_lora_weights=False, **TARGETS))
    return model, {"adapter_names": ["default", "other", "__base__"]}


def _numbered() -> tuple[Any, dict[str, Any]]:
    config = peft.PolyConfig(r=4, n_tasks=3, n_skills=2, n_splits=2, init_weights=False, **TARGETS)
    return peft.get_peft_model(_llama(), config).eval(), {"task_ids": torch.tensor([0, 2, 1])}


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


def test_lily_mixes_rows_of_one_batch_which_is_why_it_is_refused():
    model = peft.get_peft_model(_llama(), _config(BEYOND_THE_TOKEN["LILY"]))
    perturb(model)
    ids = tiny.tokens(model.config, 2, 9)
    other = torch.stack([ids[0], ids[1].flip(0)])
    assert (model(input_ids=ids).logits[0] - model(input_ids=other).logits[0]).abs().max() > 1e-3


def test_activated_lora_serves_the_last_invocation_of_a_row_only_which_is_why_it_is_refused():
    model = peft.get_peft_model(_llama(), _config(BEYOND_THE_TOKEN["activated LoRA"]))
    perturb(model)
    ids = tiny.tokens(model.config, 1, 20)
    ids[0, 3:5] = torch.tensor([9, 8])
    alone = model(input_ids=ids[:, :10]).logits[0]
    ids[0, 13:15] = torch.tensor([9, 8])
    assert (model(input_ids=ids).logits[0, :10] - alone).abs().max() > 1e-3


def _with_eva_weights(enables: bool) -> dict[str, torch.Tensor]:
    """The adapters of a model whose EVA weights come of padded batches, enabled before or stock's."""
    torch.manual_seed(0)
    eva = peft.EvaConfig(rho=1.0)
    config = peft.LoraConfig(r=2, init_lora_weights="eva", eva_config=eva, **TARGETS)
    model = peft.get_peft_model(_llama(), config, low_cpu_mem_usage=True)
    if enables:
        autopack.enable(model)
    batches = []
    for seed in range(4):
        ids = torch.randint(3, 100, (4, 12), generator=torch.Generator().manual_seed(seed))
        mask = (torch.arange(12) < torch.tensor([[12], [9], [7], [5]])).long()
        batches.append({"input_ids": ids * mask, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)})
    peft.initialize_lora_eva_weights(model, batches, show_progress_bar=False)
    return {name: value for name, value in model.state_dict().items() if "lora_A" in name}


def test_weights_that_eva_makes_of_what_comes_to_layers_are_those_of_stock():
    """Its hooks take tokens by the mask of the padded batch, so they get the padded form, as other hooks do."""
    if not hasattr(peft, "initialize_lora_eva_weights"):
        pytest.skip(f"peft {peft.__version__} has no EVA")
    stock, enabled = _with_eva_weights(False), _with_eva_weights(True)
    assert stock
    for name, value in stock.items():
        torch.testing.assert_close(enabled[name], value, rtol=0, atol=0)
