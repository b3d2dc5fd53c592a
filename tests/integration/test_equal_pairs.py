"""Every pair of a step counts alike, over micro-batches and processes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("trl")
from tests.integration import equal_pairs

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this torch has no gloo")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return equal_pairs.run(tmp_path_factory.mktemp("ranks"))


@pytest.mark.exhaustive
def test_the_loss_of_a_step_is_the_mean_over_its_pairs(results):
    """Rounding of float32 leaves 1e-7; trainers log the mean over processes, on the first."""
    first = results[0]
    assert any(len({*sizes}) > 1 for sizes in first["sizes"])
    assert first["weighed"] == pytest.approx(first["alone"], abs=1e-5)
    means_of_means = np.array(first["stock"])
    assert np.abs(means_of_means - first["alone"]).max() > 1e-3, "control"
