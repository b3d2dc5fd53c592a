"""Through the packages' own kernels, interpreted on a CPU: packed rows get what their documents get
alone."""

import pytest

from compat.kernels.__main__ import EXACT, run
from compat.kernels.cells import ATTENTION, CELLS, LIGER, MIXERS

WHOLE = {
    "scans and convolutions": [
        n for n, cell in MIXERS.items() if not any("chunk" in k for k in cell.kernels)
    ],
    "mamba2": ["mamba2"],
    "delta rule": ["qwen3_next"],
    "kimi delta rule": ["kimi_linear"],
    "flash-attn": ["llama", "bert"],
    "Liger": ["llama, Liger applied before"],
}
"""Types that share a process, with rows of their full length: each kernel once."""
_OTHERS = [name for name in CELLS if not any(name in group for group in WHOLE.values())]
OTHERS = {f"{part} of 4": _OTHERS[part::4] for part in range(4)}
"""All others, with fewer tokens. `python -m compat.kernels` runs all of them whole, for a quarter
of an hour."""


@pytest.mark.parametrize("group", [*WHOLE, *OTHERS])
def test_packed_equals_alone(group):
    names = {**WHOLE, **OTHERS}[group]
    measured = run(names, *["--short"] * (group in OTHERS))
    assert [found["type"] for found in measured] == names
    for found in measured:
        name = found["type"]
        assert found["logits"] < EXACT, found
        assert found["gradients"] < EXACT, found
        assert found["padded"] < EXACT, found
        assert found["one document"] > 1e-2, f"{name}: as one document, the row would give the same"
        missing = [kernel for kernel in CELLS[name].kernels if kernel not in found["kernels"]]
        assert not missing, f"{name}: {missing} did not run, but {sorted(found['kernels'])}"
        # Kernels are no third-party code, since they are as their packages have them. But Liger's
        # (`worker`); and transformers builds no model with flash-attn on a CPU, so that there is no
        # twin of one here.
        assert name in {*LIGER, *ATTENTION} or "third-party code" not in found["verified"], found


@pytest.mark.parametrize("name", ["mamba2", "qwen3_next", "kimi_linear", "lfm2"])
def test_kernels_that_cannot_be_told_are_fed_one_document_per_row(name):
    (found,) = run([name], "--short", "--blind")
    assert found["logits"] < EXACT, found
    assert found["gradients"] < EXACT, found
    assert found["one document"] > 1e-2
    assert "causal_conv1d_fwd" in found["kernels"]
    assert "causal_conv1d with seq_idx" not in found["kernels"], found
