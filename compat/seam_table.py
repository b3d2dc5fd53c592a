"""The seams: named functions of autopack, how each is broken, and the tests that have to notice.

A function that is renamed changes one word here. `results/mutants_to_seams.tsv` says which seam
stands for which of the breaks of source text that 0.2 was tried with.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from compat.seam_breaks import Break, Function, Seam, around, never, result, returns, skipped, stale

_STATES = "encoder_hidden_states"


def _seam(name: str, at: str, breaks: Break, *tests: str) -> Seam:
    """Return a row of the table; a test stands in the file that was named last before it."""
    file = ""
    found: list[str] = []
    for test in tests:
        if test.endswith(".py"):
            file = test
        else:
            found.append(f"tests/{file}::{test}")
    return Seam(name, f"autopack.{at}", breaks, tuple(found))


def _as_one(layout: Any) -> Any:
    """Return the layout of the same rows, each one document."""
    return type(layout).from_lengths([[layout.columns]] * layout.rows, layout.device)


def _scope_of_anyone(module: Any, one_token: bool = False) -> Any:
    """Return the scope that is running, whatever model it is of."""
    from autopack.runtime.scope import running_scope

    return running_scope()


def _from_0(add: Function, call: Any, arguments: dict[str, Any], layout: Any) -> None:
    """Add positions that restart at 0, whatever the model begins with."""
    arguments["position_ids"] = layout.position_ids(0)


def _see_all_images(run: Function, *given: Any) -> Any:
    """Attend from each document to the images of all."""
    *others, places = given
    keys = slice(0, others[2][1].shape[2])
    return run(*others, [(row, queries, keys) for row, queries, _ in places])


def _of_another(run: Function, mixer: Any, arguments: dict[str, Any], layout: Any) -> Any:
    """Hand each document the image of another."""
    return run(mixer, {**arguments, _STATES: arguments[_STATES].flip(0)}, layout)


def _of_one_size(derive: Function, layout: Any, key: Any, build: Function) -> Any:
    """Know what was derived by its name alone."""
    return derive(layout, key[0] if isinstance(key, tuple) else key, build)


def _wider(one: Any, other: Any) -> Any:
    """Return the larger of two reaches."""
    return max((each for each in (one, other) if each is not None), default=None)


def _run_on(batch: dict[str, Any]) -> dict[str, Any]:
    """Number the tokens of a row from its beginning."""
    return {**batch, "position_ids": np.arange(batch["position_ids"].size)[None]}


def _only_put(put: Function, site: Any, value: Any) -> None:
    """Put a function of autopack in place, and nothing back."""
    if hasattr(value, "autopack_original"):
        put(site, value)


def _one_early(starts: np.ndarray) -> np.ndarray:
    """Begin each document one token before its first, too."""
    return starts | np.roll(starts, -1, axis=1)


def _as_it_is(call: Any) -> Any:
    """Run a module on the row, as if it kept documents apart."""
    return call.changed(lambda name, value: value)


_ATTENTION = (
    _seam(
        "attention: the mask of a document is lost",
        "attention.document_mask:DocumentMask.for_document",
        returns(None),
        "compat/test_fuzz.py",
        "test_every_form_of_call_is_exact[results-positions]",
    ),
    _seam(
        "attention: the mask of one length serves another",
        "attention.document_mask:DocumentMask.for_length",
        stale,
        "unfamiliar/test_configurations.py",
        "test_a_configuration_that_is_changed[after-window of the config]",
    ),
    _seam(
        "attention: documents are cut in another order",
        "attention.per_document:_by_document",
        result(lambda parts: parts[::-1]),
        "calls/test_entry.py",
        "test_rows_may_have_different_documents",
    ),
    _seam(
        "masks: what rules read of tokens is not seen",
        "inspection.masks:captured_tensors",
        returns(()),
        "multimodal/test_packed_rows.py",
        "test_equally_long_documents_have_their_images_where_they_have_them[gemma3-sdpa]",
    ),
    _seam(
        "masks: the wider of two windows",
        "inspection.mask_rules:_least",
        never(_wider),
        "attention/test_mask_rules.py",
        "test_a_pattern_is_what_its_rule_says_of_every_pair[pattern_of-the narrower of two windows]",
    ),
    _seam(
        "flex: documents have one number",
        "layout.packed:PackedLayout.seq_idx",
        result(torch.zeros_like),
        "attention/test_flex.py",
        "test_a_block_mask_of_the_models_own_is_cut_by_documents",
    ),
    _seam(
        "flex: documents begin where the row does",
        "layout.packed:PackedLayout.start_columns",
        result(torch.zeros_like),
        "attention/test_flex.py",
        "test_packed_equals_alone[llama4_text]",
    ),
    _seam(
        "flex: what begins alike is one document",
        "attention.backends.flex:_blocks_of_tree",
        around(lambda make, it, own: make(it, lambda b, h, q, k: own(b, h, q, q * 0))),
        "prefixes/test_exactness.py",
        "TestAgreement::test_every_backend[llama-flex]",
    ),
    _seam(
        "varlen: what torch's kernel lacks is asked of it",
        "attention.backends.varlen:refusal",
        returns(None),
        "attention/test_varlen.py",
        "test_equals_each_document_alone[window-(16, 16)-2.10.0]",
    ),
    _seam(
        "autocast: attention takes the dtype that states have",
        "inspection.torches:taken_by_sdpa",
        never(lambda states: states.dtype),
        "attention/test_autocast.py",
        "test_packed_rows_are_documents_alone_up_to_the_rounding_of_the_dtype[llama-compiled-bf16]",
        "test_torchs_own_kernels_are_taken_for_weights_in_float32[llama-bf16]",
    ),
    _seam(
        "rotary: all documents have the frequencies of the longest",
        "attention.rotary:_groups",
        result(lambda groups: [np.sort(np.concatenate(list(groups)))]),
        "attention/test_rotary.py",
        "test_packed_rows_with_short_and_long_documents_are_exact[phi3 longrope]",
    ),
    _seam(
        "rotary: frequencies stay for the next document",
        "attention.rotary:reset_frequencies",
        skipped,
        "attention/test_rotary.py",
        "test_documents_that_are_all_longer_than_the_model_was_trained_on",
        "test_a_packed_call_does_not_change_what_an_unpacked_one_sees[llama dynamic NTK-long]",
    ),
    _seam(
        "rotary: threads share frequencies",
        "attention.rotary:_of_this_call",
        never(lambda module: module),
        "attention/test_rotary.py",
        "test_threads_that_share_a_model_have_frequencies_of_their_own",
    ),
    _seam(
        "directions: is_causal may contradict the mask",
        "attention.call:AttentionCall.refuse_two_directions",
        skipped,
        "attention/test_directions.py",
        "test_it_is_refused[llama-before]",
    ),
    _seam(
        "images: tokens see those of other documents",
        "attention.cross:_one_by_one",
        around(_see_all_images),
        "multimodal/test_across.py",
        "test_tokens_before_an_image_and_documents_without_one[mllama]",
    ),
    _seam(
        "flash and varlen: a row is one document",
        "layout.packed:PackedLayout.kernel_cu_seqlens",
        result(lambda bounds: bounds[[0, -1]]),
        "attention/test_flash.py",
        "test_several_rows_with_layouts_of_their_own_are_flattened",
        "attention/test_varlen.py",
        "test_equals_each_document_alone[causal-(16, 16)-2.14.1]",
    ),
)


_LAYOUT = (
    _seam(
        "layout: what was derived for one size serves another",
        "layout.packed:PackedLayout.derived",
        around(_of_one_size),
        "layout/test_layout.py",
        "test_chunks_of_two_sizes_are_two_layouts",
        "mixers/test_operations.py",
        "test_convolutions_of_two_widths_share_a_layout",
    ),
    _seam(
        "layout: positions do not restart",
        "layout.packed:PackedLayout.position_ids",
        around(lambda number, layout, first=0: number(_as_one(layout), first)),
        "layout/test_layout.py",
        "test_every_view_agrees_with_the_lengths",
    ),
    _seam(
        "layout: runs of padding are documents",
        "layout.packed:real_documents",
        result(np.ones_like),
        "mixers/test_encoders.py",
        "test_runs_of_padding_are_no_documents_that_a_model_has_to_run",
    ),
    _seam(
        "layout: documents come back in the order of their batches",
        "layout.batches:Batches.of",
        result(lambda found: replace(found, back=torch.arange(len(found.back)))),
        "mixers/test_rows.py",
        "test_any_causal_mixer_gets_every_document_once_and_from_its_start",
    ),
    _seam(
        "layout: positions in sections are no tokens",
        "layout.forms:Frame.form_of",
        around(lambda ask, frame, name, value: ask(frame, "", value)),
        "layout/test_forms.py",
        "test_each_kind_of_positions_is_changed_by_itself",
    ),
    _seam(
        "padding: the row is one document",
        "layout.padding:Padding.layout",
        result(_as_one),
        "calls/test_unpadding.py",
        "TestAgreement::test_any_number_of_rows[2-llama]",
    ),
    _seam(
        "padding: a token comes back in the column before",
        "layout.padding:Padding._restored",
        around(lambda put, it, tokens, along: put(it, tokens.roll(-1, along), along)),
        "calls/test_unpadding.py",
        "TestAgreement::test_any_number_of_rows[1-llama]",
    ),
    _seam(
        "padding: tokens behind padding keep their labels",
        "layout.padding:Padding.unpredicted",
        result(lambda places: places[:0]),
        "compat/test_fuzz.py",
        "test_every_form_of_call_is_exact[loss-mask]",
    ),
    _seam(
        "labels: the first of a document counts",
        "layout.packed:without_boundaries",
        never(lambda labels, *_: labels),
        "calls/test_ignored_labels.py",
        "test_packed_rows[llama]",
    ),
    _seam(
        "declarations: a document begins one token early",
        "layout.declarations:_cumulative_starts",
        result(_one_early),
        "layout/test_declarations.py",
        "test_declarations_alone_or_together_say_the_same[1]",
    ),
    _seam(
        "declarations: none is read",
        "layout.declarations:_declarations",
        returns(()),
        "layout/test_declarations.py",
        "test_any_two_that_disagree_are_refused_by_name_and_place[position_ids-cu_seq_lens_q]",
        "test_invalid_declarations_are_refused_in_words[negative positions]",
        "test_invalid_declarations_are_refused_in_words[segment that comes back]",
        "test_bounds_must_begin_every_row",
        "test_a_mask_of_ones_hides_no_other_declaration[said0]",
    ),
    _seam(
        "declarations: padding inside a document is taken",
        "layout.declarations:_with_padding",
        around(lambda cut, starts, real, later: cut(starts, real, np.zeros_like(later))),
        "layout/test_declarations.py",
        "test_invalid_declarations_are_refused_in_words[padding inside a document]",
    ),
    _seam(
        "host: what is known of a tensor outlives what is written to it",
        "layout.host:_Known.is_still",
        returns(True),
        "runtime/test_host_reads.py",
        "TestHostBatch::test_what_was_written_to_afterwards_is_not_known",
        "TestHostBatch::test_a_tensor_that_got_other_data_is_not_known",
        "TestHostBatch::test_what_counts_no_version_up_is_seen",
    ),
    _seam(
        "prefixes: equal tokens at other positions are taken together",
        "layout.prefixes:find",
        around(lambda find, tokens, positions, *more: find(tokens, positions * 0, *more)),
        "prefixes/test_layout.py",
        "test_equal_tokens_at_other_positions_are_others",
    ),
    _seam(
        "images: the mask may show those of another document",
        "layout.prepared:images_of_documents",
        around(lambda find, mask, layout, real: find(mask, _as_one(layout), None)),
        "multimodal/test_across.py",
        "TestMasks::test_that_shows_the_image_of_another_document[mllama]",
        "test_an_image_that_no_token_sees_is_of_no_document",
    ),
)


_RUNTIME = (
    _seam(
        "checkpointing: layers are recomputed without their layout",
        "runtime.runs:_Rebound.__call__",
        never(lambda bound, *args, **kwargs: bound.function(*args, **kwargs)),
        "runtime/test_delivery.py",
        "test_checkpointing_that_is_switched_on_between_two_forwards_is_followed",
        "test_disabling_between_a_checkpointed_forward_and_its_backward_raises[reentrant]",
        "test_torchs_checkpoint_wrapper_around_layers_is_exact[CheckpointImpl.REENTRANT-before]",
    ),
    _seam(
        "buffers: later documents begin with those that earlier ones left",
        "runtime.runs:Buffers.put_back",
        returns(False),
        "runtime/test_buffers_in_training.py",
        "test_documents_begin_with_the_buffers_of_the_call[bloom-by a hook]",
        "test_heads_that_run_documents_alone",
    ),
    _seam(
        "scope: what an interrupted forward left is in force",
        "runtime.scope:_running",
        returns(True),
        "runtime/test_delivery.py",
        "TestInterruptedForwards::test_the_next_call_has_its_own_layout[KeyboardInterrupt-model.embed_tokens]",
    ),
    _seam(
        "scope: the layout of another model is read",
        "runtime.scope:site_scope",
        never(_scope_of_anyone),
        "runtime/test_delivery.py",
        "TestOutsideForward::test_calling_a_layer_inside_the_forward_of_another_model",
    ),
    _seam(
        "arrival: a module goes past its site",
        "runtime.scope:check_arrival",
        skipped,
        "auditing/test_arrival.py",
        "test_attention_that_goes_past_its_site_raises[llama]",
    ),
    _seam(
        "arrival: a stranger attends over packed rows",
        "runtime.scope:refuse_stranger",
        skipped,
        "auditing/test_arrival.py",
        "test_a_stranger_that_attends_over_the_packed_row_raises[llama]",
    ),
    _seam(
        "padding read: no call runs as it came",
        "runtime.padding_read:PaddingRead.why_to_keep",
        skipped,
        "calls/test_padding_read.py",
        "test_who_reads_padding_gets_what_stock_gives[the mean over all columns]",
        "test_all_calls_before_the_first_gradient_run_as_they_came",
        "test_a_reader_that_begins_later_is_found_at_the_next_power_of_two",
        "test_results_without_a_gradient_keep_their_padding",
    ),
    _seam(
        "padding read: what is read beside a loss passes",
        "runtime.padding_read:PaddingRead.refuse",
        skipped,
        "calls/test_padding_beside_labels.py",
        "test_what_is_read_beside_the_loss_of_labels_raises[llama-causal-lm-square]",
        "test_what_is_read_beside_the_loss_of_labels_raises[bert-token-classification-logsumexp]",
    ),
    _seam(
        "shared rows: parts of rows in another order",
        "runtime.row_group:RowGroup.gather",
        result(lambda found: found.flip(0)),
        "integration/test_sequence_parallel.py",
        "test_shared_rows_are_exact",
    ),
    _seam(
        "sites: what was replaced stays",
        "patching:Site._set",
        around(_only_put),
        "test_patching.py",
        "test_a_function_is_replaced_by_a_plain_function_and_put_back",
        "test_users_are_counted_and_the_last_one_restores",
        "test_an_inherited_method_is_deleted_again_and_not_copied_down",
    ),
)


_CALLS = (
    _seam(
        "positions: those of models that begin elsewhere begin at 0",
        "calls.packed:add_positions",
        around(_from_0),
        "calls/test_entry.py",
        "test_roberta_likes_get_positions_after_their_padding_index[arguments0]",
    ),
    _seam(
        "positions: a padding token is counted on from the row",
        "inspection.positions:Numbering.of_counted",
        around(lambda count, numbering, config, ids, starts=None: count(numbering, config, ids)),
        "calls/test_first_positions.py",
        "test_a_padding_token_inside_a_document_is_numbered_as_alone[first-camembert]",
    ),
    _seam(
        "positions: those of left padding begin at 0",
        "inspection.positions:Numbering.in_padded_batch",
        never(lambda numbering, config, mask, ids: mask.long().cumsum(1) - 1),
        "calls/test_unpadding.py",
        "TestAgreement::test_logits_loss_and_gradients[gpt2-causal LM-left]",
    ),
    _seam(
        "unpadding: nothing keeps the padding of a batch",
        "calls.padding_rules:reasons_anywhere",
        returns(()),
        "calls/test_unpadding_choices.py",
        "TestLeftAsItCame::test_where_a_cache_is_wanted[llama]",
        "TestLeftAsItCame::test_left_padding_where_the_head_reads_the_first_column[pair0]",
        "TestLeftAsItCame::test_left_padding_before_an_encoder_that_is_a_decoder[roberta]",
        "TestLeftAsItCame::test_where_layers_take_some_tokens_at_a_time[before]",
        "attention/test_rotary.py",
        "test_documents_that_lose_the_columns_before_them_keep_their_padding",
        "calls/test_padding_read.py",
        "test_answers_are_looked_for_in_all_columns_in_evaluation_too",
        "test_what_a_mask_hides_and_is_no_padding_keeps_its_place",
        "integration/test_peft.py",
        "test_padding_stays_where_layers_are_given_something_for_each_row[_named]",
    ),
    _seam(
        "generation: its calls are read for documents",
        "calls.call:generates",
        returns(False),
        "runtime/test_counts.py",
        "test_generation_of_an_encoder_decoder_is_not_counted[options0]",
        "calls/test_generation.py",
        "test_the_same_tokens[llama-True]",
    ),
    _seam(
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
        "multimodal/test_image_of_each.py",
        "test_as_many_images_as_documents[1-blip]",
    ),
    _seam(
        "refusals: a prepared mask over documents",
        "calls.refusals:says_it_all",
        returns(False),
        "attention/test_prepared_masks.py",
        "test_one_that_lets_documents_see_each_other_contradicts_them",
    ),
    _seam(
        "refusals: a loss of labels that nobody has seen",
        "calls.refusals:check_loss",
        skipped,
        "unfamiliar/test_losses.py",
        "test_a_subclass_with_labels_of_its_own[llama]",
    ),
    _seam(
        "pairs: whatever packed rows of an encoder-decoder come with",
        "calls.encoder_decoder:PairCall.check_packed",
        skipped,
        "encoder_decoder/test_refused.py",
        "test_a_classification_head_refuses_packed_rows_with_tokens_of_a_decoder",
        "encoder_decoder/test_hidden_labels.py",
        "test_packed_rows_with_such_a_label_are_refused",
        "multimodal/test_image_encoders.py",
        "TestPPFormulaNet::test_tokens_that_it_would_shift",
    ),
    _seam(
        "prefixes: dropout and noise are drawn once",
        "calls.prefixes:_draws",
        returns(False),
        "prefixes/test_choices.py",
        "TestWhen::test_modules_of_dropout",
        "TestWhen::test_noise_on_embeddings",
    ),
    _seam(
        "images: a model numbers those of all documents in one call",
        "calls.with_media:positions_of_documents",
        around(lambda number, *given: number(*given[:3])),
        "multimodal/test_counted_images.py",
        "test_documents_with_images_get_what_they_get_alone",
    ),
    _seam(
        "images: rows of a padded batch read those of other rows",
        "calls.with_media:keep_images_to_rows",
        skipped,
        "multimodal/test_across.py",
        "test_rows_of_a_padded_batch_get_what_they_get_alone[mllama-left]",
        "multimodal/test_counted_images.py",
        "test_rows_of_a_padded_batch_get_what_they_get_alone[left]",
    ),
    _seam(
        "shared rows: whatever cannot be shared",
        "calls.sequence_parallel:_why_not",
        skipped,
        "integration/test_sequence_parallel.py",
        "test_what_is_not_exact_is_refused_on_every_rank[labels-UnsupportedModel-shift_labels]",
    ),
)


_MIXERS = (
    _seam(
        "convolution: taps reach into the document before",
        "mixers.in_torch:_outside",
        result(lambda lags: [each[:0] for each in lags]),
        "mixers/test_operations.py",
        "test_a_convolution_sees_zeros_before_every_document",
    ),
    _seam(
        "scan: state is carried on",
        "mixers.in_torch:_steps",
        around(lambda order, layout: order(_as_one(layout))),
        "mixers/test_operations.py",
        "test_the_selective_scan_is_that_of_transformers_on_every_document",
    ),
    _seam(
        "mixers: one first token too few is run again",
        "mixers.operations:run_and_redo_first_tokens",
        around(lambda redo, run, layout, reach: redo(run, layout, max(reach - 1, 0))),
        "mixers/test_operations.py",
        "test_heads_run_again_make_a_mixer_of_known_reach_exact",
    ),
    _seam(
        "kernels: none is told of documents",
        "inspection.releases:kernel_parameters",
        returns(frozenset()),
        "mixers/test_operations.py",
        "test_kernels_from_the_hub_are_told_or_get_one_document_per_row",
    ),
    _seam(
        "whole halves: the encoder runs on the row",
        "mixers:EncoderOneByOne.run",
        never(lambda way, call: _as_it_is(call)),
        "encoder_decoder/test_packed_rows.py",
        "test_every_form_gives_what_documents_give_alone[led]",
    ),
    _seam(
        "prefixes: mixers run on the row that shares",
        "mixers.site:_of_documents",
        never(lambda name, value, prefixes: value),
        "prefixes/test_exactness.py",
        "TestAgreement::test_logits_states_loss_and_gradients[falcon-labels]",
    ),
    _seam(
        "images: documents of BLIP get that of another",
        "mixers.site:_with_own_images",
        around(_of_another),
        "multimodal/test_image_of_each.py",
        "test_documents_get_what_they_get_alone[blip]",
    ),
    _seam(
        "images: GIT keeps the states of one",
        "architectures.images:_of_text",
        never(lambda output, batch: output),
        "multimodal/test_image_of_each.py",
        "test_documents_get_what_they_get_alone[git]",
    ),
    _seam(
        "XLM: columns are counted by padding tokens",
        "architectures.own_attention:_count_every_column",
        never(lambda original, site: original),
        "mixers/test_xlm.py",
        "test_padding_tokens_anywhere_in_the_row[xlm-left]",
        "test_a_document_that_holds_the_padding_token_is_refused[xlm]",
    ),
)


_PROOFS = (
    _seam(
        "collator: positions run on, and first labels count",
        "packing.collator:PackingCollator._assemble",
        result(_run_on),
        "packing/test_collator.py",
        "test_one_row_with_restarting_positions_and_first_labels_ignored",
    ),
    _seam(
        "collator: masks of images begin one image later",
        "packing.media:along_diagonal",
        result(lambda found: {name: np.roll(m, 1, axis=2) for name, m in found.items()}),
        "multimodal/test_across.py",
        "TestCollator::test_rows_get_what_documents_get_alone[mllama-None]",
    ),
    _seam(
        "audit: no document is replaced",
        "auditing.packed:PackedRuns._influence",
        result(lambda found: (found[0] * 0, 0.0, found[2])),
        "auditing/test_auditor_faults.py",
        "test_a_leak_that_shows_only_where_a_document_is_replaced_is_found[two rows]",
        "auditing/test_auditor.py",
        "test_influence_says_who_changes_whom",
    ),
    _seam(
        "audit: branches by chance are not run",
        "auditing.auditor:Audit._by_chance",
        returns([]),
        "auditing/test_branches_by_chance.py",
        "test_a_branch_that_mixes_tokens_is_refused[a number below]",
    ),
    _seam(
        "audit: what a model got in padded batches is not heard",
        "auditing.report:LeakReport.padded",
        returns(None),
        "auditing/test_auditor_faults.py",
        "test_padded_batches_that_an_audit_finds_wrong_stay_as_they_came",
    ),
    _seam(
        "enable: a model whose audit has leaked is enabled",
        "enabling.enable:_refuse_what_leaks",
        skipped,
        "enabling/test_enable.py",
        "TestFailures::test_an_audit_that_finds_a_leak",
    ),
    _seam(
        "enable: what is changed later is not noticed",
        "inspection.changes:Watch.changed",
        skipped,
        "unfamiliar/test_replaced_parts.py",
        "test_a_part_that_mixes_tokens[combination1-bloom-after]",
        "inspection/test_onlookers.py",
        "test_a_hook_on_the_backbone_is_audited_at_the_next_call",
        "unfamiliar/test_configurations.py",
        "test_a_field_that_is_changed_later_is_noticed[a field]",
        "test_a_field_that_is_changed_later_is_noticed[inside a dict]",
        "trust/test_whole_objects.py",
        "test_what_mixes_tokens_is_refused_after[a method of an instance]",
        "test_what_mixes_tokens_is_refused_after[F.silu]",
        "inspection/test_hooks_of_engines.py",
        "test_noise_of_neftune_that_is_none_and_then_some",
    ),
    _seam(
        "enable: what users' code calls is not followed",
        "inspection.followed:Followed._look_at",
        skipped,
        "trust/test_whole_objects.py",
        "test_what_users_code_calls_is_looked_at_again_when_it_changes[the code of a helper is swapped]",
        "test_what_users_code_calls_is_looked_at_again_when_it_changes[what a closure holds is swapped]",
        "test_what_users_code_calls_is_looked_at_again_when_it_changes[its class calls something else]",
    ),
    _seam(
        "origin: any function on a module is its own",
        "inspection.put_on:why_foreign_function",
        skipped,
        "trust/test_whole_objects.py",
        "test_what_mixes_tokens_is_refused_before[a function as an activation]",
        "test_what_mixes_tokens_is_refused_before[torch's own function as an activation]",
    ),
    _seam(
        "origin: hooks do not look at rows",
        "inspection.put_on:looks_at_rows",
        returns(False),
        "integration/test_peft.py",
        "test_weights_that_eva_makes_of_what_comes_to_layers_are_those_of_stock",
    ),
    _seam(
        "record: every model has been measured",
        "trust.recorded:why_not_recorded",
        skipped,
        "trust/test_recorded.py",
        "test_values_that_were_not_measured",
        "enabling/test_enable.py",
        "TestFailures::test_a_structure_that_nobody_has_run_is_audited",
    ),
    _seam(
        "twins: one speaks for parts of other kinds",
        "enabling.by_twin:parts_outside",
        returns([]),
        "proving/test_twins.py",
        "TestParts::test_one_that_mixes_tokens_is_not",
    ),
    _seam(
        "twins: parts are not run",
        "proving.parts:why_not_token_wise",
        skipped,
        "proving/test_parts.py",
        "test_what_looks_at_others[backward below its weight]",
        "test_what_looks_at_others[beyond 64 tokens]",
        "proving/test_narrow.py",
        "test_one_that_mixes_tokens_at_its_own_width_alone[cpu-dtype0]",
    ),
    _seam(
        "twins: a key of what is kept that always agrees",
        "proving.kept:key_of",
        returns("the key"),
        "proving/test_kept.py",
        "test_another_configuration_is_another_question",
    ),
    _seam(
        "twins: what is on the model does not come along",
        "proving.rebound:_Rebinding.of",
        never(lambda rebinding, value: value),
        "proving/test_rebound.py",
        "test_the_twin_runs_and_not_the_model[a method]",
        "test_a_forward_of_a_notebook_that_names_the_model[by_global]",
    ),
    _seam(
        "twins: what they say of further calls is not heard",
        "runtime.model:EnabledModel._ask_twin",
        skipped,
        "prefixes/test_exactness.py",
        "TestLeaks::test_the_twin_sees_that_too",
        "multimodal/test_media_by_twin.py",
        "test_one_that_lets_them_meet_is_refused_with_images_and_serves_text[llava]",
    ),
    _seam(
        "disable: nothing is taken off a model",
        "enabling.attach:detach",
        skipped,
        "enabling/test_enable.py",
        "TestRestoring::test_enable_changes_what_disable_restores[eager]",
        "TestRestoring::test_calls_in_between_leave_nothing",
    ),
    _seam(
        "disable: a handle disables nothing",
        "enabling.handle:Handle.remove",
        skipped,
        "enabling/test_several_models.py",
        "test_where_one_cannot_be_enabled_none_is",
    ),
    _seam(
        "trainers: a column of documents is dropped unseen",
        "integrations.trainers:TrainerAdapter.drops_columns",
        returns(False),
        "integration/test_trainer_adapters.py",
        "test_what_it_loses_is_found",
    ),
    _seam(
        "checks: no error is seen",
        "watching.checks:error_by_token",
        result(torch.zeros_like),
        "watching/test_watch.py",
        "test_a_layer_that_mixes_tokens_is_found[]",
        "test_a_small_leak_at_one_token_of_many_is_found",
    ),
    _seam(
        "checks: no call leaves what has been checked",
        "watching.envelope:Checked.is_left_by",
        returns(False),
        "watching/test_envelope.py",
        "test_a_call_that_goes_beyond_is_checked_itself[many documents]",
        "test_a_call_that_goes_beyond_is_checked_itself[an argument]",
        "test_what_begins_after_some_calls_is_found_at_the_next_power_of_two",
    ),
    _seam(
        "checks: gradients tell nothing",
        "watching.influence:leak_of",
        skipped,
        "watching/test_influence.py",
        "test_images_that_meet_where_they_are_large[with gradients]",
        "test_tokens_that_meet_where_every_document_has_an_image[tokens, straight through a choice]",
        "test_images_that_become_codes_are_said_to_be_unchecked",
    ),
    _seam(
        "origin: all code is the libraries' own",
        "inspection.code_origin:is_own",
        returns(True),
        "trust/test_whole_objects.py",
        "test_what_mixes_tokens_is_refused_before[a hook on all modules]",
        "test_what_mixes_tokens_is_refused_before[a function as an activation]",
        "trust/test_flash_attn_package.py",
        "test_others_in_their_place_are_not[flash_attn-a script]",
    ),
    _seam(
        "audit: nothing is compared",
        "auditing.fields:Sides.split",
        result(lambda found: ([{} for _ in found[0]], [{} for _ in found[1]], [])),
        "auditing/test_other_outputs.py",
        "test_what_leaks_beside_the_logits_is_refused[whole numbers]",
        "test_what_leaks_beside_the_logits_is_refused[a number]",
        "test_an_audit_does_not_pass_over_it_where_nothing_was_proven",
    ),
    _seam(
        "audit: within a budget nothing essential is run",
        "auditing.within:_Short._essential",
        skipped,
        "proving/test_budget.py",
        "TestBudget::test_a_model_of_which_too_little_is_known_is_refused",
        "TestFinds::test_rows_that_leak[MixesInTraining-in mode '.*, train' logits are off by]",
        "TestFinds::test_rows_that_leak[ClipsBack-in mode '.*, train' gradients are off by]",
    ),
    _seam(
        "checks: a document with images stands for one without",
        "watching.document:_without_media",
        never(lambda call, spans, turn: turn % len(spans)),
        "watching/test_influence.py",
        "test_no_alarm[molmo2-]",
    ),
    _seam(
        "ranks: nobody gathers parameters",
        "inspection.sharding:_groups_of",
        returns(()),
        "integration/test_ddp.py",
        "test_gradients_on_both_ranks_are_those_of_the_documents_alone[DDP, enabled before]",
    ),
)

SEAMS: tuple[Seam, ...] = (*_ATTENTION, *_LAYOUT, *_RUNTIME, *_CALLS, *_MIXERS, *_PROOFS)
