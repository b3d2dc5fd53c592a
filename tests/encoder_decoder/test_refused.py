"""What an encoder-decoder cannot be given, or cannot be, says why and changes nothing; disabling leaves no mark."""

import pytest
import torch
import transformers

import autopack
from autopack import tiny
from autopack.runtime.scope import holds_marks
from tests.encoder_decoder.pairs import Pairs, build, covered
from tests.support.refusals import refused

pytestmark = covered


def test_the_packing_collator_says_what_to_use():
    with pytest.raises(ValueError, match="Keep transformers.DataCollatorForSeq2Seq"):
        autopack.PackingCollator.for_model(build("t5"))


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"decoder_attention_mask": None}, "halves-disagree"),
        ({"attention_mask": None}, "halves-disagree"),
        ({"labels": None}, "halves-disagree"),
        ({"use_cache": True}, "cache-given"),
        ({"output_attentions": True}, "output-asked"),
        ({"cu_seq_lens_q": torch.tensor([0, 7])}, "halves-disagree"),
        ({"head_mask": torch.ones(2, 4)}, "argument-of-no-document"),
    ],
)
def test_packed_calls_that_are_refused(change, code):
    model = build("t5")
    autopack.enable(model, verify=False)
    with refused(code):
        model(**{**Pairs.draw().one_row(), **change})
    model(**Pairs.draw().one_row())  # nothing is left behind


def test_a_classification_head_refuses_packed_rows_with_tokens_of_a_decoder():
    model = transformers.BartForSequenceClassification(tiny.config("bart", task="sequence-classification")).eval()
    autopack.enable(model, verify=False)
    row = Pairs.draw().one_row()
    row["decoder_input_ids"] = row.pop("labels")
    with refused("result-per-row"):
        model(**row)


def test_a_head_of_another_kind_is_not_audited():
    model = tiny.build("t5gemma", task="token-classification")
    autopack.enable(model, verify=False)
    with refused("nothing-to-audit"):
        autopack.audit(model)


def test_what_is_refused_says_why_and_stays_as_it_was():
    model = build("bigbird_pegasus")
    with refused("cannot-be-packed"):
        autopack.enable(model)
    assert not holds_marks(model)


def test_disable_takes_every_mark_back():
    model = build("t5")
    before = [dict(vars(module)) for module in model.modules()]
    autopack.enable(model, verify=False).remove()
    for module, attributes in zip(model.modules(), before, strict=True):
        assert vars(module).keys() == attributes.keys()
