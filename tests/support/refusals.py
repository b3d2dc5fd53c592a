"""Errors of autopack by their codes."""

from contextlib import contextmanager

import pytest
import torch

import autopack
from autopack import AutopackError, tiny
from tests.engine import counted


@contextmanager
def refused(*codes, match=None):
    """Require an error of autopack with one of these codes, and with words that `match`."""
    with pytest.raises(AutopackError, match=match) as caught:
        yield caught
    assert caught.value.code in codes, str(caught.value)


@contextmanager
def refused_before_any_token(model, code):
    """Require that a model's call is refused before it has computed anything.

    It is not audited, for that would compute tokens itself.
    """
    computed = []
    model.get_input_embeddings().register_forward_pre_hook(lambda *given: computed.append(given))
    with autopack.enable(model, verify=False), refused(code):
        yield
    assert not computed


def refused_by_its_first_call(model, trains=False, lengths=(5, 9), **options):
    """Require that a model is refused, when enabled or called; return the message."""
    # weights on disk run on the CPU
    device = "cpu" if model.device.type == "meta" else model.device
    ids = tiny.tokens(model.config, 1, sum(lengths)).to(device)
    where = counted(lengths).to(device)
    given = {"labels": ids} if trains else {}
    model.train(trains)
    with (
        pytest.raises(AutopackError) as caught,
        torch.set_grad_enabled(trains),
        autopack.enable(model, **options),
    ):
        model(input_ids=ids, position_ids=where, **given)
    return str(caught.value)
