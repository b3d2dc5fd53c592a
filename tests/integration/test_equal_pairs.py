"""Every pair of a step counts alike, over micro-batches and processes, of which some have more pairs than others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("trl")
from tests.integration import equal_pairs

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this torch has no gloo"),
]


@pytest.fixture(scope="module", params=[2, 3], ids="{} ranks".format)
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return equal_pairs.run(tmp_path_factory.mktemp("ranks"), request.param)


def test_the_loss_of_a_step_is_the_mean_over_its_pairs(results):
    """Rounding of float32 leaves 1e-7; trainers log the mean over processes, on the first."""
    first = results[0]
    assert any(len({*sizes}) > 1 for sizes in first["sizes"]), "ranks have unequally many pairs at once"
    assert first["weighed"] == pytest.approx(first["alone"], abs=1e-5)
    assert np.abs(np.array(first["means of means"]) - first["alone"]).max() > 1e-3, "control"


def test_several_processes_train_what_one_does(results):
    one = results[0]["one"]
    assert results[0]["moved"]["losses"] == pytest.approx(one["losses"], abs=1e-5)
    untrained = equal_pairs.moved(equal_pairs.tiny.build("llama")).state_dict()
    for rank in results:
        for name, value in rank["moved"]["parameters"].items():
            torch.testing.assert_close(value, one["parameters"][name], rtol=0, atol=1e-6)
    assert max((one["parameters"][n] - v).abs().max() for n, v in untrained.items()) > 1e-4, "control: it moved"
