"""Two processes share the documents of a step: losses and gradient norms are those of the step as
it was."""

import pytest
import torch

from tests.integration.processes import found_by, run
from tests.steps.ranks import fails_in_the_middle

SHARED = ["ddp", "one_batch_a_step", "classes_of_documents", "the_end_of_an_epoch"]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return found_by("tests.steps.ranks", tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("case", [*SHARED, "each_rank_counts_its_own"])
def test_losses_and_gradients_are_those_of_the_step_as_it_was(ranks, case):
    for rank in ranks:
        torch.testing.assert_close(rank[case]["found"], rank[case]["wanted"], rtol=1e-5, atol=0)


def test_ranks_have_the_same_to_do_where_documents_move(ranks):
    for case in SHARED:
        assert ranks[0][case]["slowest"] <= 1.03
        assert (
            abs(ranks[0][case]["tokens"] - ranks[1][case]["tokens"])
            <= 0.03 * ranks[0][case]["tokens"]
        )
    # The control: where each rank counts its own targets, documents stay where they are.
    assert ranks[0]["each_rank_counts_its_own"]["slowest"] > 1.1


def test_gradients_of_a_sharded_model_are_those_of_a_whole_one(ranks):
    for rank in ranks:
        found = rank["fully_sharded"]
        assert found["worst"] <= 1e-5 * found["largest"]
        assert found["count"] == ranks[0]["fully_sharded"]["count"] > 1


def test_a_rank_with_less_to_do_keeps_step_with_the_others(ranks):
    found = [rank["a_rank_with_one_long_document"] for rank in ranks]
    assert [each["micro-batches"] for each in found] == [2, 2]
    assert [each["tokens"] for each in found] == [90, 45]
    assert found[1]["most"] <= 30


def test_no_rank_waits_for_one_that_cannot_cut_its_batches(ranks):
    codes = {rank["one_rank_that_cannot"] for rank in ranks}
    assert codes == {"batch-not-cut", "step-not-cut"}


def test_no_rank_waits_for_one_that_fails_in_the_middle(tmp_path):
    with pytest.raises(torch.multiprocessing.ProcessRaisedException, match="in the middle"):
        run(fails_in_the_middle, tmp_path)
    # Rank 0 was waiting for the other one's gradients of the second step, and was ended.
    assert (tmp_path / "steps").read_text() == "1"


def test_a_loss_that_raises_on_one_rank_is_refused_on_both(ranks):
    assert [rank["one_rank_whose_loss_raises"] for rank in ranks] == ["step-not-cut"] * 2
