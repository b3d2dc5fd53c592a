"""What an encoder-decoder cannot be given, or cannot be, says why and changes nothing."""

import pytest
import torch
import transformers

import autopack
from autopack import tiny
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
    model = transformers.BartForSequenceClassification(
        tiny.config("bart", task="sequence-classification")
    ).eval()
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
