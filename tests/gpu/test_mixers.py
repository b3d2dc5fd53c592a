"""Recurrent and convolutional models on CUDA, in half precision: with the kernels that are
installed, and without.

They need a CUDA device; those with kernels also `causal-conv1d`, `mamba-ssm` and
`flash-linear-attention` (`pip install causal-conv1d mamba-ssm flash-linear-attention
--no-build-isolation`), each test only what it names."""

import importlib

import pytest

import autopack
from autopack import registry, tiny
from autopack.inspection import releases
from autopack.mixers import AtOperations
from tests.gpu.test_models import DEVICE, check

# the backward of causal_conv1d refuses the strides of one token alone, in stock
LONG = (7, 130, 2, 62)
KERNELS = {
    "mamba": ("causal_conv1d", "mamba_ssm"),
    "falcon_mamba": ("causal_conv1d", "mamba_ssm"),
    "mamba2": ("causal_conv1d", "mamba_ssm"),
    "bamba": ("causal_conv1d", "mamba_ssm"),
    "nemotron_h": ("causal_conv1d", "mamba_ssm"),
    "qwen3_next": ("causal_conv1d", "fla"),
    "olmo_hybrid": ("causal_conv1d", "fla"),
    "kimi_linear": ("causal_conv1d", "fla"),
    "lfm2": ("causal_conv1d",),
}
OPERATIONS = sorted(
    {
        name
        for family in registry.families()
        for way in family.mixers.values()
        if isinstance(way, AtOperations)
        for name in way.operations
    }
)
WITHOUT = ("recurrent_gemma", "rwkv", "xlstm", "minimax", "zaya", "lfm3")


def _check(model_type, dtype):
    model = tiny.build(model_type, dtype=dtype, device=DEVICE)
    autopack.enable(model, verify=False)
    check(model, LONG)


@pytest.mark.parametrize("model_type", [*KERNELS, *WITHOUT])
def test_packed_equals_alone_with_what_is_installed(model_type, dtype):
    _check(model_type, dtype)


@pytest.mark.parametrize("model_type", KERNELS)
def test_packed_equals_alone_with_real_kernels(model_type, dtype):
    for package in KERNELS[model_type]:
        pytest.importorskip(package, reason=f"needs the package {package}")
    modeling = importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    found = {name: getattr(modeling, name) for name in OPERATIONS if hasattr(modeling, name)}
    in_torch = [
        name for name, operation in found.items() if not releases.kernel_parameters(operation)
    ]
    assert not in_torch, (
        f"{in_torch} did not find their kernels although the packages are installed"
    )
    _check(model_type, dtype)
