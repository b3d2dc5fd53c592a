"""The seams of where documents lie, and what is in force in a forward."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from compat.seam_breaks import Function, around, as_one, never, result, returns, seam, skipped


def _scope_of_anyone(module: Any, one_token: bool = False) -> Any:
    """Return the scope that is running, whatever model it is of."""
    from autopack.runtime.scope import running_scope

    return running_scope()


def _whatever_is_in_force() -> Any:
    """Return the innermost activation, whether its forward runs or not."""
    from autopack.runtime.scope import ambient

    return ambient.activation


def _of_one_size(derive: Function, layout: Any, key: Any, build: Function) -> Any:
    """Know what was derived by its name alone."""
    return derive(layout, key[0] if isinstance(key, tuple) else key, build)


def _only_put(put: Function, site: Any, value: Any) -> None:
    """Put a function of autopack in place, and nothing back."""
    if hasattr(value, "autopack_original"):
        put(site, value)


def _one_early(starts: np.ndarray) -> np.ndarray:
    """Begin each document one token before its first, too."""
    return starts | np.roll(starts, -1, axis=1)


_LAYOUT = (
    seam(
        "layout: what was derived for one size serves another",
        "layout.packed:PackedLayout.derived",
        around(_of_one_size),
        "layout/test_layout.py",
        "test_chunks_of_two_sizes_are_two_layouts",
        "mixers/test_operations.py",
        "test_convolutions_of_two_widths_share_a_layout",
    ),
    seam(
        "layout: positions do not restart",
        "layout.packed:PackedLayout.position_ids",
        around(lambda number, layout, first=0: number(as_one(layout), first)),
        "layout/test_layout.py",
        "test_every_view_agrees_with_the_lengths",
    ),
    seam(
        "layout: runs of padding are documents",
        "layout.packed:real_documents",
        result(np.ones_like),
        "mixers/test_encoders.py",
        "test_runs_of_padding_are_no_documents_that_a_model_has_to_run",
    ),
    seam(
        "layout: documents come back in the order of their batches",
        "layout.token_map:Batches.of",
        result(lambda found: replace(found, back=torch.arange(len(found.back)))),
        "mixers/test_rows.py",
        "test_any_causal_mixer_gets_every_document_once_and_from_its_start",
    ),
    seam(
        "layout: positions in sections are no tokens",
        "layout.forms:Frame.axis_of",
        around(lambda ask, frame, name, value: ask(frame, "", value)),
        "layout/test_forms.py",
        "test_each_kind_of_positions_is_changed_by_itself",
    ),
    seam(
        "padding: the row is one document",
        "layout.packed:rows_as_documents",
        result(as_one),
        "calls/test_unpadding.py",
        "TestAgreement::test_logits_loss_and_gradients[llama-causal LM-right]",
    ),
    seam(
        "padding: a token comes back in the column before",
        "layout.token_map:TokenMap.back",
        result(lambda places: places.roll(1)),
        "calls/test_unpadding.py",
        "TestAgreement::test_logits_loss_and_gradients[llama-causal LM-left]",
    ),
    seam(
        "padding: tokens behind padding keep their labels",
        "layout.token_map:TokenMap.unpredicted",
        result(lambda places: places[:0]),
        "calls/test_left_padding.py",
        "test_the_loss_is_that_without_them_and_they_are_said_once[left-True-False-False]",
        "test_the_loss_is_that_without_them_and_they_are_said_once[hole-True-False-False]",
    ),
    seam(
        "labels: the first of a document counts",
        "layout.packed:without_boundaries",
        never(lambda labels, *_: labels),
        "calls/test_ignored_labels.py",
        "test_packed_rows[llama]",
    ),
    seam(
        "declarations: a document begins one token early",
        "layout.declarations:_cumulative_starts",
        result(_one_early),
        "layout/test_declarations.py",
        "test_declarations_alone_or_together_say_the_same[1]",
    ),
    seam(
        "declarations: none is read",
        "layout.declarations:_declarations",
        returns(()),
        "layout/test_declarations.py",
        "test_any_two_that_disagree_are_refused_by_name_and_place[position_ids-cu_seq_lens_q]",
        "test_invalid_declarations_are_refused[negative positions]",
        "test_invalid_declarations_are_refused[segment that comes back]",
        "test_bounds_must_begin_every_row",
    ),
    seam(
        "declarations: padding inside a document is taken",
        "layout.declarations:_with_padding",
        around(lambda cut, starts, real, later: cut(starts, real, np.zeros_like(later))),
        "layout/test_declarations.py",
        "test_invalid_declarations_are_refused[padding inside a document]",
    ),
    seam(
        "host: what is known of a tensor outlives what is written to it",
        "layout.host:_Known.is_still",
        returns(True),
        "runtime/test_host_reads.py",
        "TestHostBatch::test_what_was_written_to_afterwards_is_not_known",
        "TestHostBatch::test_a_tensor_that_got_other_data_is_not_known",
        "TestHostBatch::test_what_counts_no_version_up_is_seen",
    ),
    seam(
        "prefixes: equal tokens at other positions are taken together",
        "calls.prefixes:find",
        around(lambda find, tokens, positions, *more: find(tokens, positions * 0, *more)),
        "prefixes/test_packed_rows.py",
        "TestWhen::test_equal_tokens_at_other_positions",
    ),
    seam(
        "images: the mask may show those of another document",
        "layout.prepared:images_of_documents",
        around(lambda find, mask, layout, real: find(mask, as_one(layout), None)),
        "multimodal/test_across.py",
        "TestMasks::test_that_is_not_of_these_documents[mllama-that shows the image of another "
        "document]",
        "test_an_image_that_no_token_sees_is_of_no_document",
    ),
)

_RUNTIME = (
    seam(
        "checkpointing: layers are recomputed without their layout",
        "runtime.scope:_Rebound.__call__",
        never(lambda bound, *args, **kwargs: bound.function(*args, **kwargs)),
        "runtime/test_delivery.py",
        "test_checkpointing_that_is_switched_on_between_two_forwards_is_followed",
        "test_disabling_between_a_checkpointed_forward_and_its_backward_raises[reentrant]",
    ),
    seam(
        "buffers: later documents begin with those that earlier ones left",
        "runtime.runs:Buffers.put_back",
        returns(False),
        "runtime/test_buffers_in_training.py",
        "test_documents_begin_with_the_buffers_of_the_call[bloom-by a hook]",
        "test_heads_that_run_documents_alone",
    ),
    seam(
        "scope: what an interrupted forward left is in force",
        "runtime.scope:current",
        never(_whatever_is_in_force),
        "runtime/test_delivery.py",
        "test_what_an_interrupted_forward_leaves_behind_is_never_used[model.embed_tokens-KeyboardInterrupt]",
    ),
    seam(
        "scope: the layout of another model is read",
        "runtime.scope:site_scope",
        never(_scope_of_anyone),
        "runtime/test_delivery.py",
        "test_calling_a_layer_inside_the_forward_of_another_model",
    ),
    seam(
        "arrival: a module goes past its site",
        "runtime.scope:ArrivalHook.__call__",
        skipped,
        "auditing/test_arrival.py",
        "test_attention_that_goes_past_its_site_raises[llama]",
    ),
    seam(
        "arrival: a stranger attends over packed rows",
        "attention.site:refuse_stranger",
        skipped,
        "auditing/test_arrival.py",
        "test_a_stranger_that_attends_over_the_packed_row_raises[llama]",
    ),
    seam(
        "padding read: no call runs as it came",
        "runtime.padding_read:PaddingRead.why_to_keep",
        skipped,
        "calls/test_padding_read.py",
        "test_who_reads_padding_gets_what_stock_gives[the mean over all columns]",
        "test_all_calls_before_the_first_gradient_run_as_they_came",
        "test_a_reader_that_begins_later_is_found_at_the_next_power_of_two",
        "test_results_without_a_gradient_keep_their_padding",
    ),
    seam(
        "padding read: what is read beside a loss passes",
        "runtime.padding_read:PaddingRead.refuse",
        skipped,
        "calls/test_padding_beside_labels.py",
        "test_what_is_read_beside_the_loss_of_labels_raises[llama-causal-lm-square]",
        "test_what_is_read_beside_the_loss_of_labels_raises[bert-token-classification-logsumexp]",
    ),
    seam(
        "shared rows: parts of rows in another order",
        "runtime.row_group:RowGroup.gather",
        result(lambda found: found.flip(0)),
        "integration/test_processes.py",
        "test_every_rank_finds_what_it_has_to[shared_rows-llama]",
    ),
    seam(
        "sites: what was replaced stays",
        "patching:Site._set",
        around(_only_put),
        "test_patching.py",
        "test_functions_are_replaced_by_plain_functions_and_put_back",
        "test_users_are_counted_and_the_last_one_restores",
        "test_an_inherited_method_is_deleted_again_and_not_copied_down",
    ),
)

SEAMS = (*_LAYOUT, *_RUNTIME)
