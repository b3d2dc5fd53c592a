"""Two processes under DeepSpeed share the documents of a step: it is the step as it was. Needs DeepSpeed."""

import pytest
import torch

from tests.integration.processes import found_by
from tests.steps import zero

pytest.importorskip("deepspeed")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return found_by("tests.steps.zero", tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("case", zero.CASES)
def test_losses_and_gradients_are_those_of_the_step_as_it_was(ranks, case):
    for rank in ranks:
        torch.testing.assert_close(rank[case]["found"], rank[case]["wanted"], rtol=1e-5, atol=0)
        assert rank[case]["slowest"] <= 1.03
    # The control: the step is cut otherwise than its batches.
    assert ranks[0][case]["parts"] != int(case[-1])
