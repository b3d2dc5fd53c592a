"""Attention in a model's own code, as releases before 4.48 and models from elsewhere have it: found
by what it does.

One small decoder in the forms that transformers 4.44 to 4.57 has them: positions by column, tables
of rotations cut to the tokens of a call, masks of several shapes, a bias that layers hand on. No
family names any of it."""

import copy
from functools import partial

import pytest
import torch

import autopack
from autopack import registry
from autopack.mixers import RELATIVE
from autopack.registry import Family
from tests.conftest import FLOAT64, alone, alone_loss, positions, token_ids
from tests.engine import Call, check, leaks, must_be_exact, weighted
from tests.support.older_code import (
    Biased,
    ByColumns,
    ByTable,
    Forgetful,
    HandingOnToTheLoss,
    PairsForAll,
    QueriesFirst,
    Rotating,
)
from tests.support.refusals import refused, refused_by_its_first_call

ROWS = ((7, 1, 9, 3), (2, 14, 4))

FORMS = [
    ByTable,
    HandingOnToTheLoss,
    ByColumns,
    PairsForAll,
    QueriesFirst,
    Rotating,
    Biased,
]


@pytest.fixture(autouse=True, scope="module")
def of_biases():
    """The way of T5, which a family has to name: nothing in the code says that a bias is handed
    on."""
    family = Family(
        "biases",
        frozenset({"old-biased"}),
        "bias",
        mixers={"OldBiasAttention": RELATIVE},
        positions=False,
    )
    registry.register(family)
    yield
    registry._registered.remove(family)


def build(kind):
    torch.manual_seed(0)
    model = kind(kind.config_class(pad_token_id=0)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    return model.eval()


@pytest.mark.parametrize("kind", FORMS)
def test_documents_of_packed_rows_get_what_they_get_alone(kind):
    model, ids = build(kind), token_ids(len(ROWS), sum(ROWS[0]))
    row = {"input_ids": ids, "position_ids": positions(*ROWS)}
    limits = {"states": FLOAT64, "loss": FLOAT64, "gradients": 1e-8}
    result = partial(weighted, model, **limits)
    expected, loss = result(alone(model, ids, *ROWS)), alone_loss(model, ids, *ROWS)
    assert leaks(result(model(ids).logits), expected)
    with autopack.enable(model) as handle:
        assert "on a tiny copy of " in handle.verified
        check(result(model(**row).logits), expected)
        assert abs(float(model(**row, labels=ids).loss / loss) - 1) < FLOAT64
    assert leaks(result(model(ids).logits), expected)


# which takes no padding mask
@pytest.mark.parametrize("kind", [kind for kind in FORMS if kind is not PairsForAll])
def test_padded_batches_are_those_of_stock(kind):
    call = Call()
    must_be_exact(partial(build, kind), (*call.batch, (call.padded_left, call.padded_left)))


@pytest.mark.parametrize("kind", [ByTable, Rotating])
def test_without_looking_at_the_code_the_model_is_refused(kind, monkeypatch):
    monkeypatch.setattr("autopack.inspection.modules.attends_by_itself", lambda cls: False)
    with refused("cannot-be-packed", match="no place to keep documents apart"):
        autopack.enable(build(kind))


def test_where_positions_are_not_counted_anew_the_audit_refuses(monkeypatch):
    monkeypatch.setattr(
        "autopack.inspection.modules.counting_columns", lambda root, mixers: ([], [])
    )
    with refused("not-exact"):
        autopack.enable(build(ByTable))


def test_a_bias_that_is_not_handed_on_is_refused():
    refused_by_its_first_call(build(Forgetful))


class OwnAttention(torch.nn.Module):
    """Attention that the user wrote, without a mask: a batch of documents needs none, being
    causal."""

    def __init__(self, width):
        super().__init__()
        self.queries_keys_values = torch.nn.Linear(width, 3 * width, dtype=torch.float64)

    def forward(self, hidden_states, *args, **kwargs):
        parts = (
            self.queries_keys_values(hidden_states).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        )
        found = torch.nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        return found.transpose(1, 2).flatten(2), None


def llama_with(attention):
    model = autopack.tiny.build("llama", dtype=torch.float64)
    model.model.layers[1].self_attn = attention.double()
    return model


def test_a_users_attention_in_a_layer_of_llama_is_served_and_checked():
    call, model = Call(given={"use_cache": False}), llama_with(OwnAttention(64))
    must_be_exact(lambda: copy.deepcopy(model), call.row)
    with autopack.enable(model) as handle:
        assert "but for OwnAttention: its calls are checked closely" in handle.verified
        call.packed(model)
        assert handle.checked.checks == 1


def test_a_users_attention_that_nothing_can_stand_at_is_refused():
    class Inside(OwnAttention):
        """A class that is not found by its name."""

        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    refused_by_its_first_call(llama_with(Inside(64)))
