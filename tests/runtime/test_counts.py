"""What is counted of the calls of an enabled model: real tokens, columns that ran, documents, padding left out."""

from __future__ import annotations

import copy
import logging
import pickle
import re

import pytest
import torch
from torch import nn

import autopack
from autopack import tiny
from autopack.runtime.tally import Volume
from tests.conftest import token_ids
from tests.support.refusals import refused

pytestmark = pytest.mark.usefixtures("nothing_left_behind")
LENGTHS = (7, 3, 9)
REAL, PADDING = sum(LENGTHS), 3 * 9 - sum(LENGTHS)
STAYED = Volume(calls=1, rows=3, columns=27, tokens=REAL, documents=3)
RAN = Volume(calls=1, rows=1, columns=REAL, tokens=REAL, documents=3, skipped=PADDING)


def padded() -> dict[str, torch.Tensor]:
    mask = (torch.arange(9) < torch.tensor(LENGTHS)[:, None]).long()
    ids = token_ids(3, 9) * mask
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def packed(*segments: int) -> dict[str, torch.Tensor]:
    """A row of two documents and, behind them, padding."""
    return {"input_ids": token_ids(1, len(segments)), "attention_mask": torch.tensor([segments])}


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (padded(), RAN),
        (packed(1, 1, 1, 2, 2, 0, 0, 0), Volume(calls=1, rows=1, columns=8, tokens=5, documents=2)),
        (packed(1, 1, 1, 2, 2, 2, 2, 2), Volume(calls=1, rows=1, columns=8, tokens=8, documents=2)),
        ({"input_ids": token_ids(2, 5)}, Volume(calls=1, rows=2, columns=10, tokens=10, documents=2)),
        ({**padded(), "output_attentions": True}, STAYED),
        ({"inputs_embeds": torch.zeros(2, 5, 32)}, Volume(calls=1, rows=2, columns=10, tokens=10, documents=2)),
    ],
)
def test_a_call_of_a_language_model(call, expected):
    model = tiny.build("llama").train()
    with autopack.enable(model) as handle:
        if "inputs_embeds" in call:
            call = {"inputs_embeds": torch.zeros(2, 5, model.config.hidden_size)}
        model(**call)
        assert handle.tally.training == expected
        model(**call)
        assert handle.tally.training == expected.plus(expected)
        assert handle.tally.evaluation == Volume()


def test_unpad_never_counts_padding_as_what_ran():
    model = tiny.build("llama").train()
    with autopack.enable(model, unpad=False) as handle:
        model(**padded())
    assert handle.tally.training == STAYED
    assert handle.tally.training.fill == REAL / 27


HEADS = [
    # Runs the documents as a padded batch, whose backbone runs one row.
    ("bert", Volume(calls=1, rows=1, columns=5, tokens=5, documents=2, skipped=3)),
    # Runs each length by itself, one document per row.
    ("xlnet", Volume(calls=2, rows=2, columns=5, tokens=5, documents=2, skipped=3)),
]


@pytest.mark.parametrize(("kind", "expected"), HEADS)
def test_documents_of_a_head_are_counted_once(kind, expected):
    model = tiny.build(kind, task="sequence-classification", pad_token_id=0).train()
    with autopack.enable(model) as handle:
        model(**packed(1, 1, 1, 2, 2, 0, 0, 0), labels=torch.tensor([0, 1]))
        assert handle.tally.training == expected


def test_the_head_of_a_padded_batch_is_not_counted_beside_its_backbone():
    model = tiny.build("bert", task="sequence-classification").train()
    with autopack.enable(model) as handle:
        model(**{**padded(), "labels": torch.tensor([0, 1, 0])})
        assert handle.tally.training == RAN


def test_both_halves_of_an_encoder_decoder():
    model = tiny.build("t5", task="seq2seq").train()
    whole = {"input_ids": token_ids(2, 5), "labels": token_ids(2, 4)}
    with autopack.enable(model) as handle:
        model(**padded())
        assert handle.tally.training == Volume(1, 1, 2 * REAL, 2 * REAL, 3, 2 * PADDING)
        model(**whole)
        assert handle.tally.training == Volume(2, 3, 2 * REAL + 18, 2 * REAL + 18, 5, 2 * PADDING)
    with autopack.enable(model, unpad=False) as handle:
        model(**padded())
        assert handle.tally.training == Volume(1, 3, 54, 2 * REAL, 3)


def test_a_batch_that_has_to_run_again_as_it_came():
    """The first one of a tower that picks a token by itself runs as a row before that shows."""
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = CLIPTextModelWithProjection(
        CLIPTextConfig(vocab_size=128, eos_token_id=127, bos_token_id=126, **sizes)
    ).train()
    given = {name: value for name, value in padded().items() if name != "labels"}
    with autopack.enable(model, verify=False) as handle:
        for calls in (1, 2):
            model(**given)
            assert handle.tally.training == Volume(*(calls * number for number in STAYED))


def test_choices_of_questions():
    model = tiny.build("bert", task="multiple-choice").train()
    with autopack.enable(model) as handle:
        model(input_ids=token_ids(6, 5).reshape(2, 3, 5))
    assert handle.tally.training == Volume(calls=1, rows=6, columns=30, tokens=30, documents=6)


def test_documents_that_are_declared_further_in_are_counted_there():
    class Declares(type(tiny.build("llama"))):  # type: ignore[misc]
        def forward(self, input_ids=None, **others):
            if input_ids.shape == (1, 8):
                others["position_ids"] = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
            return super().forward(input_ids=input_ids, **others)

    model = Declares(tiny.build("llama").config).train()
    with autopack.enable(model) as handle:
        model(input_ids=token_ids(1, 8))
        assert handle.tally.training == Volume(calls=1, rows=1, columns=8, tokens=8, documents=2)


def test_evaluation_is_counted_apart_and_generation_not_at_all():
    model = tiny.build("llama")
    with autopack.enable(model) as handle:
        with torch.no_grad():
            model(**padded())
            model.generate(token_ids(1, 4), max_new_tokens=3)
        assert (handle.tally.training, handle.tally.evaluation) == (Volume(), RAN)
        model(**padded()).loss.backward()  # Lightning leaves what `from_pretrained` gives in evaluation mode
        with torch.no_grad():
            model.train()(**padded())
        assert (handle.tally.training, handle.tally.evaluation) == (RAN.plus(RAN), RAN)


@pytest.mark.parametrize("options", [{}, {"use_cache": False}, {"num_beams": 2}])
def test_generation_of_an_encoder_decoder_is_not_counted(options):
    model = tiny.build("t5", task="seq2seq")
    prompts = {name: value for name, value in padded().items() if name != "labels"}
    with autopack.enable(model) as handle:
        model.generate(**prompts, max_new_tokens=3, **options)
        assert handle.tally.evaluation == Volume()
        assert str(handle.tally) == "no padded batch yet"


def test_layers_that_are_recomputed_count_once():
    model = tiny.build("llama").train()
    model.gradient_checkpointing_enable()
    with autopack.enable(model) as handle:
        model(**padded()).loss.backward()
        assert handle.tally.training == RAN


def test_compiled_calls_are_counted_and_break_no_graph():
    model = tiny.build("llama", attn_implementation="sdpa").train()
    with autopack.enable(model) as handle:
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        for _ in range(3):
            compiled(**padded())
        assert handle.tally.training == Volume(*(3 * number for number in RAN))
        torch._dynamo.reset()


def test_audits_and_checks_of_training_calls_are_not_counted():
    class Own(type(tiny.build("llama"))):  # type: ignore[misc]
        def __init__(self, config, own=None):  # of which there is no twin
            super().__init__(config)

    model = Own(tiny.build("llama").config).train()
    with autopack.enable(model, check_every=1) as handle:
        assert handle.tally.training == handle.tally.evaluation == Volume()
        model(**padded())
        assert handle.checked.checks == 1
        autopack.audit(model)
        assert (handle.tally.training, handle.tally.evaluation) == (RAN, Volume())


def test_a_call_that_is_refused_is_not_counted():
    model = tiny.build("llama").train()
    with autopack.enable(model) as handle:
        with refused("declaration-invalid"):
            model(input_ids=token_ids(1, 4), position_ids=torch.tensor([[0, 1, -1, 0]]))
        assert handle.tally.training == Volume()


def test_copies_count_by_themselves():
    model = tiny.build("llama").train()
    with autopack.enable(model) as handle:
        model(**padded()), model(**padded())
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            tally = vars(copied)["_autopack_handle"].tally
            assert tally.tokens_per_second is None  # the seconds were another's
            copied(**padded())
            assert tally.training == Volume(*(3 * number for number in RAN))
            assert tally.tokens_per_second is None
            copied(**padded())
            assert tally.tokens_per_second > 0
            autopack.disable(copied)
        assert handle.tally.training == RAN.plus(RAN)


def test_handles_say_it_live(caplog):
    model = tiny.build("llama").train()
    with autopack.enable(nn.Sequential(model)) as handle, caplog.at_level(logging.INFO):
        assert "trained:" not in repr(handle)
        model(**padded())
        said = "1 call, fill 100.0% (19 real tokens in 19 columns), 3.0 documents per row"
        assert f"  trained:   {said}\n" in repr(handle)
        model(**padded())
        assert re.search(r"trained: +2 calls, .*row, [\d,]+ real tokens per second\n", repr(handle))
        with torch.no_grad():
            model.eval()(**padded())
        assert f"  evaluated: {said}\n" in repr(handle)
        assert said in handle._repr_html_()


def test_shares_of_nothing():
    assert (Volume().fill, Volume().padding_skipped, Volume().documents_per_row) == (1.0, 0.0, 0.0)
    assert RAN.padding_skipped == PADDING / 27
    assert STAYED.documents_per_row == 1
