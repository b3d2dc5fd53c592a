"""`num_items_in_batch`, by which trainers have a loss divide its sum: some losses do, others take
no notice of it."""

import pytest
import torch

import autopack
from autopack import tiny
from autopack.mixers import alone
from tests.engine import LENGTHS, Call, must_be_exact

HEEDING = ["llama", "reformer", "blt"]
UNHEEDING = ["xlnet", "cpmant"]
"""Types that compute their loss themselves, whatever a trainer says, and compare within a
column."""


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("model_type", [*HEEDING, *UNHEEDING])
def test_the_loss_is_what_documents_alone_have_with_it(model_type, as_tensor):
    number, heeds = 3 * sum(LENGTHS), model_type in HEEDING  # as with three micro-batches
    given = {
        "num_items_in_batch": torch.tensor(number) if as_tensor else number,
        "use_cache": False,
    }
    call = Call(given=given, shifts=heeds, reduction="sum" if heeds else "mean")
    must_be_exact(lambda: tiny.build(model_type).train(), call.row)


def test_the_auditor_finds_a_number_that_is_handed_on_to_every_share(monkeypatch):
    """Negative control: of parts of a batch each must be told its share of the number."""

    def whole(arguments, count, total):
        return {name: arguments[name] for name in arguments if name == "num_items_in_batch"}

    model = tiny.build("reformer")
    with autopack.enable(model):
        assert autopack.audit(model, modes=("default",)).exact
        monkeypatch.setattr(alone, "items_of_share", whole)
        report = autopack.audit(model, modes=("default",))
    assert "loss" in report.labels
