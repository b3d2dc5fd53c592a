"""The seams of attention within documents, and mixers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from compat.seam_breaks import (
    Function,
    around,
    as_one,
    never,
    result,
    returns,
    seam,
    skipped,
    stale,
)

_STATES = "encoder_hidden_states"


def _see_all_images(run: Function, *given: Any) -> Any:
    """Attend from each document to the images of all."""
    *others, places = given
    keys = slice(0, others[2][1].shape[2])
    return run(*others, [(row, queries, keys) for row, queries, _ in places])


def _of_another(run: Function, mixer: Any, arguments: dict[str, Any], layout: Any) -> Any:
    """Hand each document the image of another."""
    return run(mixer, {**arguments, _STATES: arguments[_STATES].flip(0)}, layout)


def _wider(one: Any, other: Any) -> Any:
    """Return the larger of two reaches."""
    return max((each for each in (one, other) if each is not None), default=None)


def _as_it_is(call: Any) -> Any:
    """Run a module on the row, as if it kept documents apart."""
    return call.changed(lambda name, value: value)


_ATTENTION = (
    seam(
        "attention: the mask of a document is lost",
        "attention.document_mask:DocumentMask.for_document",
        returns(None),
        "compat/test_fuzz.py",
        "test_every_form_of_call_is_exact[results-positions]",
    ),
    seam(
        "attention: the mask of one length serves another",
        "attention.document_mask:DocumentMask.for_length",
        stale,
        "unfamiliar/test_configurations.py",
        "test_a_configuration[changed-mistral-window of the config-after]",
    ),
    seam(
        "attention: documents are cut in another order",
        "attention.per_document:_by_document",
        result(lambda parts: parts[::-1]),
        "calls/test_entry.py",
        "test_rows_may_have_different_documents",
    ),
    seam(
        "attention: documents of one length are put back in another order",
        "attention.per_document:_attend_as_batches",
        result(lambda found: found.flip(1)),
        "attention/test_per_document.py",
        "test_many_short_documents_are_those_alone[gemma2]",
    ),
    seam(
        "masks: what rules read of tokens is not seen",
        "inspection.masks:captured_tensors",
        returns(()),
        "multimodal/test_packed_rows.py",
        "test_equally_long_documents_those_of_one_token_and_of_an_image_alone[gemma3-options0-parts0]",
    ),
    seam(
        "masks: the wider of two windows",
        "inspection.mask_rules:_narrower",
        never(_wider),
        "attention/test_mask_rules.py",
        "test_a_pattern_is_what_its_rule_says_of_every_pair[pattern_of-the narrower of two "
        "windows]",
    ),
    seam(
        "flex: documents have one number",
        "layout.packed:PackedLayout.seq_idx",
        result(torch.zeros_like),
        "attention/test_flex.py",
        "test_a_block_mask_of_the_models_own_is_cut_by_documents",
    ),
    seam(
        "flex: documents begin where the row does",
        "layout.packed:PackedLayout.start_columns",
        result(torch.zeros_like),
        "attention/test_flex.py",
        "test_packed_equals_alone[llama4_text]",
    ),
    seam(
        "varlen: what torch's kernel lacks is asked of it",
        "attention.backends.varlen:refusal",
        returns(None),
        "attention/test_varlen.py",
        "test_says_why_it_cannot_serve",
    ),
    seam(
        "autocast: attention takes the dtype that states have",
        "inspection.torches:taken_by_sdpa",
        never(lambda states: states.dtype),
        "attention/test_autocast.py",
        "test_packed_rows_are_documents_alone_up_to_the_rounding_of_the_dtype[llama-compiled-bf16]",
        "test_torchs_own_kernels_are_taken_for_weights_in_float32[llama-bf16]",
    ),
    seam(
        "rotary: all documents have the frequencies of the longest",
        "attention.rotary:_groups",
        result(lambda groups: [np.sort(np.concatenate(list(groups)))]),
        "attention/test_rotary.py",
        "test_packed_rows_with_short_and_long_documents_are_exact[phi3 longrope-short and long]",
    ),
    seam(
        "rotary: frequencies stay for the next document",
        "attention.rotary:reset_frequencies",
        skipped,
        "attention/test_rotary.py",
        "test_packed_rows_with_short_and_long_documents_are_exact[llama dynamic NTK-all long]",
        "test_a_packed_call_does_not_change_what_an_unpacked_one_sees[llama dynamic NTK-long]",
    ),
    seam(
        "directions: is_causal may contradict the mask",
        "attention.call:AttentionCall.refuse_two_directions",
        skipped,
        "attention/test_directions.py",
        "test_it_is_refused[llama-before]",
    ),
    seam(
        "images: tokens see those of other documents",
        "attention.cross:_one_by_one",
        around(_see_all_images),
        "multimodal/test_across.py",
        "test_tokens_before_an_image_and_documents_without_one[mllama]",
    ),
    seam(
        "flash and varlen: a row is one document",
        "layout.packed:PackedLayout.kernel_cu_seqlens",
        result(lambda bounds: bounds[[0, -1]]),
        "attention/test_flash.py",
        "test_several_rows_with_layouts_of_their_own_are_flattened[llama-flash_attention_2]",
        "attention/test_varlen.py",
        "test_equals_each_document_alone[causal-(16, 16)-2.14.1]",
    ),
)

_MIXERS = (
    seam(
        "convolution: taps reach into the document before",
        "mixers.operations:_places",
        around(lambda places, layout, before: places(layout, 0)),
        "mixers/test_operations.py",
        "test_a_convolution_sees_zeros_before_every_document",
    ),
    seam(
        "scan: state is carried on",
        "mixers.operations:run_per_document_row",
        around(lambda rows, run, layout, *grouping: rows(run, as_one(layout), *grouping)),
        "mixers/test_rows.py",
        "test_any_causal_mixer_gets_every_document_once_and_from_its_start",
    ),
    seam(
        "kernels: none is told of documents",
        "inspection.releases:kernel_parameters",
        returns(frozenset()),
        "mixers/test_operations.py",
        "test_kernels_from_the_hub_are_told_or_get_one_document_per_row",
    ),
    seam(
        "whole halves: the encoder runs on the row",
        "mixers:EncoderOneByOne.run",
        never(lambda way, call: _as_it_is(call)),
        "encoder_decoder/test_packed_rows.py",
        "test_every_form_gives_what_documents_give_alone[led-{}]",
    ),
    seam(
        "prefixes: mixers run on the row that shares",
        "mixers.site:_of_documents",
        never(lambda name, value, prefixes: value),
        "prefixes/test_exactness.py",
        "TestAgreement::test_logits_loss_and_gradients[padded-falcon-labels]",
    ),
    seam(
        "images: documents of BLIP get that of another",
        "mixers.site:_with_own_images",
        around(_of_another),
        "multimodal/test_packed_rows.py",
        "test_documents_with_images_get_what_they_get_alone[blip-eager]",
    ),
    seam(
        "images: GIT keeps the states of one",
        "architectures.images:_of_text",
        never(lambda output, batch: output),
        "multimodal/test_packed_rows.py",
        "test_documents_with_images_get_what_they_get_alone[git-eager]",
    ),
    seam(
        "XLM: columns are counted by padding tokens",
        "architectures.own_attention:_EveryColumn.run",
        never(lambda way, call: _as_it_is(call)),
        "mixers/test_xlm.py",
        "test_padding_tokens_anywhere_in_the_row[xlm-left]",
        "test_a_document_that_holds_the_padding_token_is_refused[xlm]",
    ),
)

SEAMS = (*_ATTENTION, *_MIXERS)
