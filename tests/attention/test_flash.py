"""Flash attention 2, 3 and 4, through transformers' own loader and argument processing, on
stand-ins of the kernels."""

import pytest
import torch
from transformers import modeling_utils

import autopack
from autopack import tiny
from compat.standins import flash_standin, set_implementation
from tests.conftest import positions

KNOWN = {*modeling_utils.ALL_ATTENTION_FUNCTIONS}
VERSIONS = ["flash_attention_2", "flash_attention_3", "flash_attention_4"]


@pytest.mark.parametrize("implementation", VERSIONS)
@pytest.mark.parametrize(
    "model_type", ["llama", "mistral", "gemma2", "deepseek_v3", "gpt2", "bert"]
)
def test_packed_equals_alone_in_every_call_mode(model_type, implementation):
    if implementation not in KNOWN:
        pytest.skip(f"this transformers has no {implementation}")
    model = tiny.build(model_type)
    set_implementation(model, implementation)
    with flash_standin(implementation):
        assert not autopack.audit(model, gradients=False).exact, "negative control: stock leaks"
        autopack.enable(model, backend="flash")
        report = autopack.audit(model)
    assert report.exact, str(report)


@pytest.mark.parametrize(
    ("model_type", "implementation"),
    [("llama", "flash_attention_2"), ("gpt_oss", "flash_attention_4")],
)
def test_several_rows_with_layouts_of_their_own_are_flattened(model_type, implementation):
    """Sinks reach flash attention 4."""
    if implementation not in KNOWN:
        pytest.skip(f"this transformers has no {implementation}")
    model = tiny.build(model_type)
    call = {
        "input_ids": tiny.tokens(model.config, 3, 24),
        "position_ids": positions([24], [5, 19], [1, 1, 10, 12]),
    }
    autopack.enable(model)
    eager = model(**call).logits
    set_implementation(model, implementation)
    with flash_standin(implementation):
        flash = model(**call).logits
    # Two orders of float32 matrix products.
    torch.testing.assert_close(flash, eager, atol=2e-5, rtol=1e-4)
