"""Enabling and disabling: what changes, what is put back, and what never changes."""

from __future__ import annotations

import copy
import gc
import io
import json
import pickle
import subprocess
import sys
import textwrap

import pytest
import torch
from transformers import masking_utils, modeling_utils

import autopack
from autopack import patching, tiny

LENGTHS = (7, 12, 5, 9)


def _row(model, seed=0):
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    return {"input_ids": tiny.tokens(model.config, 1, sum(LENGTHS), seed=seed), "position_ids": positions}


def _alone(model, row):
    return torch.cat([model(input_ids=d, use_cache=False).logits for d in row["input_ids"].split(LENGTHS, 1)], dim=1)


def _registered():
    """Everything of transformers that enabling may touch, by identity."""
    from transformers.models.llama import modeling_llama

    found = {("attention", k): v for k, v in modeling_utils.AttentionInterface._global_mapping.items()}
    found |= {("mask", k): v for k, v in masking_utils.AttentionMaskInterface._global_mapping.items()}
    found["preprocess"] = masking_utils._preprocess_mask_arguments
    found["eager"] = modeling_llama.eager_attention_forward
    return found


def _state(model):
    """Hooks, attributes and config fields of every module."""
    modules = []
    for module in model.modules():
        plain = {k: v for k, v in vars(module).items() if not k.startswith(("_forward", "_parameters", "_buffers"))}
        modules.append((list(module._forward_hooks), list(module._forward_pre_hooks), plain))
    return modules, dict(model.config.to_dict()), model.config._attn_implementation


def _same(before, after):
    assert before.keys() == after.keys()
    assert all(before[name] is after[name] for name in before)


@pytest.fixture(autouse=True)
def no_models_of_earlier_tests():
    gc.collect()  # a model that was enabled and dropped leaves its sites when it is collected


@pytest.fixture
def model():
    return tiny.build("llama", attn_implementation="sdpa")


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_disable_restores_everything_by_identity(implementation):
    model = tiny.build("llama", attn_implementation=implementation)
    model.gradient_checkpointing_enable()
    registered, state = _registered(), _state(model)
    handle = autopack.enable(model)
    assert any(registered[name] is not value for name, value in _registered().items())
    model.train()(**_row(model)).logits.sum().backward()
    model.eval()
    handle.remove()
    model.zero_grad()
    _same(registered, _registered())
    assert _state(model) == state
    assert not patching._installed


def test_disable_restores_after_an_exception_in_the_middle_of_a_forward(model, monkeypatch):
    registered = _registered()
    autopack.enable(model)

    def fail(*args, **kwargs):
        raise RuntimeError("in the middle")

    monkeypatch.setattr(model.model.layers[1].mlp, "forward", fail)
    with pytest.raises(RuntimeError, match="in the middle"):
        model(**_row(model))
    monkeypatch.undo()
    with pytest.raises(autopack.OutsideForward):  # the scope of the failed call is closed
        model.model.layers[0].self_attn(torch.zeros(1, 3, 64), (torch.zeros(1, 3, 16), torch.zeros(1, 3, 16)))
    autopack.disable(model)
    _same(registered, _registered())


def test_an_interrupt_leaves_no_layout_behind(model, monkeypatch):
    autopack.enable(model)
    row = _row(model)
    expected = model(**row).logits

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(model.model.layers[1].mlp, "forward", interrupt)
    other = torch.cat([torch.arange(20), torch.arange(13)])[None]
    with pytest.raises(KeyboardInterrupt):
        model(input_ids=row["input_ids"], position_ids=other)
    monkeypatch.undo()
    assert torch.equal(model(**row).logits, expected)
    backbone = model.model(**row).last_hidden_state
    assert torch.equal(model.lm_head(backbone), expected)


def test_a_failed_enable_changes_nothing():
    model = tiny.build("lfm2", attn_implementation="sdpa")
    model.config.model_type = "an_unknown_type"
    registered, state = _registered(), _state(model)
    with pytest.raises(
        autopack.UnsupportedModel, match=r"audited it, and it is not exact.*The model is left as it was"
    ):
        autopack.enable(model)
    _same(registered, _registered())
    assert _state(model) == state
    assert not autopack.is_enabled(model)


def test_an_unknown_type_of_the_same_structure_is_audited_and_served(model):
    model.config.model_type = "remote_code_llama"
    handle = autopack.enable(model)
    assert "audit of this very model" in repr(handle)
    assert torch.equal(model(**_row(model)).logits, _alone(model, _row(model)))


def test_enable_twice_returns_the_same_handle_and_refuses_another_backend(model):
    handle = autopack.enable(model)
    assert autopack.enable(model) is handle
    with pytest.raises(ValueError, match=r"enabled with backend='auto'.*disable"):
        autopack.enable(model, backend="eager")


def test_handle_is_a_context_manager_and_says_what_was_done(model):
    with autopack.enable(model) as handle:
        assert autopack.is_enabled(model)
        assert all(word in repr(handle) for word in ("LlamaForCausalLM (llama)", "enabled", "sdpa", "2 modules"))
        assert "<table>" in handle._repr_html_()
    assert not autopack.is_enabled(model)
    assert "disabled" in repr(handle)
    autopack.disable(model)  # a second time does nothing


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_another_model_in_the_process_is_bit_identical_before_during_and_after(implementation):
    mine, other = (tiny.build("llama", attn_implementation=implementation, seed=s) for s in (0, 1))
    calls = [_row(other), {"input_ids": _row(other)["input_ids"]}, {**_row(other), "use_cache": False}]
    before = [other(**call).logits for call in calls]
    autopack.enable(mine)
    mine(**_row(mine))
    during = [other(**call).logits for call in calls]
    autopack.disable(mine)
    after = [other(**call).logits for call in calls]
    for b, d, a in zip(before, during, after, strict=True):
        assert torch.equal(b, d)
        assert torch.equal(b, a)


def test_disabling_one_of_two_models_leaves_the_other_enabled():
    one, two = (tiny.build("llama", attn_implementation="sdpa", seed=s) for s in (0, 1))
    autopack.enable(one)
    autopack.enable(two)
    autopack.disable(one)
    assert torch.equal(two(**_row(two)).logits, _alone(two, _row(two)))
    assert not torch.equal(one(**_row(one)).logits, _alone(one, _row(one)))


def test_generate_gives_the_same_tokens(model):
    ids = tiny.tokens(model.config, 2, 6)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    call = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    before = model.generate(**call)
    with autopack.enable(model):
        assert torch.equal(model.generate(**call), before)


def test_a_padded_batch_passes_untouched(model):
    ids = tiny.tokens(model.config, 2, 8)
    for mask in ([[1] * 8, [1] * 5 + [0] * 3], [[1] * 8, [0] * 3 + [1] * 5], [[1] * 8, [1, 1, 0, 0, 1, 1, 1, 1]]):
        mask = torch.tensor(mask)
        for positions in (None, (mask.cumsum(-1) - 1).clamp(min=0), torch.arange(8)[None]):
            call = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
            before = model(**call).logits
            with autopack.enable(model):
                assert torch.equal(model(**call).logits, before)


def test_copies_stay_enabled_and_are_independent(model):
    autopack.enable(model)
    row = _row(model)
    expected = model(**row).logits
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(buffer, weights_only=False)]
    for twin in copies:
        assert autopack.is_enabled(twin)
        assert torch.equal(twin(**row).logits, expected)
    autopack.disable(model)
    for twin in copies:
        assert torch.equal(twin(**row).logits, expected)
        autopack.disable(twin)
        assert not torch.equal(twin(**row).logits, expected)
    assert not patching._installed


def test_a_saved_model_is_exact_in_another_process_and_a_checkpoint_knows_nothing_of_autopack(model, tmp_path):
    autopack.enable(model)
    row = _row(model)
    torch.save(model, tmp_path / "model.pt")
    torch.save((row, model(**row).logits, model(input_ids=row["input_ids"]).logits), tmp_path / "expected.pt")
    model.save_pretrained(tmp_path / "checkpoint")
    assert "autopack" not in (tmp_path / "checkpoint" / "config.json").read_text()
    assert not [name for name in model.state_dict() if "autopack" in name]
    script = textwrap.dedent(
        """
        import sys, torch
        from transformers import AutoModelForCausalLM
        row, packed, plain = torch.load("expected.pt")
        stock = AutoModelForCausalLM.from_pretrained("checkpoint", attn_implementation="sdpa")
        assert torch.equal(stock(input_ids=row["input_ids"]).logits, plain)
        assert "autopack" not in sys.modules
        model = torch.load("model.pt", weights_only=False)
        assert torch.equal(model(**row).logits, packed)
        """
    )
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True)


def test_importing_autopack_imports_neither_torch_nor_transformers():
    script = "import sys, autopack, json; autopack.__all__; print(json.dumps(sorted(sys.modules)))"
    printed = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout
    assert not {"torch", "transformers", "numpy"} & set(json.loads(printed))


def test_every_public_name_resolves():
    assert all(getattr(autopack, name) is not None for name in autopack.__all__)
    with pytest.raises(AttributeError, match="no attribute 'pakc'"):
        autopack.pakc  # noqa: B018


def test_what_is_no_transformers_model_is_refused():
    for thing in (torch.nn.Linear(2, 2), object(), None):
        with pytest.raises(autopack.UnsupportedModel, match=r"enables transformers models.*found"):
            autopack.enable(thing)


def test_unknown_options_name_the_known_ones(model):
    with pytest.raises(ValueError, match=r"backend must be one of auto, flash, varlen, flex, sdpa, eager; found 'xla'"):
        autopack.enable(model, backend="xla")
    with pytest.raises(ValueError, match=r"verify must be one of auto, always, never; found 'maybe'"):
        autopack.enable(model, verify="maybe")


def test_a_function_put_over_ours_stops_packed_rows_instead_of_leaking(model):
    autopack.enable(model)
    mapping = modeling_utils.AttentionInterface._global_mapping
    ours = mapping["sdpa"]
    mapping["sdpa"] = lambda *args, **kwargs: ours(*args, **kwargs)
    try:
        with pytest.raises(autopack.SiteDrift, match="somebody replaced"):
            model(**_row(model))
    finally:
        mapping["sdpa"] = ours


def test_two_threads_keep_their_layouts(model):
    from concurrent.futures import ThreadPoolExecutor

    autopack.enable(model)
    ids = _row(model)["input_ids"]
    layouts = [torch.cat([torch.arange(n) for n in ns])[None] for ns in ([7, 12, 5, 9], [20, 13], [1, 2, 30], [33])]
    expected = [model(input_ids=ids, position_ids=p).logits for p in layouts]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda p: model(input_ids=ids, position_ids=p).logits, layouts * 10))
    assert all(torch.equal(f, e) for f, e in zip(found, expected * 10, strict=True))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_verification_works_where_gradients_are_off(model, mode):
    with mode():
        handle = autopack.enable(model, verify="always")
    assert "audit of this very model" in repr(handle)
