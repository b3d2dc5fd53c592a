"""Enabled models on CUDA, in half precision, audited in every call mode."""

import contextlib
import warnings

import pytest
import torch

import autopack
from autopack import tiny
from compat.standins import set_implementation
from compat.torch_flash import torch_kernels_as_flash_attn
from tests.engine import counted, ids

DEVICE = "cuda"
LONG = (7, 130, 1, 62)
CASES = [
    (backend, implementation, model_type)
    for backend, implementation, types in (
        ("varlen", "sdpa", "llama mistral qwen3 gpt2 deepseek_v3 llama4_text gemma3_text bert"),
        ("sdpa", "sdpa", "llama mistral"),
        ("eager", "eager", "gemma2 gpt_oss"),
        ("flex", "flex_attention", "llama gemma2 gpt_oss llama4_text"),
        ("flash", "flash_attention_2", "llama mistral qwen3 gpt2 deepseek_v3"),
    )
    for model_type in types.split()
]


def _model(model_type, implementation, dtype):
    # FlexAttention's kernels want heads of at least 16, and compile one kernel per head size.
    built = "eager" if implementation in ("flash_attention_2", "flex_attention") else implementation
    model = tiny.build(model_type, attn_implementation=built, dtype=dtype, device=DEVICE)
    set_implementation(model, implementation)
    return model


@pytest.mark.parametrize(("backend", "implementation", "model_type"), CASES)
def test_packed_equals_alone(backend, implementation, model_type, dtype):
    kernels = torch_kernels_as_flash_attn if backend == "flash" else contextlib.nullcontext
    with kernels():
        model = _model(model_type, implementation, dtype)
        autopack.enable(model, backend=backend, verify=False)
        check(model, LONG)


def check(model, lengths):
    """Want an exact model.

    Routers of mixture models flip on half-precision ties, alone as packed, so those are held to
    influence only: that everything runs and no document moves another, wherever that is measured,
    which is not in every mode."""
    routes = any("expert" in name for name, _ in model.named_modules())
    report = autopack.audit(model, lengths=lengths, gradients=not routes)
    print(
        f"{model.config.model_type} {model.dtype}: worst {report.worst:.1e}, gradient "
        f"{report.worst_gradient:.1e}"
    )
    measured = [result.worst_influence for result in report.results if result.influence is not None]
    assert measured
    if routes:
        assert all(result.failure is None for result in report.results), str(report)
        assert all(influence <= report.tolerance for influence in measured), str(report)
    else:
        assert report.exact, str(report)


def packed(*lengths):
    """A row of documents of these lengths, on the device."""
    return {
        "input_ids": ids(lengths=lengths).to(DEVICE),
        "position_ids": counted(lengths).to(DEVICE),
    }


def test_stock_leaks_on_the_same_rows(dtype):
    model = tiny.build("llama", attn_implementation="sdpa", dtype=dtype, device=DEVICE)
    report = autopack.audit(
        model, lengths=LONG, modes=("default", "all-ones mask"), gradients=False
    )
    assert report.worst > 0.5


def test_auto_chooses_varlen_in_half_precision_and_sdpa_in_float32():
    for dtype, kernel in (
        (torch.bfloat16, "_flash_attention_forward"),
        (torch.float32, "scaled_dot_product"),
    ):
        model = tiny.build("llama", attn_implementation="sdpa", dtype=dtype, device=DEVICE)
        autopack.enable(model)
        row = packed(15, 25)
        with torch.profiler.profile() as profile:
            model(**row)
        names = {event.key for event in profile.key_averages()}
        assert any(kernel in name for name in names), names


def test_a_packed_forward_syncs_with_the_host_once():
    model = tiny.build(
        "llama",
        attn_implementation="sdpa",
        dtype=torch.bfloat16,
        device=DEVICE,
        num_hidden_layers=6,
    )
    autopack.enable(model)
    rows = {name: value.repeat(2, 1) for name, value in packed(15, 25).items()}
    model(**rows)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model(**rows)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    syncs = [w for w in caught if "synchronizing" in str(w.message)]
    assert len(syncs) <= 1, [f"{w.filename}:{w.lineno}" for w in syncs]


def test_compiled_model_is_exact_over_layouts():
    model = tiny.build("llama", attn_implementation="sdpa", dtype=torch.bfloat16, device=DEVICE)
    autopack.enable(model)
    compiled = torch.compile(model)
    for lengths in ((20, 44), (1, 30, 33), (10, 10, 20, 24), (5, 6, 7, 8, 38)):
        row = packed(*lengths)
        found, expected = compiled(**row).logits, model(**row).logits
        # Inductor fuses and so rounds otherwise than eager kernels: a few bf16 roundings of the
        # logits' scale.
        assert (found - expected).abs().max() / expected.float().std() < 0.1
