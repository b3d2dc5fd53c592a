"""Runs that a rank makes for others leave a module's numbers, but for those that engines count
by."""

import pytest
from torch import nn

from autopack.runtime.runs import restoring_state


@pytest.mark.parametrize(
    ("name", "is_kept"),
    [
        ("tokens_seen", False),  # a router's
        ("ds_grads_remaining", True),  # of ZeRO-3: backwards of the module that are to come
        ("applied_pre_backward_ref_cnt", True),
        ("post_bwd_fn", True),
    ],
)
@pytest.mark.parametrize("before", [0, None])
def test_numbers_are_put_back_where_they_are_of_the_model(name, is_kept, before):
    module = nn.Linear(2, 2)
    setattr(module, name, before)
    with restoring_state(module):
        setattr(module, name, 3)
    assert getattr(module, name) == (3 if is_kept else before)
