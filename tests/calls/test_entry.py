"""The entry: all declarations give the same outputs and losses, unpacked calls pass untouched, the
rest is refused."""

from __future__ import annotations

import copy
import inspect
import itertools
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from transformers import DynamicCache

import autopack
from autopack.calls import hooks
from autopack.runtime import scope
from tests.conftest import (
    FLOAT64,
    LENGTHS,
    OTHER_LENGTHS,
    alone,
    error,
    llama,
    positions,
    token_ids,
)
from tests.engine import Call, declared, must_be_exact
from tests.support.refusals import refused, refused_before_any_token
from tests.support.trained import checkpointed

IDS = token_ids()
COLUMNS = sum(LENGTHS)
WHERE, ONES = positions(LENGTHS), torch.ones_like(IDS)
FORMS = ("position_ids", "cu_seq_lens", "seq_idx", "segments")


@pytest.fixture(scope="module")
def stock():
    return llama()


@pytest.fixture
def model():
    model = llama()
    with autopack.enable(model):
        yield model


@pytest.mark.parametrize("count", [1, 2, 4])
def test_all_declarations_give_what_documents_have_alone(count):
    """No document predicts the first token of the next, either."""
    for forms in itertools.combinations(FORMS, count):
        must_be_exact(llama, Call(form="+".join(forms), lengths=LENGTHS).row)


CALLS = {
    "positional": lambda model: model(IDS, ONES, WHERE),
    "embeddings": lambda model: model(
        inputs_embeds=model.get_input_embeddings()(IDS), position_ids=WHERE
    ),
    "empty cache": lambda model: model(
        input_ids=IDS, position_ids=WHERE, past_key_values=DynamicCache()
    ),
    "tuple": lambda model: model(input_ids=IDS, position_ids=WHERE, return_dict=False),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_packed_rows_are_exact_however_the_model_is_called(model, stock, call):
    (logits,) = call(model)[:]  # and no cache
    assert error(logits, alone(stock, IDS, LENGTHS)) <= FLOAT64


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ((LENGTHS, OTHER_LENGTHS), {"position_ids": positions(LENGTHS, OTHER_LENGTHS)}),
        ((LENGTHS, OTHER_LENGTHS), declared(None, "cu_seq_lens", (*LENGTHS, *OTHER_LENGTHS))),
        ((LENGTHS, LENGTHS), {"position_ids": WHERE}),
    ],
    ids=["positions", "bounds", "one row of positions for all"],
)
def test_rows_may_have_different_documents(model, stock, rows, said):
    ids = token_ids(rows=2)
    assert error(model(input_ids=ids, **said).logits, alone(stock, ids, *rows)) <= FLOAT64


class TestUnpackedCalls:
    """A call that packs nothing gives the very bits that it gives without autopack."""

    @pytest.mark.parametrize("implementation", ["sdpa", "eager"])
    def test_are_bit_identical(self, implementation):
        enabled, stock = llama(implementation, torch.float32), llama(implementation, torch.float32)
        ids, mask = token_ids(3, 10), torch.ones(3, 10, dtype=torch.long)
        mask[0, :4] = mask[2, 8:] = 0
        calls = [
            {},
            {"attention_mask": torch.ones_like(mask)},
            {"attention_mask": mask},
            {
                "attention_mask": mask,
                "position_ids": (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1),
            },
            {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clip(min=0)},
            {"position_ids": torch.arange(10)[None], "labels": ids},
            {"attention_mask": torch.ones(10, 10, dtype=torch.bool).tril().expand(3, 1, 10, 10)},
            {"past_key_values": DynamicCache(), "use_cache": True},
        ]
        with autopack.enable(enabled):
            for call in calls:
                call = {**call, "output_hidden_states": True}
                found, expected = (
                    m(input_ids=ids, **copy.deepcopy(call)) for m in (enabled, stock)
                )
                assert torch.equal(found.logits, expected.logits)
                assert all(map(torch.equal, found.hidden_states, expected.hidden_states))
                assert (found.past_key_values is None) == (expected.past_key_values is None)


REFUSED = {
    "a cache is wanted": ({"use_cache": True}, "cache-given"),
    "a four-dimensional mask": (
        {"attention_mask": torch.ones(1, 1, COLUMNS, COLUMNS)},
        "prepared-mask",
    ),
    "a mask of another width": ({"attention_mask": torch.ones(1, 40)}, "prepared-mask"),
    "one of four dimensions": ({"attention_mask": torch.ones(1, 1, COLUMNS, 40)}, "prepared-mask"),
    "one of whole numbers": (
        {"attention_mask": torch.ones(1, 1, COLUMNS, COLUMNS).long()},
        "prepared-mask",
    ),
    "a dict of masks": ({"attention_mask": {"full_attention": None}}, "prepared-mask"),
    "encoder states": ({"encoder_hidden_states": torch.zeros(1, 4, 64)}, "argument-of-no-document"),
    "declarations that disagree": ({"seq_idx": torch.zeros_like(IDS)}, "documents-unclear"),
    "positions that are no whole numbers": ({"position_ids": WHERE.float()}, "declaration-invalid"),
    "positions elsewhere": ({"position_ids": WHERE.to("meta")}, "declaration-invalid"),
}


@pytest.mark.parametrize(("arguments", "code"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_packed_is_refused_before_any_token_is_computed(arguments, code):
    model = llama()
    with refused_before_any_token(model, code):
        model(**{"input_ids": IDS, "position_ids": WHERE, **arguments})


def test_positions_that_only_jump_are_left_to_stock_with_a_word(model, stock, caplog):
    stretched = torch.cat([torch.arange(20), torch.arange(40, 40 + COLUMNS - 20)])[None]
    for _ in range(2):
        call = {"input_ids": IDS, "position_ids": stretched, "use_cache": False}
        assert torch.equal(model(**call).logits, stock(**call).logits)
    assert [
        r.message.partition(".")[0] for r in caplog.records if "neither go on" in r.message
    ] == ["position_ids of a call of LlamaForCausalLM neither go on by one nor begin anew"]


def test_a_cache_that_holds_tokens_is_refused(model):
    cache = model(input_ids=IDS[:, :4], use_cache=True).past_key_values
    with refused("cache-given"):
        model(input_ids=IDS, position_ids=WHERE, past_key_values=cache)


def test_positional_arguments_beyond_those_named_are_refused(model):
    with refused("positional-arguments"):
        model(IDS, None, WHERE, *[None] * 12)


# `model.forward(...)` of an enabled model is `model(...)`, at the model and at its backbone.

PACKED = {"input_ids": token_ids(), "position_ids": positions(LENGTHS)}
TYPES = ["llama", "gpt2", "mamba", "bloom", "qwen3_moe", "bert", "recurrent_gemma", "opt"]


@dataclass(frozen=True)
class Forwarded(Call):
    """`forward` is called, of the model or of a part of it."""

    part: str = ""

    def run(self, model, arguments):
        return model.get_submodule(self.part).forward(
            arguments.pop("input_ids"), **arguments, **self.given
        )


@pytest.mark.parametrize("model_type", TYPES)
def test_packed_rows_and_padded_batches(model_type):
    must_be_exact(model_type, Forwarded(given={"use_cache": False}).both)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_documents_of_the_backbone(implementation):
    must_be_exact(partial(llama, implementation), Forwarded(labels=None, part="model").row)


def test_checkpointing():
    must_be_exact("llama", Forwarded().row, checkpointed)


def test_the_signature_and_the_function_are_those_of_stock():
    model = llama()
    before, function = inspect.signature(model.forward), type(model).forward
    with autopack.enable(model):
        assert inspect.signature(model.forward) == before
        assert "forward" not in vars(model)
    assert type(model).forward is function


def test_the_forward_of_a_subclass_is_run_once_or_refused():
    """What it does before and after its own class's forward must not be done twice."""

    class Doubling(type(llama())):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            output.logits = output.logits * 2
            return output

    model, stock = llama(), llama()
    model.__class__ = stock.__class__ = Doubling
    with autopack.enable(model):
        assert error(model(**PACKED).logits, alone(stock, PACKED["input_ids"], LENGTHS)) < FLOAT64
        with refused("past-the-entry"):
            model.forward(**PACKED)


def test_a_call_inside_that_stays_as_it_came_leaves_the_scope_around_it():
    """A forward of one's own hands its backbone packed positions, and masks that suffice."""

    class Packing(type(llama())):
        def forward(self, input_ids):
            number = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
            unlike = number[:, None] != number[None, :]
            mask = torch.zeros(1, 1, COLUMNS, COLUMNS, dtype=self.dtype)
            mask.masked_fill_(unlike | torch.ones_like(unlike).triu(1), torch.finfo(self.dtype).min)
            mask[..., 2, 0] = torch.finfo(self.dtype).min  # a rule of its own within a document
            states = self.model(input_ids, attention_mask=mask, position_ids=WHERE[:1])
            return self.lm_head(states.last_hidden_state)

    model = llama()
    model.__class__ = Packing
    with autopack.enable(model, verify=False), torch.no_grad():
        found = model(IDS[:1])
        assert scope.ambient.activation is None
    assert error(found, model(IDS[:1])) <= FLOAT64


def test_without_the_site_it_raises(monkeypatch):
    model = llama()
    monkeypatch.setattr(hooks, "_is_past_entry", lambda *_: False)
    with autopack.enable(model), refused("past-the-entry"):
        model.model.forward(**PACKED)
