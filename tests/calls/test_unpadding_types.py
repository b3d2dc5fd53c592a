"""Every model type that autopack serves: padded batches, unpadded inside, give what stock gives."""

import pytest
import torch

import autopack
from autopack import registry, tiny
from tests.subjects import build
from tests.support.padded import FLOAT32, PADDED, batch, logit_error, loss_error, mask_of

WITHOUT_PADDING = {"xlnet", "reformer masked-lm"}
"""Types that stock transformers cannot run on a padded batch in the form that `tiny` builds."""
WITHOUT_LABELS = {
    t for f in registry.families() if "labels" in f.refused_without_images for t in f.model_types
}
"""Types whose loss stock transformers cannot compute on text alone."""
OF_POOLER = "the token that the head reads is padding in some row"
LABELS = {"causal-lm": "causal LM", "masked-lm": "masked LM"}


def _types(task):
    served = frozenset().union(*(family.model_types for family in registry.families()))
    # Perceiver's masked model predicts places of latents, and is refused.
    refused = {"perceiver"} if task == "masked-lm" else set()
    return sorted((served & set(tiny.types_for(task))) - WITHOUT_PADDING - refused)


def padded_alone(model, ids, mask):
    """The logits that each document of a padded batch gets by itself, put where the batch has
    them."""
    found = torch.zeros(*ids.shape, model.get_output_embeddings().weight.shape[0])
    for row, (tokens, real) in enumerate(zip(ids, mask.bool(), strict=True)):
        found[row, real] = model(input_ids=tokens[real][None], use_cache=False).logits[0]
    return found


@pytest.mark.parametrize(
    ("task", "model_type"), [(task, name) for task in LABELS for name in _types(task)]
)
def test_logits_and_loss_of_every_type(task, model_type):
    """Left out, and so equal by themselves, are only those whose positions or windows count the
    padding."""
    model = build(model_type, task, dtype=torch.float32)
    if getattr(model.config, "is_encoder_decoder", False):
        pytest.skip("encoder-decoders have tests of their own")
    for side in ("right", "left", "holes"):
        mask = mask_of(PADDED, side)
        inputs = batch(LABELS[task], mask)
        if model_type in WITHOUT_LABELS:
            del inputs["labels"]
        with torch.no_grad():
            expected = model(**inputs, use_cache=False)
            with autopack.enable(model) as handle:
                found = model(**inputs, use_cache=False)
                tally = handle.tally
            if handle.enabled.traits.recurs and side == "left" and tally.batches:
                # Stock carries a state from padding into the document; what the document gets alone
                # is right.
                assert (
                    logit_error(found.logits, padded_alone(model, inputs["input_ids"], mask), mask)
                    < FLOAT32
                )
            else:
                assert logit_error(found.logits, expected.logits, mask) < FLOAT32
                assert expected.loss is None or loss_error(found.loss, expected.loss) < FLOAT32
        if handle.enabled.traits.whole_model_reason is not None:
            assert list(tally.left) == [
                "documents are run alone, and gain nothing from a packed row"
            ]
        elif handle.enabled.traits.reads_padding:
            (reason,) = tally.left
            assert "reads padding" in reason or (side != "right" and reason == OF_POOLER)
        elif handle.enabled.anatomy.model_type == "big_bird" and task == "masked-lm":
            assert set(tally.left) <= {"the pooler is handed one token of every row", OF_POOLER}
        elif side == "right":
            assert (tally.batches, tally.left) == (1, {})
        elif not tally.batches:
            (reason,) = tally.left
            of_holes = "windows count it" in reason or "state is carried over it" in reason
            assert (of_holes and side == "holes") or reason == OF_POOLER or "counts" in reason


@pytest.mark.parametrize("side", ["right", "left"])
def test_a_composite_numbers_tokens_as_its_text_part_does(side):
    """KOSMOS-2.5's text model counts the tokens that are not the padding token, and starts after
    that one."""
    model = tiny.build("kosmos-2.5", task="image-text-to-text", attn_implementation="sdpa")
    mask = mask_of(PADDED, side)
    inputs = {"input_ids": tiny.tokens(model.config, *mask.shape), "attention_mask": mask}
    inputs["input_ids"][mask == 0] = model.config.get_text_config().pad_token_id
    with torch.no_grad():
        expected = model(**inputs, use_cache=False)
        with autopack.enable(model) as handle:
            assert (
                logit_error(model(**inputs, use_cache=False).logits, expected.logits, mask)
                < FLOAT32
            )
    assert handle.tally.batches == 1
