"""The entry: all declarations give the same outputs and losses, unpacked calls pass untouched, the rest is refused."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache, LlamaConfig, LlamaForTokenClassification

import autopack
from autopack import InvalidPacking, UnsupportedModel, tiny
from autopack.calls import choose
from tests.conftest import (
    FLOAT64,
    LEAK,
    LENGTHS,
    OTHER_LENGTHS,
    alone,
    alone_loss,
    error,
    gradient_error,
    gradients,
    llama,
    positions,
    token_ids,
)
from tests.support.refusals import refused

pytestmark = pytest.mark.usefixtures("nothing_left_behind")
FLOAT32_LOSS = 1e-6
"""transformers computes the loss in float32 whatever the model's dtype; seven digits are left."""
IDS = token_ids()
COLUMNS = sum(LENGTHS)
SEQ_IDX = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))[None]
BOUNDS = torch.tensor([0, *itertools.accumulate(LENGTHS)], dtype=torch.int32)
SPANS = list(itertools.pairwise(BOUNDS.tolist()))
DECLARATIONS = {
    "positions": {"position_ids": positions(LENGTHS)},
    "bounds": {"cu_seq_lens_q": BOUNDS, "cu_seq_lens_k": BOUNDS, "max_length_q": 12, "max_length_k": 12},
    "seq_idx": {"seq_idx": SEQ_IDX.int()},
    "segments": {"attention_mask": SEQ_IDX + 1},
}


@pytest.fixture(scope="module")
def stock():
    return llama()


@pytest.fixture
def model():
    model = llama()
    with autopack.enable(model):
        yield model


@pytest.mark.parametrize("count", [1, 2, 4])
def test_all_declarations_give_the_logits_of_the_documents_alone(model, stock, count):
    expected = alone(stock, IDS, LENGTHS)
    for names in itertools.combinations(DECLARATIONS, count):
        arguments = {k: v for name in names for k, v in DECLARATIONS[name].items()}
        assert error(model(input_ids=IDS, **arguments).logits, expected) <= FLOAT64, names


def test_stock_leaks_on_every_declaration(stock):
    expected = alone(stock, IDS, LENGTHS)
    for arguments in DECLARATIONS.values():
        assert error(stock(input_ids=IDS, **arguments).logits, expected) > LEAK


@pytest.mark.parametrize("call", ["positional", "embeddings", "all-ones mask", "no cache", "empty cache", "tuple"])
def test_packed_rows_are_exact_however_the_model_is_called(model, stock, call):
    where, ones = positions(LENGTHS), torch.ones_like(IDS)
    output = {
        "positional": lambda: model(IDS, ones, where),
        "embeddings": lambda: model(inputs_embeds=model.get_input_embeddings()(IDS), position_ids=where),
        "all-ones mask": lambda: model(input_ids=IDS, attention_mask=ones, position_ids=where),
        "no cache": lambda: model(input_ids=IDS, position_ids=where, use_cache=False),
        "empty cache": lambda: model(input_ids=IDS, position_ids=where, past_key_values=DynamicCache()),
        "tuple": lambda: model(input_ids=IDS, position_ids=where, return_dict=False),
    }[call]()
    logits = output[0] if isinstance(output, tuple) else output.logits
    assert error(logits, alone(stock, IDS, LENGTHS)) <= FLOAT64
    assert isinstance(output, tuple) or output.past_key_values is None


def test_rows_may_have_different_documents(model, stock):
    ids, rows = token_ids(rows=2), (LENGTHS, OTHER_LENGTHS)
    expected = alone(stock, ids, *rows)
    bounds = torch.tensor([0, *itertools.accumulate([*LENGTHS, *OTHER_LENGTHS])])
    assert error(model(input_ids=ids, position_ids=positions(*rows)).logits, expected) <= FLOAT64
    assert error(model(input_ids=ids, cu_seq_lens_q=bounds, cu_seq_lens_k=bounds).logits, expected) <= FLOAT64


def test_one_row_of_positions_serves_a_batch(model, stock):
    ids = token_ids(rows=2)
    found = model(input_ids=ids, position_ids=positions(LENGTHS)).logits
    assert error(found, alone(stock, ids, LENGTHS, LENGTHS)) <= FLOAT64


def test_a_row_may_start_in_the_middle_of_a_document(model, stock):
    where = torch.cat([torch.arange(5, 12), torch.arange(12), torch.arange(14)])[None]
    found = model(input_ids=IDS, position_ids=where).logits[:, :7]
    expected = stock(input_ids=IDS[:, :7], position_ids=where[:, :7]).logits
    assert error(found, expected) <= FLOAT64


@pytest.mark.parametrize("segments", [True, False], ids=["segment ids", "0/1 mask"])
def test_padding_may_stand_left_right_and_between(model, stock, segments):
    runs = [(0, 3), (1, 7), (0, 2), (2, 12), (3, 5), (0, 4)]
    mask = torch.cat([torch.full((n,), s) for s, n in runs])[None]
    where = torch.cat([torch.arange(n) if s else torch.zeros(n, dtype=torch.long) for s, n in runs])[None]
    ids = IDS[:, : mask.shape[1]]
    arguments = {"attention_mask": mask} if segments else {"attention_mask": mask.clip(max=1), "position_ids": where}
    found = model(input_ids=ids, **arguments).logits
    column = 0
    for segment, n in runs:
        document = ids[:, column : column + n]
        if segment:
            assert error(found[:, column : column + n], stock(input_ids=document).logits) <= FLOAT64
        column += n


def test_tokens_under_padding_change_nothing(model):
    mask, where = torch.ones_like(IDS), positions(LENGTHS)
    mask[:, -9:] = 0
    changed = IDS.clone()
    changed[:, -9:] = 50
    one, other = (model(input_ids=i, position_ids=where, attention_mask=mask).logits[:, :-9] for i in (IDS, changed))
    assert torch.equal(one, other)


@pytest.mark.parametrize("arguments", [{"seq_idx": SEQ_IDX}, {"position_ids": positions(LENGTHS, start=1)}])
def test_roberta_likes_get_positions_after_their_padding_index(arguments):
    enabled, stock = (tiny.build("roberta", attn_implementation="sdpa", dtype=torch.float64) for _ in range(2))
    first = tiny.first_position(stock.config)
    if "position_ids" in arguments:
        arguments = {"position_ids": positions(LENGTHS, start=first)}
    with autopack.enable(enabled):
        assert error(enabled(input_ids=IDS, **arguments).logits, alone(stock, IDS, LENGTHS)) <= FLOAT64


@settings(max_examples=25)
@given(st.data())
def test_any_packed_rows_equal_their_documents_alone_and_no_document_moves_another(stock, data):
    columns = data.draw(st.integers(2, 24))
    cut = st.sets(st.integers(1, columns - 1), min_size=1, max_size=6)
    rows = [
        [b - a for a, b in itertools.pairwise([0, *sorted(data.draw(cut)), columns])]
        for _ in range(data.draw(st.integers(1, 2)))
    ]
    ids = token_ids(len(rows), columns, seed=data.draw(st.integers(0, 99)))
    model = llama()
    with autopack.enable(model):
        packed = model(input_ids=ids, position_ids=positions(*rows)).logits
        assert error(packed, alone(stock, ids, *rows)) <= FLOAT64
        row = data.draw(st.integers(0, len(rows) - 1))
        number = data.draw(st.integers(0, len(rows[row]) - 1))
        first = sum(rows[row][:number])
        own = torch.zeros_like(ids, dtype=torch.bool)
        own[row, first : first + rows[row][number]] = True
        moved = model(input_ids=torch.where(own, 127 - ids, ids), position_ids=positions(*rows)).logits
    assert (moved - packed)[~own].abs().max() <= FLOAT64
    assert (moved - packed)[own].abs().max() > LEAK


def _loss_error(found, expected):
    return float(((found - expected).abs() / expected.abs()).detach())


class TestLosses:
    """The loss of packed rows is the mean over all tokens that the documents predict alone."""

    def test_no_document_predicts_the_first_token_of_the_next(self, model, stock):
        expected = alone_loss(stock, IDS, LENGTHS)
        for arguments in DECLARATIONS.values():
            assert _loss_error(model(input_ids=IDS, labels=IDS, **arguments).loss, expected) <= FLOAT32_LOSS

    def test_labels_that_mask_the_boundaries_already_give_the_same_loss(self, model):
        labels = IDS.masked_fill(positions(LENGTHS) == 0, -100)
        given, unmasked = (model(input_ids=IDS, labels=y, **DECLARATIONS["seq_idx"]).loss for y in (labels, IDS))
        assert torch.equal(given, unmasked)

    def test_shifted_labels_are_masked_at_the_last_token(self, model):
        shifted = torch.cat([IDS[:, 1:], torch.tensor([[9]])], dim=1)
        where = DECLARATIONS["positions"]
        plain = model(input_ids=IDS, labels=IDS, **where).loss
        both = model(input_ids=IDS, labels=IDS, shift_labels=shifted, **where).loss
        assert torch.equal(both, plain)

    def test_the_item_count_of_a_trainer_is_kept(self, model, stock):
        ids, rows = token_ids(rows=2), (LENGTHS, OTHER_LENGTHS)
        items = sum(n - 1 for row in rows for n in row)
        found = model(input_ids=ids, position_ids=positions(*rows), labels=ids, num_items_in_batch=items).loss
        assert _loss_error(found, alone_loss(stock, ids, *rows)) <= FLOAT32_LOSS

    def test_the_labels_of_the_caller_stay_as_they_are(self, model):
        labels = IDS.clone()
        model(input_ids=IDS, labels=labels, **DECLARATIONS["positions"])
        assert torch.equal(labels, IDS)

    def test_unmasked_boundaries_would_change_the_loss(self, model, stock):
        logits = model(input_ids=IDS, **DECLARATIONS["positions"]).logits
        unmasked = stock.loss_function(logits=logits, labels=IDS, vocab_size=stock.config.vocab_size)
        assert _loss_error(unmasked, alone_loss(stock, IDS, LENGTHS)) > LEAK / 10

    def test_labels_of_single_tokens_are_not_touched_where_the_loss_does_not_shift(self):
        heads = [_head(LlamaForTokenClassification, num_labels=3) for _ in range(2)]
        labels = IDS % 3
        expected = [heads[1](input_ids=IDS[:, a:b], labels=labels[:, a:b]).loss * (b - a) for a, b in SPANS]
        with autopack.enable(heads[0], verify=False):
            found = heads[0](input_ids=IDS, labels=labels, **DECLARATIONS["positions"]).loss
        assert _loss_error(found, sum(expected) / COLUMNS) <= FLOAT32_LOSS


def _head(kind, **overrides):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, pad_token_id=0
    )
    for name, value in overrides.items():
        setattr(config, name, value)
    return kind(config).eval()


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
            {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)},
            {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clip(min=0)},
            {"position_ids": torch.arange(10)[None], "labels": ids},
            {"attention_mask": torch.ones(10, 10, dtype=torch.bool).tril().expand(3, 1, 10, 10)},
            {"past_key_values": DynamicCache(), "use_cache": True},
        ]
        with autopack.enable(enabled):
            for call in calls:
                call = {**call, "output_hidden_states": True}
                found, expected = (m(input_ids=ids, **copy.deepcopy(call)) for m in (enabled, stock))
                assert torch.equal(found.logits, expected.logits)
                assert all(map(torch.equal, found.hidden_states, expected.hidden_states))
                assert (found.past_key_values is None) == (expected.past_key_values is None)

    @pytest.mark.parametrize("use_cache", [True, False])
    @pytest.mark.parametrize("implementation", ["sdpa", "eager"])
    def test_generate_gives_the_same_tokens(self, implementation, use_cache):
        enabled, stock = llama(implementation), llama(implementation)
        ids, mask = token_ids(3, 8), torch.ones(3, 8, dtype=torch.long)
        ids[0, :4], mask[0, :4], ids[2, :1], mask[2, :1] = 0, 0, 0, 0
        options = {"max_new_tokens": 6, "do_sample": False, "use_cache": use_cache, "eos_token_id": None}
        expected = stock.generate(ids, attention_mask=mask, **options)
        with autopack.enable(enabled):
            enabled(input_ids=IDS, position_ids=positions(LENGTHS))
            assert torch.equal(enabled.generate(ids, attention_mask=mask, **options), expected)


REFUSED = {
    "a cache is wanted": (
        {"use_cache": True},
        InvalidPacking,
        "use_cache=True was given with packed rows, but a cache cannot tell documents apart. Leave use_cache out",
    ),
    "a four-dimensional mask": (
        {"attention_mask": torch.ones(1, 1, COLUMNS, COLUMNS)},
        InvalidPacking,
        "the prepared attention_mask of LlamaForCausalLM lets documents see each other that the call declares",
    ),
    "a mask of another width": (
        {"attention_mask": torch.ones(1, 40)},
        InvalidPacking,
        r"found a tensor of shape \(1, 40\)",
    ),
    "a dict of masks": ({"attention_mask": {"full_attention": None}}, InvalidPacking, "found dict"),
    "encoder states": (
        {"encoder_hidden_states": torch.zeros(1, 4, 64)},
        UnsupportedModel,
        "encoder_hidden_states were given with packed rows: cross-attention",
    ),
}


@pytest.mark.parametrize(("arguments", "kind", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_packed_is_refused_before_any_token_is_computed(arguments, kind, message):
    model, computed = llama(), []
    model.get_input_embeddings().register_forward_pre_hook(lambda *a: computed.append(a))
    # An audit for the hook would compute tokens itself.
    with autopack.enable(model, verify=False), pytest.raises(kind, match=message):
        model(input_ids=IDS, position_ids=positions(LENGTHS), **arguments)
    assert not computed


def test_positions_that_only_jump_are_left_to_stock_with_a_word(model, stock, caplog):
    choose._say_that_positions_jump.cache_clear()
    stretched = torch.cat([torch.arange(20), torch.arange(40, 40 + COLUMNS - 20)])[None]
    for _ in range(2):
        call = {"input_ids": IDS, "position_ids": stretched, "use_cache": False}
        assert torch.equal(model(**call).logits, stock(**call).logits)
    assert [r.message.partition(",")[0] for r in caplog.records if "neither go on" in r.message] == [
        "position_ids of a call of LlamaForCausalLM neither go on by one nor begin anew"
    ]


def test_a_cache_that_holds_tokens_is_refused(model):
    cache = model(input_ids=IDS[:, :4], use_cache=True).past_key_values
    with refused("cache-given"):
        model(input_ids=IDS, position_ids=positions(LENGTHS), past_key_values=cache)


def test_disagreeing_and_malformed_declarations_reach_the_caller(model):
    with refused("documents-unclear", match="position_ids a document starts at row 0, column 7, by seq_idx none does"):
        model(input_ids=IDS, position_ids=positions(LENGTHS), seq_idx=torch.zeros_like(IDS))
    with refused("declaration-invalid", match="found dtype torch.float32"):
        model(input_ids=IDS, position_ids=positions(LENGTHS).float())
    with refused("declaration-invalid", match="device of the inputs, cpu; found meta"):
        model(input_ids=IDS, position_ids=positions(LENGTHS).to("meta"))


def test_positional_arguments_beyond_those_named_are_refused(model):
    extra = [None] * 12
    with refused("positional-arguments", match=r"does not name the last \d+ of 15 positional arguments"):
        model(IDS, None, positions(LENGTHS), *extra)


def test_bounds_that_end_before_marked_padding_are_those_of_the_documents(model, stock):
    """Without the mask nobody knows what follows; the padding changes no result, and no gradient."""
    real = sum(LENGTHS)
    ids = torch.cat([IDS, torch.full((len(IDS), 6), 3)], dim=1)
    bounds = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)], dtype=torch.int32)
    call = {"input_ids": ids, "cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": 12, "max_length_k": 12}
    labels = torch.cat([IDS, torch.full((len(IDS), 6), -100)], dim=1)
    mask = (labels >= 0).long()
    found = model(**call, attention_mask=mask, labels=labels)
    assert error(found.logits[:, :real], alone(stock, IDS, LENGTHS)) < FLOAT64
    expected = alone_loss(stock, IDS, LENGTHS)
    assert float(found.loss.detach()) == pytest.approx(float(expected.detach()), abs=FLOAT32_LOSS)
    found.loss.backward()
    expected.backward()
    assert gradient_error(gradients(model), gradients(stock)) < FLOAT64
    leaking = stock(input_ids=ids, attention_mask=mask).logits[:, :real]
    assert error(leaking, alone(stock, IDS, LENGTHS)) > LEAK
    with refused("declaration-invalid", match="They may end before the last padding"):
        model(**call)
