"""Enabled models on CUDA, in half precision, audited in every call mode."""

from __future__ import annotations

import contextlib
import warnings

import pytest
import torch

import autopack
from autopack import tiny
from compat.standins import set_implementation
from compat.torch_flash import torch_kernels_as_flash_attn

DEVICE = "cuda"
LONG = (7, 130, 1, 62)
CASES = [
    ("varlen", "sdpa", "llama"),
    ("varlen", "sdpa", "mistral"),
    ("varlen", "sdpa", "qwen3"),
    ("varlen", "sdpa", "gpt2"),
    ("varlen", "sdpa", "deepseek_v3"),
    ("varlen", "sdpa", "llama4_text"),
    ("varlen", "sdpa", "gemma3_text"),
    ("varlen", "sdpa", "bert"),
    ("varlen", "eager", "gpt_oss"),
    ("sdpa", "sdpa", "llama"),
    ("sdpa", "sdpa", "mistral"),
    ("eager", "eager", "gemma2"),
    ("eager", "eager", "gpt_oss"),
    ("flex", "flex_attention", "llama"),
    ("flex", "flex_attention", "gemma2"),
    ("flex", "flex_attention", "gpt_oss"),
    ("flex", "flex_attention", "llama4_text"),
    ("flash", "flash_attention_2", "llama"),
    ("flash", "flash_attention_2", "mistral"),
    ("flash", "flash_attention_2", "qwen3"),
    ("flash", "flash_attention_2", "gpt2"),
    ("flash", "flash_attention_2", "deepseek_v3"),
]


def _model(model_type: str, implementation: str, dtype: torch.dtype):
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
        # Routers of mixture models flip on half-precision ties, alone as packed, so those are held to influence only.
        report = autopack.audit(model, lengths=LONG, gradients=not routes(model))
    print(f"{backend} {model_type} {dtype}: worst {report.worst:.1e}, gradient {report.worst_gradient:.1e}")
    if routes(model):
        assert holds_apart(report), str(report)
    else:
        assert report.exact, str(report)


def routes(model: torch.nn.Module) -> bool:
    return any("expert" in name for name, _ in model.named_modules())


def holds_apart(report) -> bool:
    """Whether everything ran and no document moved another, wherever that was measured: not every mode does."""
    measured = [result.worst_influence for result in report.results if result.influence is not None]
    failed = any(result.failure is not None for result in report.results)
    return bool(measured) and not failed and all(influence <= report.tolerance for influence in measured)


@pytest.mark.parametrize("backend", ["varlen", "sdpa", "flex"])
def test_float32_reference_bounds_the_error(backend, dtype):
    """Packed in half precision is no further from the float32 model than alone in half precision, times two."""
    exact = tiny.build("llama", attn_implementation="sdpa", device=DEVICE)
    half = tiny.build("llama", attn_implementation="sdpa", dtype=dtype, device=DEVICE)
    documents = [tiny.tokens(exact.config, 1, n, seed=n).to(DEVICE) for n in LONG]
    reference = torch.cat([exact(input_ids=d, use_cache=False).logits for d in documents], dim=1)
    alone = torch.cat([half(input_ids=d, use_cache=False).logits for d in documents], dim=1)
    autopack.enable(half, backend=backend)
    positions = torch.cat([torch.arange(n, device=DEVICE) for n in LONG])[None]
    packed = half(input_ids=torch.cat(documents, dim=1), position_ids=positions).logits
    error_alone, error_packed = ((x.float() - reference).abs().max() for x in (alone, packed))
    assert error_packed <= 2 * error_alone


def test_stock_leaks_on_the_same_rows(dtype):
    model = tiny.build("llama", attn_implementation="sdpa", dtype=dtype, device=DEVICE)
    report = autopack.audit(model, lengths=LONG, modes=("default", "all-ones mask"), gradients=False)
    assert report.worst > 0.5


def test_auto_chooses_varlen_in_half_precision_and_sdpa_in_float32():
    for dtype, kernel in ((torch.bfloat16, "_flash_attention_forward"), (torch.float32, "scaled_dot_product")):
        model = tiny.build("llama", attn_implementation="sdpa", dtype=dtype, device=DEVICE)
        autopack.enable(model)
        ids = tiny.tokens(model.config, 1, 40).to(DEVICE)
        positions = torch.cat([torch.arange(15), torch.arange(25)])[None].to(DEVICE)
        with torch.profiler.profile() as profile:
            model(input_ids=ids, position_ids=positions)
        names = {event.key for event in profile.key_averages()}
        assert any(kernel in name for name in names), names


def test_a_packed_forward_syncs_with_the_host_once():
    model = tiny.build("llama", attn_implementation="sdpa", dtype=torch.bfloat16, device=DEVICE, num_hidden_layers=6)
    autopack.enable(model)
    ids = tiny.tokens(model.config, 2, 40).to(DEVICE)
    positions = torch.cat([torch.arange(15), torch.arange(25)])[None].expand(2, -1).contiguous().to(DEVICE)
    model(input_ids=ids, position_ids=positions)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model(input_ids=ids, position_ids=positions)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    syncs = [w for w in caught if "synchronizing" in str(w.message)]
    assert len(syncs) <= 1, [f"{w.filename}:{w.lineno}" for w in syncs]


def test_compiled_model_is_exact_over_layouts():
    model = tiny.build("llama", attn_implementation="sdpa", dtype=torch.bfloat16, device=DEVICE)
    autopack.enable(model)
    compiled = torch.compile(model)
    ids = tiny.tokens(model.config, 1, 64).to(DEVICE)
    for lengths in ([20, 44], [1, 30, 33], [10, 10, 20, 24], [5, 6, 7, 8, 38]):
        positions = torch.cat([torch.arange(n) for n in lengths])[None].to(DEVICE)
        found = compiled(input_ids=ids, position_ids=positions).logits
        expected = model(input_ids=ids, position_ids=positions).logits
        # Inductor fuses and so rounds otherwise than eager kernels: a few bf16 roundings of the logits' scale.
        assert (found - expected).abs().max() / expected.float().std() < 0.1
