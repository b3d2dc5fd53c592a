"""The seams: named functions of autopack, how each is broken, and the tests that have to notice.

A function that is renamed changes one word here. `compat/results/mutants_to_seams.tsv` says which seam stands for which
of the breaks of source text that 0.2 was tried with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

Function = Callable[..., Any]
Break = Callable[[Function], Function]
"""Makes of a function the one that takes its place."""


@dataclass(frozen=True)
class Seam:
    """A function by its dotted name ("module:Class.name"), what breaks it, and the tests that must fail then."""

    name: str
    at: str
    breaks: Break
    tests: tuple[str, ...]


def unchanged(function: Function) -> Function:
    """Return the function itself: what the tests have to pass with."""
    return function


def returns(value: Any) -> Break:
    """Return a value without calling the function."""
    return lambda function: lambda *args, **kwargs: value


skipped = returns(None)
"""Do nothing: what the function refuses passes, what it does is not done."""


def result(change: Function) -> Break:
    """Return what `change` makes of the function's result."""
    return lambda function: lambda *args, **kwargs: change(function(*args, **kwargs))


def around(change: Function) -> Break:
    """Call `change` with the function and its arguments instead."""
    return lambda function: lambda *args, **kwargs: change(function, *args, **kwargs)


def never(change: Function) -> Break:
    """Return what `change` gives of the arguments, without calling the function."""
    return lambda function: change


def stale(function: Function) -> Function:
    """Return for ever what the function gave of its first argument when it was first asked."""
    known: dict[int, Any] = {}

    def first(*args: Any, **kwargs: Any) -> Any:
        if id(args[0]) not in known:
            known[id(args[0])] = (args[0], function(*args, **kwargs))
        return known[id(args[0])][1]

    return first


def _as_one(layout: Any) -> Any:
    """Return the layout of the same rows, each one document."""
    return type(layout).from_lengths([[layout.columns]] * layout.rows, layout.device)


def _seam(name: str, at: str, breaks: Break, *tests: str) -> Seam:
    return Seam(name, f"autopack.{at}", breaks, tuple(f"tests/{test}" for test in tests))


_STATES = "encoder_hidden_states"


def _scope_of_anyone() -> Any:
    """Return the scope that is running, whatever model it is of."""
    from autopack.runtime.scope import running_scope

    return running_scope()


def _from_0(add: Function, call: Any, arguments: dict[str, Any], layout: Any) -> None:
    """Add positions that restart at 0, whatever the model begins with."""
    arguments["position_ids"] = layout.position_ids(0)


_ATTENTION = (
    _seam(
        "attention: the mask of a document is lost",
        "attention.document_mask:DocumentMask.for_document",
        returns(None),
        "compat/test_fuzz.py::test_every_form_of_call_is_exact[results-positions]",
    ),
    _seam(
        "attention: the mask of one length serves another",
        "attention.document_mask:DocumentMask.for_length",
        stale,
        "unfamiliar/test_configurations.py::test_a_configuration_that_is_changed[after-window of the config]",
    ),
    _seam(
        "attention: documents are cut in another order",
        "attention.per_document:_by_document",
        result(lambda parts: parts[::-1]),
        "calls/test_entry.py::test_rows_may_have_different_documents",
    ),
    _seam(
        "masks: what rules read of tokens is not seen",
        "inspection.masks:captured_tensors",
        returns(()),
        "multimodal/test_packed_rows.py::test_equally_long_documents_have_their_images_where_they_have_them[gemma3-sdpa]",
    ),
    _seam(
        "masks: the wider of two windows",
        "inspection.mask_rules:_least",
        never(lambda one, other: max((each for each in (one, other) if each is not None), default=None)),
        "attention/test_mask_rules.py::test_a_pattern_is_what_its_rule_says_of_every_pair[pattern_of-the narrower of two windows]",
    ),
    _seam(
        "masks: chunks are counted by the padding of a row",
        "inspection.masks:_without_padding",
        never(lambda function: function),
        "attention/test_mask_rules.py::test_chunks_of_transformers_are_those_of_a_document_without_padding",
    ),
    _seam(
        "flex: documents have one number",
        "layout.packed:PackedLayout.seq_idx",
        result(torch.zeros_like),
        "attention/test_flex.py::test_packed_equals_alone[llama]",
        "attention/test_flex.py::test_a_block_mask_of_the_models_own_is_cut_by_documents",
    ),
    _seam(
        "flex: documents begin where the row does",
        "layout.packed:PackedLayout.start_columns",
        result(torch.zeros_like),
        "attention/test_flex.py::test_packed_equals_alone[llama4_text]",
    ),
    _seam(
        "flex: what begins alike is one document",
        "attention.backends.flex:_blocks_of_tree",
        around(lambda make, prefixes, own: make(prefixes, lambda b, h, q, k: own(b, h, q, q * 0))),
        "prefixes/test_exactness.py::TestAgreement::test_every_backend[llama-flex]",
    ),
    _seam(
        "flash: a row is one document",
        "attention.backends.flash:attend_between",
        around(lambda run, call, layout, memory, options: run(call, _as_one(layout), _as_one(memory), options)),
        "attention/test_flash.py::test_several_rows_with_layouts_of_their_own_are_flattened",
    ),
    _seam(
        "varlen: a row is one document",
        "attention.backends.varlen:attend_varlen",
        around(lambda run, layout, *states, **more: run(_as_one(layout), *states, **more)),
        "attention/test_varlen.py::test_equals_each_document_alone[causal-(16, 16)-2.14.1]",
    ),
    _seam(
        "varlen: windows are dropped",
        "inspection.torches:attend_varlen",
        around(lambda run, *given, **more: run(*given[:6], (-1, given[6][1]), *given[7:], **more)),
        "attention/test_varlen.py::test_equals_each_document_alone[window-(16, 16)-2.14.1]",
    ),
    _seam(
        "varlen: what torch's kernel lacks is asked of it",
        "attention.backends.varlen:refusal",
        returns(None),
        "attention/test_varlen.py::test_equals_each_document_alone[window-(16, 16)-2.10.0]",
    ),
    _seam(
        "autocast: attention takes the dtype that states have",
        "inspection.torches:taken_by_sdpa",
        never(lambda states: states.dtype),
        "attention/test_autocast.py::test_packed_rows_are_documents_alone_up_to_the_rounding_of_the_dtype[llama-compiled-bf16]",
        "attention/test_autocast.py::test_torchs_own_kernels_are_taken_for_weights_in_float32[llama-bf16]",
    ),
    _seam(
        "rotary: all documents have the frequencies of the longest",
        "attention.rotary:_groups",
        result(lambda groups: [np.sort(np.concatenate(list(groups)))]),
        "attention/test_rotary.py::test_packed_rows_with_short_and_long_documents_are_exact[phi3 longrope]",
    ),
    _seam(
        "rotary: frequencies stay for the next document",
        "attention.rotary:reset_frequencies",
        skipped,
        "attention/test_rotary.py::test_documents_that_are_all_longer_than_the_model_was_trained_on",
        "attention/test_rotary.py::test_a_packed_call_does_not_change_what_an_unpacked_one_sees[llama dynamic NTK-long]",
    ),
    _seam(
        "rotary: threads share frequencies",
        "attention.rotary:_of_this_call",
        never(lambda module: module),
        "attention/test_rotary.py::test_threads_that_share_a_model_have_frequencies_of_their_own",
    ),
    _seam(
        "directions: is_causal may contradict the mask",
        "attention.call:AttentionCall.refuse_two_directions",
        skipped,
        "attention/test_directions.py::test_it_is_refused[llama-before]",
    ),
    _seam(
        "images: tokens see those of other documents",
        "attention.cross:_one_by_one",
        around(
            lambda run, *given: run(
                *given[:5], [(row, queries, slice(0, given[2][1].shape[2])) for row, queries, _ in given[5]]
            )
        ),
        "multimodal/test_across.py::test_tokens_before_an_image_and_documents_without_one[mllama]",
    ),
)


_LAYOUT = (
    _seam(
        "layout: what was derived for one size serves another",
        "layout.packed:PackedLayout.derived",
        around(lambda derive, layout, key, build: derive(layout, key[0] if isinstance(key, tuple) else key, build)),
        "layout/test_layout.py::test_chunks_of_two_sizes_are_two_layouts",
        "mixers/test_operations.py::test_convolutions_of_two_widths_share_a_layout",
    ),
    _seam(
        "layout: positions do not restart",
        "layout.packed:PackedLayout.position_ids",
        around(lambda number, layout, first=0: number(_as_one(layout), first)),
        "layout/test_layout.py::test_every_view_agrees_with_the_lengths",
    ),
    _seam(
        "layout: long padding is one document",
        "layout.packed:_cut",
        never(lambda bounds, size: bounds),
        "trust/test_configurations.py::test_a_run_of_padding_is_cut_to_the_length_of_documents",
    ),
    _seam(
        "layout: runs of padding are documents",
        "layout.packed:real_documents",
        result(np.ones_like),
        "mixers/test_encoders.py::test_runs_of_padding_are_no_documents_that_a_model_has_to_run",
    ),
    _seam(
        "layout: masks of other rows are cut",
        "layout.batches:DocumentBatch.square",
        never(lambda batch, mask: mask),
        "layout/test_layout.py::test_a_mask_of_other_rows_is_not_cut[shape0]",
    ),
    _seam(
        "layout: documents come back in the order of their batches",
        "layout.batches:Batches.of",
        result(lambda found: replace(found, back=torch.arange(len(found.back)))),
        "mixers/test_rows.py::test_any_causal_mixer_gets_every_document_once_and_from_its_start",
    ),
    _seam(
        "layout: padding of a batch of documents is kept",
        "layout.batches:DocumentBatch.real",
        never(lambda batch, states: states.reshape(-1, *states.shape[2:])[: len(batch.tokens)]),
        "mixers/test_rows.py::test_any_causal_mixer_gets_every_document_once_and_from_its_start",
    ),
    _seam(
        "layout: positions in sections are no tokens",
        "layout.forms:Frame.form_of",
        around(lambda ask, frame, name, value: ask(frame, "", value)),
        "layout/test_forms.py::test_each_kind_of_positions_is_changed_by_itself",
    ),
    _seam(
        "padding: the row is one document",
        "layout.padding:Padding.layout",
        result(_as_one),
        "calls/test_unpadding.py::TestAgreement::test_any_number_of_rows[2-llama]",
    ),
    _seam(
        "padding: a token comes back in the column before",
        "layout.padding:Padding._restored",
        around(lambda put, padding, tokens, along: put(padding, tokens.roll(-1, along), along)),
        "calls/test_unpadding.py::TestAgreement::test_any_number_of_rows[1-llama]",
    ),
    _seam(
        "padding: tokens behind padding keep their labels",
        "layout.padding:Padding.unpredicted",
        result(lambda places: places[:0]),
        "calls/test_ignored_labels.py::test_padded_batches[llama]",
    ),
    _seam(
        "padding: what is put there has no slope",
        "layout.padding:Padding.restore",
        around(lambda restore, padding, row, axis=1, fill=False: restore(padding, row, axis)),
        "calls/test_padding_beside_labels.py::test_what_is_read_beside_the_loss_of_labels_raises[llama-causal-lm-square]",
    ),
    _seam(
        "labels: the first of a document counts",
        "layout.packed:without_boundaries",
        never(lambda labels, *_: labels),
        "calls/test_ignored_labels.py::test_packed_rows[llama]",
    ),
    _seam(
        "labels: the last of a document is left out, by another value",
        "layout.packed:without_boundaries",
        around(lambda cut, labels, layout, *_: cut(labels, layout, True)),
        "calls/test_ignored_labels.py::test_packed_rows[llama]",
    ),
    _seam(
        "declarations: a document begins one token early",
        "layout.declarations:_cumulative_starts",
        result(lambda starts: starts | np.roll(starts, -1, axis=1)),
        "layout/test_declarations.py::test_declarations_alone_or_together_say_the_same[1]",
    ),
    _seam(
        "declarations: a mask of ones says all",
        "layout.declarations:_declares_nothing",
        around(lambda ask, host: "attention_mask" in host or ask(host)),
        "layout/test_declarations.py::test_a_mask_of_ones_hides_no_other_declaration[said0]",
    ),
    _seam(
        "declarations: two that disagree are taken",
        "layout.declarations:_check_agreement",
        skipped,
        "layout/test_declarations.py::test_any_two_that_disagree_are_refused_by_name_and_place[position_ids-cu_seq_lens_q]",
    ),
    _seam(
        "declarations: negative positions are taken",
        "layout.declarations:_position_starts",
        around(lambda read, positions, real: read(np.abs(positions), real)),
        "layout/test_declarations.py::test_invalid_declarations_are_refused_in_words[negative positions]",
    ),
    _seam(
        "declarations: padding inside a document is taken",
        "layout.declarations:_with_padding",
        around(lambda cut, starts, real, later: cut(starts, real, np.zeros_like(later))),
        "layout/test_declarations.py::test_invalid_declarations_are_refused_in_words[padding inside a document]",
    ),
    _seam(
        "declarations: a segment that comes back is another document",
        "layout.declarations:_segment_starts",
        never(lambda mask: np.diff(mask, axis=1, prepend=-1) != 0),
        "layout/test_declarations.py::test_invalid_declarations_are_refused_in_words[segment that comes back]",
    ),
    _seam(
        "host: what is known of a tensor outlives what is written to it",
        "layout.host:_Known.is_still",
        returns(True),
        "runtime/test_host_reads.py::TestHostBatch::test_what_was_written_to_afterwards_is_not_known",
        "runtime/test_host_reads.py::TestHostBatch::test_a_tensor_that_got_other_data_is_not_known",
        "runtime/test_host_reads.py::TestHostBatch::test_what_counts_no_version_up_is_seen",
    ),
    _seam(
        "host: a tensor's state is always the same",
        "layout.host:_State.of",
        returns("the state"),
        "runtime/test_host_reads.py::test_padding_that_was_noted_is_forgotten_where_the_tokens_are_written_to",
    ),
    _seam(
        "prefixes: equal tokens at other positions are taken together",
        "layout.prefixes:find",
        around(lambda find, tokens, positions, *rest: find(tokens, positions * 0, *rest)),
        "prefixes/test_layout.py::test_equal_tokens_at_other_positions_are_others",
    ),
    _seam(
        "images: the mask may show those of another document",
        "layout.prepared:images_of_documents",
        around(lambda find, mask, layout, real: find(mask, _as_one(layout), None)),
        "multimodal/test_across.py::TestMasks::test_that_shows_the_image_of_another_document[mllama]",
        "multimodal/test_across.py::test_an_image_that_no_token_sees_is_of_no_document",
    ),
)


_RUNTIME = (
    _seam(
        "checkpointing: layers are recomputed without their layout",
        "runtime.runs:_Rebound.__call__",
        never(lambda bound, *args, **kwargs: bound.function(*args, **kwargs)),
        "runtime/test_delivery.py::test_checkpointed_layers_are_recomputed_with_the_layout_of_their_forward[torch.float64-1e-09-sdpa-reentrant-before]",
        "runtime/test_delivery.py::test_disabling_between_a_checkpointed_forward_and_its_backward_raises[reentrant]",
    ),
    _seam(
        "checkpointing: torch's wrappers are not bound",
        "runtime.runs:_checkpoint_functions",
        result(lambda found: [each for each in found if each[1] != "checkpoint_fn"]),
        "runtime/test_delivery.py::test_torchs_checkpoint_wrapper_around_layers_is_exact[CheckpointImpl.REENTRANT-before]",
    ),
    _seam(
        "checkpointing: functions of others see no partial",
        "runtime.runs:_rebound",
        around(lambda bind, function, scope: bind(lambda *args, **kwargs: function(*args, **kwargs), scope)),
        "runtime/test_delivery.py::test_checkpoint_functions_of_others_see_which_layer_they_get[a partial of a method]",
    ),
    _seam(
        "buffers: later documents begin with those that earlier ones left",
        "runtime.runs:Buffers.put_back",
        returns(False),
        "runtime/test_buffers_in_training.py::test_documents_begin_with_the_buffers_of_the_call[bloom-by a hook]",
        "runtime/test_buffers_in_training.py::test_heads_that_run_documents_alone",
    ),
    _seam(
        "scope: what an interrupted forward left is in force",
        "runtime.scope:_running",
        returns(True),
        "runtime/test_delivery.py::TestInterruptedForwards::test_the_next_call_has_its_own_layout[KeyboardInterrupt-model.embed_tokens]",
    ),
    _seam(
        "scope: the layout of another model is read",
        "runtime.scope:site_scope",
        never(lambda module, one_token=False: _scope_of_anyone()),
        "runtime/test_delivery.py::TestOutsideForward::test_calling_a_layer_inside_the_forward_of_another_model",
    ),
    _seam(
        "arrival: a module goes past its site",
        "runtime.scope:check_arrival",
        skipped,
        "auditing/test_arrival.py::test_attention_that_goes_past_its_site_raises[llama]",
    ),
    _seam(
        "arrival: a stranger attends over packed rows",
        "runtime.scope:refuse_stranger",
        skipped,
        "auditing/test_arrival.py::test_a_stranger_that_attends_over_the_packed_row_raises[llama]",
    ),
    _seam(
        "counts: padding of packed rows counts as tokens",
        "runtime.tally:Volume.of_layout",
        result(lambda volume: volume._replace(tokens=volume.columns)),
        "runtime/test_counts.py::test_a_call_of_a_language_model[call1-expected1]",
    ),
    _seam(
        "padding read: no call runs as it came",
        "runtime.padding_read:PaddingRead.why_to_keep",
        skipped,
        "calls/test_padding_read.py::test_who_reads_padding_gets_what_stock_gives[the mean over all columns]",
        "calls/test_padding_read.py::test_all_calls_before_the_first_gradient_run_as_they_came",
        "calls/test_padding_read.py::test_a_reader_that_begins_later_is_found_at_the_next_power_of_two",
        "calls/test_padding_read.py::test_checkpoints_run_a_batch_again_as_it_was_run[False]",
        "calls/test_padding_read.py::test_results_without_a_gradient_keep_their_padding",
    ),
    _seam(
        "padding read: what is read beside a loss passes",
        "runtime.padding_read:PaddingRead.refuse",
        skipped,
        "calls/test_padding_beside_labels.py::test_what_is_read_beside_the_loss_of_labels_raises[llama-causal-lm]",
        "calls/test_padding_beside_labels.py::test_what_is_read_beside_the_loss_of_labels_raises[bert-token-classification]",
    ),
    _seam(
        "shared rows: parts of rows in another order",
        "runtime.row_group:RowGroup.gather",
        result(lambda found: found.flip(0)),
        "integration/test_sequence_parallel.py::test_shared_rows_are_exact",
    ),
    _seam(
        "sites: what was replaced stays",
        "patching:Site._set",
        around(lambda put, site, value: put(site, value) if hasattr(value, "autopack_original") else None),
        "test_patching.py::test_a_function_is_replaced_by_a_plain_function_and_put_back",
        "test_patching.py::test_users_are_counted_and_the_last_one_restores",
        "test_patching.py::test_an_inherited_method_is_deleted_again_and_not_copied_down",
    ),
)


_CALLS = (
    _seam(
        "positions: those of models that begin elsewhere begin at 0",
        "calls.packed:add_positions",
        around(_from_0),
        "calls/test_entry.py::test_roberta_likes_get_positions_after_their_padding_index[arguments0]",
    ),
    _seam(
        "positions: a padding token is counted on from the row",
        "inspection.positions:Numbering.of_counted",
        around(lambda count, numbering, config, ids, starts=None: count(numbering, config, ids)),
        "calls/test_first_positions.py::test_a_padding_token_inside_a_document_is_numbered_as_alone[first-camembert]",
    ),
    _seam(
        "positions: those of left padding begin at 0",
        "inspection.positions:Numbering.in_padded_batch",
        never(lambda numbering, config, mask, ids: mask.long().cumsum(1) - 1),
        "calls/test_unpadding.py::TestAgreement::test_logits_loss_and_gradients[gpt2-causal LM-left]",
    ),
    _seam(
        "unpadding: nothing keeps the padding of a batch",
        "calls.padding_rules:reasons_anywhere",
        returns(()),
        "calls/test_unpadding_choices.py::TestLeftAsItCame::test_where_a_cache_is_wanted[llama]",
        "calls/test_unpadding_choices.py::TestLeftAsItCame::test_left_padding_where_the_head_reads_the_first_column[pair0]",
        "calls/test_unpadding_choices.py::TestLeftAsItCame::test_left_padding_before_an_encoder_that_is_a_decoder[roberta]",
        "calls/test_unpadding_choices.py::TestLeftAsItCame::test_where_layers_take_some_tokens_at_a_time[before]",
        "attention/test_rotary.py::test_documents_that_lose_the_columns_before_them_keep_their_padding",
        "calls/test_padding_read.py::test_answers_are_looked_for_in_all_columns_in_evaluation_too",
        "calls/test_padding_read.py::test_what_a_mask_hides_and_is_no_padding_keeps_its_place",
        "integration/test_peft.py::test_padding_stays_where_layers_are_given_something_for_each_row[_named]",
    ),
    _seam(
        "unpadding: a row is not told the shape of the batch",
        "calls.unpadded:row_sizes",
        returns({}),
        "layout/test_padding.py::test_a_row_has_another_shape_than_the_batch_that_its_head_names",
    ),
    _seam(
        "generation: its calls are read for documents",
        "calls.call:generates",
        returns(False),
        "runtime/test_counts.py::test_generation_of_an_encoder_decoder_is_not_counted[options0-auto]",
        "calls/test_generation.py::test_the_same_tokens[llama-auto]",
    ),
    _seam(
        "refusals: whatever packed rows come with",
        "calls.refusals:check_packed",
        skipped,
        "calls/test_entry.py::test_what_cannot_be_packed_is_refused_before_any_token_is_computed[a cache is wanted]",
        "calls/test_first_positions.py::test_positions_that_restart_at_0_are_refused[camembert]",
        "mixers/test_encoders.py::test_entities_beside_the_row_are_refused_and_tokens_alone_are_not",
        "test_patching.py::test_packed_calls_of_an_enabled_model_notice_a_newcomer",
        "mixers/test_own_attention.py::test_labels_at_padding_of_a_model_that_leaves_it_out[xlnet-causal-lm]",
        "multimodal/test_sounds.py::test_where_padding_would_tell_sounds_have_one_length[granite_speech]",
        "multimodal/test_image_of_each.py::test_as_many_images_as_documents[1-blip]",
    ),
    _seam(
        "refusals: a prepared mask over documents",
        "calls.refusals:says_it_all",
        returns(False),
        "attention/test_prepared_masks.py::test_one_that_lets_documents_see_each_other_contradicts_them",
    ),
    _seam(
        "refusals: a loss of labels that nobody has seen",
        "calls.refusals:check_loss",
        skipped,
        "unfamiliar/test_losses.py::test_a_subclass_with_labels_of_its_own[llama]",
    ),
    _seam(
        "pairs: whatever packed rows of an encoder-decoder come with",
        "calls.encoder_decoder:PairCall.check_packed",
        skipped,
        "encoder_decoder/test_refused.py::test_a_classification_head_refuses_packed_rows_with_tokens_of_a_decoder",
        "encoder_decoder/test_hidden_labels.py::test_packed_rows_with_such_a_label_are_refused",
        "multimodal/test_image_encoders.py::TestPPFormulaNet::test_tokens_that_it_would_shift",
    ),
    _seam(
        "pairs: a label that is hidden from the decoder is seen",
        "calls.encoder_decoder:PairCall.hides_labels",
        returns(False),
        "encoder_decoder/test_hidden_labels.py::test_a_label_that_is_hidden_keeps_the_padding[0]",
    ),
    _seam(
        "outputs: images of a batch are taken for something of its row",
        "calls.per_row_outputs:of_each_row",
        around(lambda find, *given: find(*given[:4], 9)),
        "multimodal/test_padded_batches.py::test_one_image_in_the_whole_batch[gemma3]",
    ),
    _seam(
        "outputs: fields that are to be left out are returned",
        "calls.outputs:without",
        never(lambda output, names: output),
        "auditing/test_other_outputs.py::test_what_is_left_out_by_name_is_not_returned_by_packed_calls_and_all_else_is_exact[nobody can attribute-more]",
    ),
    _seam(
        "prefixes: dropout and noise are drawn once",
        "calls.prefixes:_draws",
        returns(False),
        "prefixes/test_choices.py::TestWhen::test_modules_of_dropout",
        "prefixes/test_choices.py::TestWhen::test_noise_on_embeddings",
    ),
    _seam(
        "prefixes: losses of routers count shared tokens once",
        "calls.call:Call.wants_router_loss",
        returns(False),
        "prefixes/test_choices.py::TestWhen::test_losses_of_routers_count_tokens",
    ),
    _seam(
        "prefixes: what the twin says is not heard",
        "runtime.model:EnabledModel.why_prefixes_stay",
        skipped,
        "prefixes/test_exactness.py::TestLeaks::test_the_twin_sees_that_too",
    ),
    _seam(
        "images: a model numbers those of all documents in one call",
        "calls.with_media:positions_of_documents",
        around(lambda number, *given: number(*given[:3])),
        "multimodal/test_counted_images.py::test_documents_with_images_get_what_they_get_alone",
    ),
    _seam(
        "images: rows of a padded batch read those of other rows",
        "calls.with_media:keep_images_to_rows",
        skipped,
        "multimodal/test_across.py::test_rows_of_a_padded_batch_get_what_they_get_alone[mllama-left]",
        "multimodal/test_counted_images.py::test_rows_of_a_padded_batch_get_what_they_get_alone[left-auto]",
    ),
    _seam(
        "shared rows: whatever cannot be shared",
        "calls.sequence_parallel:_why_not",
        skipped,
        "integration/test_sequence_parallel.py::test_what_is_not_exact_is_refused_on_every_rank[labels-UnsupportedModel-shift_labels]",
    ),
    _seam(
        "shared rows: labels of the next document count",
        "calls.sequence_parallel:_refuse_targets_across",
        skipped,
        "integration/test_sequence_parallel.py::test_what_is_not_exact_is_refused_on_every_rank[boundaries-InvalidPacking-where a document ends]",
    ),
)


_MIXERS = (
    _seam(
        "convolution: taps reach into the document before",
        "mixers.in_torch:_outside",
        result(lambda lags: [each[:0] for each in lags]),
        "mixers/test_operations.py::test_a_convolution_sees_zeros_before_every_document",
    ),
    _seam(
        "scan: state is carried on",
        "mixers.in_torch:_steps",
        around(lambda order, layout: order(_as_one(layout))),
        "mixers/test_operations.py::test_the_selective_scan_is_that_of_transformers_on_every_document",
    ),
    _seam(
        "scan: no gradient of the decay",
        "mixers.in_torch:LinearRecurrence.backward",
        result(lambda found: (torch.zeros_like(found[0]), *found[1:])),
        "mixers/test_operations.py::test_the_gradient_of_the_recurrence",
    ),
    _seam(
        "mixers: one first token too few is run again",
        "mixers.operations:run_and_redo_first_tokens",
        around(lambda redo, run, layout, reach: redo(run, layout, max(reach - 1, 0))),
        "mixers/test_operations.py::test_heads_run_again_make_a_mixer_of_known_reach_exact",
    ),
    _seam(
        "kernels: a scan is told of one document",
        "mixers.operations:_Scan.__call__",
        around(lambda scan, way, original, layout, *given: scan(way, original, _as_one(layout), *given)),
        "mixers/test_operations.py::test_kernels_from_the_hub_are_told_or_get_one_document_per_row",
    ),
    _seam(
        "kernels: none is told of documents",
        "inspection.releases:kernel_parameters",
        returns(frozenset()),
        "mixers/test_operations.py::test_kernels_from_the_hub_are_told_or_get_one_document_per_row",
    ),
    _seam(
        "whole halves: the encoder runs on the row",
        "mixers:EncoderOneByOne.run",
        never(lambda way, call: call.changed(lambda name, value: value)),
        "encoder_decoder/test_packed_rows.py::test_every_form_gives_what_documents_give_alone[led]",
    ),
    _seam(
        "prefixes: mixers run on the row that shares",
        "mixers.site:_of_documents",
        never(lambda name, value, prefixes: value),
        "prefixes/test_exactness.py::TestAgreement::test_logits_states_loss_and_gradients[falcon-labels]",
    ),
    _seam(
        "images: documents of BLIP get that of another",
        "mixers.site:_with_own_images",
        around(lambda cut, mixer, given, layout: cut(mixer, {**given, _STATES: given[_STATES].flip(0)}, layout)),
        "multimodal/test_image_of_each.py::test_documents_get_what_they_get_alone[blip]",
    ),
    _seam(
        "images: GIT keeps the states of one",
        "architectures.images:_of_text",
        never(lambda output, batch: output),
        "multimodal/test_image_of_each.py::test_documents_get_what_they_get_alone[git]",
    ),
    _seam(
        "XLM: columns are counted by padding tokens",
        "architectures.own_attention:_count_every_column",
        never(lambda original, site: original),
        "mixers/test_xlm.py::test_padding_tokens_anywhere_in_the_row[xlm-left]",
        "mixers/test_xlm.py::test_a_document_that_holds_the_padding_token_is_refused[xlm]",
    ),
    _seam(
        "families: rotations that an older release cuts",
        "registry:_here",
        never(lambda family, mixers: family),
        "architectures/test_older_families.py::test_rotations_that_an_older_release_cuts_restart_at_every_document",
    ),
)

SEAMS: tuple[Seam, ...] = (*_ATTENTION, *_LAYOUT, *_RUNTIME, *_CALLS, *_MIXERS)
