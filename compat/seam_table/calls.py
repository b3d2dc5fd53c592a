"""The seams of what becomes of a call."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from compat.seam_breaks import Function, around, never, returns, seam, skipped


def _from_0(add: Function, call: Any, arguments: dict[str, Any], layout: Any) -> None:
    """Add positions that restart at 0, whatever the model begins with."""
    arguments["position_ids"] = layout.position_ids(0)


def _numbered_together(number: Function, call: Any, layout: Any) -> Any:
    """Number the images of all documents in one call."""
    traits, call.traits = call.traits, replace(call.traits, counts_images=False)
    try:
        return number(call, layout)
    finally:
        call.traits = traits


SEAMS = (
    seam(
        "positions: those of models that begin elsewhere begin at 0",
        "calls.rows:_add_positions",
        around(_from_0),
        "calls/test_first_positions.py",
        "test_documents_begin_where_those_of_the_type_do[camembert-seq_idx]",
    ),
    seam(
        "positions: a padding token is counted on from the row",
        "inspection.positions:Numbering.of_counted",
        around(lambda count, numbering, config, ids, starts=None: count(numbering, config, ids)),
        "calls/test_first_positions.py",
        "test_a_padding_token_inside_a_document_is_numbered_as_alone[first-camembert]",
    ),
    seam(
        "positions: those of left padding begin at 0",
        "inspection.positions:Numbering.in_padded_batch",
        never(lambda numbering, config, mask, ids: mask.long().cumsum(1) - 1),
        "calls/test_unpadding.py",
        "TestAgreement::test_logits_loss_and_gradients[gpt2-causal LM-left]",
    ),
    seam(
        "unpadding: nothing keeps the padding of a batch",
        "calls.padding_rules:reasons_anywhere",
        returns(()),
        "calls/test_unpadding_choices.py",
        "TestLeftAsItCame::test_and_the_handle_says_why[a cache is wanted]",
        "TestLeftAsItCame::test_and_the_handle_says_why[left padding of bert]",
        "TestLeftAsItCame::test_and_the_handle_says_why[left padding of roberta as a decoder]",
        "calls/test_chunked_feed_forward.py",
        "test_padded_batches_keep_their_padding_where_stock_alone_can_chunk_them[9-True-before]",
        "attention/test_rotary.py",
        "test_documents_that_lose_the_columns_before_them_keep_their_padding",
        "calls/test_padding_read.py",
        "test_answers_are_looked_for_in_all_columns_in_evaluation_too",
        "test_what_a_mask_hides_and_is_no_padding_keeps_its_place",
        "integration/test_peft.py",
        "test_padding_stays_where_layers_are_given_something_for_each_row[_named]",
    ),
    seam(
        "generation: its calls are read for documents",
        "calls.choose:generates",
        returns(False),
        "runtime/test_counts.py",
        "test_generation_of_an_encoder_decoder_is_not_counted[options0]",
        "calls/test_generation.py",
        "test_the_same_tokens[llama-True]",
    ),
    seam(
        "refusals: whatever packed rows come with",
        "calls.refusals:check_packed",
        skipped,
        "calls/test_entry.py",
        "test_what_cannot_be_packed_is_refused_before_any_token_is_computed[a cache is wanted]",
        "calls/test_first_positions.py",
        "test_positions_that_restart_at_0_are_refused[camembert]",
        "mixers/test_encoders.py",
        "test_entities_beside_the_row_are_refused_and_tokens_alone_are_not",
        "test_patching.py",
        "test_packed_calls_of_an_enabled_model_notice_a_newcomer",
        "mixers/test_own_attention.py",
        "test_labels_at_padding_of_a_model_that_leaves_it_out[xlnet-causal-lm]",
        "multimodal/test_sounds.py",
        "test_where_padding_would_tell_sounds_have_one_length[granite_speech]",
        "multimodal/test_refused.py",
        "test_what_does_not_fit_the_documents[1 images, blip]",
    ),
    seam(
        "refusals: a prepared mask over documents",
        "calls.refusals:says_it_all",
        returns(False),
        "attention/test_prepared_masks.py",
        "test_one_that_lets_documents_see_each_other_contradicts_them[bool]",
    ),
    seam(
        "refusals: a loss of labels that nobody has seen",
        "calls.refusals:check_loss",
        skipped,
        "unfamiliar/test_losses.py",
        "test_a_loss[a subclass with labels of its own-llama]",
    ),
    seam(
        "pairs: whatever packed rows of an encoder-decoder come with",
        "calls.encoder_decoder:PairCall.check_packed",
        skipped,
        "encoder_decoder/test_refused.py",
        "test_a_classification_head_refuses_packed_rows_with_tokens_of_a_decoder",
        "encoder_decoder/test_hidden_labels.py",
        "test_packed_rows_with_such_a_label_are_refused",
        "multimodal/test_refused.py",
        "test_what_does_not_fit_the_documents[tokens and labels]",
    ),
    seam(
        "prefixes: dropout and noise are drawn once",
        "calls.prefixes:_draws",
        returns(False),
        "prefixes/test_choices.py",
        "TestWhen::test_never[modules of dropout]",
        "TestWhen::test_never[noise on embeddings]",
    ),
    seam(
        "images: a model numbers those of all documents in one call",
        "calls.with_media:positions_of_documents",
        around(_numbered_together),
        "multimodal/test_packed_rows.py",
        "test_documents_with_images_get_what_they_get_alone[hunyuan_vl-]",
    ),
    seam(
        "images: rows of a padded batch read those of other rows",
        "calls.choose:own_images",
        returns((None, None)),
        "multimodal/test_across.py",
        "test_rows_of_a_padded_batch_get_what_they_get_alone[mllama-left]",
        "multimodal/test_counted_images.py",
        "test_rows_of_a_padded_batch_get_what_they_get_alone[left]",
    ),
    seam(
        "shared rows: whatever cannot be shared",
        "calls.sequence_parallel:_why_not_in_parts",
        skipped,
        "integration/test_processes.py",
        "test_every_rank_finds_what_it_has_to[shared_rows-refused, labels]",
    ),
)
