"""The seams of what is proven, and what is checked in use."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from autopack.auditing.compare import Difference
from compat.seam_breaks import never, result, returns, seam, skipped


def _run_on(batch: dict[str, Any]) -> dict[str, Any]:
    """Number the tokens of a row from its beginning."""
    return {**batch, "position_ids": np.arange(batch["position_ids"].size)[None]}


SEAMS = (
    seam(
        "collator: positions run on, and first labels count",
        "packing.collator:PackingCollator._assemble",
        result(_run_on),
        "packing/test_collator.py",
        "test_equals_the_flattening_collator_of_transformers",
    ),
    seam(
        "collator: masks of images begin one image later",
        "packing.media:along_diagonal",
        result(lambda found: {name: np.roll(m, 1, axis=2) for name, m in found.items()}),
        "multimodal/test_across.py",
        "TestCollator::test_rows_get_what_documents_get_alone[mllama-None]",
    ),
    seam(
        "audit: no document is replaced",
        "auditing.measuring:Measuring._influence",
        result(lambda found: found * 0),
        "auditing/test_auditor_faults.py",
        "test_a_leak_that_shows_only_where_a_document_is_replaced_is_found[two rows]",
        "auditing/test_auditor.py",
        "test_influence_says_who_changes_whom",
    ),
    seam(
        "checks: branches by chance are not run",
        "inspection.randomness:draws_by_itself",
        returns(False),
        "auditing/test_branches_by_chance.py",
        "test_a_branch_that_mixes_tokens_is_refused[a number below]",
    ),
    seam(
        "audit: what a model got in padded batches is not heard",
        "auditing.report:LeakReport.padded",
        returns(None),
        "auditing/test_auditor_faults.py",
        "test_padded_batches_that_a_twin_or_a_check_finds_wrong_stay_as_they_came[twin]",
    ),
    seam(
        "enable: a model whose audit has leaked is enabled",
        "enabling.enable:_refuse_leaks",
        skipped,
        "enabling/test_enable.py",
        "TestFailures::test_a_twin_that_leaks",
    ),
    seam(
        "enable: what is changed later is not noticed",
        "inspection.fingerprint:Fingerprint.changed",
        skipped,
        "unfamiliar/test_configurations.py",
        "test_a_field_that_is_changed_later_is_noticed[a field]",
        "test_a_field_that_is_changed_later_is_noticed[inside a dict]",
        "inspection/test_whole_objects.py",
        "test_what_mixes_tokens_is_refused_after[a method of an instance]",
        "test_what_mixes_tokens_is_refused_after[F.silu]",
        "inspection/test_hooks_of_engines.py",
        "test_noise_of_neftune_that_is_none_and_then_some",
    ),
    seam(
        "enable: what users' code calls is not followed",
        "inspection.code:ModelCode._named",
        skipped,
        "inspection/test_followed.py",
        "test_the_next_call_is_exact_or_refused[a function]",
        "test_the_next_call_is_exact_or_refused[code]",
        "test_the_next_call_is_exact_or_refused[what its class calls]",
    ),
    seam(
        "origin: what is on a module is a library's",
        "inspection.code:ModelCode._parts_of",
        returns(()),
        "inspection/test_whole_objects.py",
        "test_what_mixes_none_is_served[a method of an instance]",
    ),
    seam(
        "origin: hooks do not look at rows",
        "inspection.put_on:looks_at_rows",
        returns(False),
        "integration/test_peft.py",
        "test_weights_that_eva_makes_of_what_comes_to_layers_are_those_of_stock",
    ),
    seam(
        "twins: one speaks for parts of other kinds",
        "enabling.by_twin:parts_outside",
        returns([]),
        "proving/test_twins.py",
        "TestParts::test_a_layer_of_ones_own_is_proven_by_itself",
    ),
    seam(
        "twins: a key of what is kept that always agrees",
        "proving.kept:key_of",
        returns("the key"),
        "proving/test_kept.py",
        "test_another_configuration_is_another_question",
    ),
    seam(
        "twins: what is on the model does not come along",
        "enabling.by_twin:rebound",
        never(lambda value, module, stand_in: value),
        "proving/test_rebound.py",
        "test_the_twin_runs_and_not_the_model[a method]",
    ),
    seam(
        "twins: what they say of further calls is not heard",
        "runtime.model:EnabledModel.ask_twin",
        skipped,
        "prefixes/test_exactness.py",
        "TestLeaks::test_the_twin_and_the_auditor_see_that_too",
        "multimodal/test_media_by_twin.py",
        "test_one_that_lets_them_meet_is_refused_with_images_and_serves_text[llava]",
    ),
    seam(
        "disable: nothing is taken off a model",
        "enabling.attach:detach",
        skipped,
        "enabling/test_enable.py",
        "TestRestoring::test_enable_changes_what_disable_restores[eager]",
    ),
    seam(
        "disable: a handle disables nothing",
        "enabling.handle:Handle.remove",
        skipped,
        "enabling/test_several_models.py",
        "test_where_one_cannot_be_enabled_none_is",
    ),
    seam(
        "trainers: a column of documents is dropped unseen",
        "integrations.boundaries:drops_columns",
        returns(False),
        "packing/test_trainers.py",
        "test_evaluation_is_looked_at_too",
    ),
    seam(
        "checks: nothing moves where others are replaced",
        "watching.replaced:how_far",
        result(lambda moved: Difference(moved.name, 0.0)),
        "watching/test_watch.py",
        "test_a_small_leak_at_one_token_of_many_is_found",
        "watching/test_influence.py",
        "test_tokens_that_meet_where_every_document_has_an_image[tokens]",
    ),
    seam(
        "checks: no document is run alone",
        "watching.alone:error_by_token",
        result(torch.zeros_like),
        "watching/test_watch.py",
        "test_positions_that_run_on_are_found_by_a_document_alone",
    ),
    seam(
        "checks: no call leaves what has been checked",
        "runtime.tally:Checked.goes_beyond",
        returns(False),
        "watching/test_envelope.py",
        "test_a_call_that_goes_beyond_is_checked_itself[many documents]",
        "test_a_call_that_goes_beyond_is_checked_itself[an argument]",
    ),
    seam(
        "checks: gradients tell nothing",
        "watching.influence:by_gradients",
        returns(Difference("", 0.0)),
        "watching/test_influence.py",
        "test_images_that_meet_where_they_are_large[with gradients]",
        "test_images_that_become_codes_are_said_to_be_unchecked",
        "proving/test_foreign_parts.py",
        "test_what_checks_say_of_a_model_with_a_part[AveragesBack]",
        "test_what_checks_say_of_a_model_with_a_part[ClipsBack]",
    ),
    seam(
        "origin: all code is the libraries' own",
        "inspection.foreign:is_own",
        returns(True),
        "inspection/test_whole_objects.py",
        "test_what_mixes_none_is_served[a hook on all modules]",
        "test_what_mixes_none_is_served[a method of an instance]",
        "inspection/test_flash_attn_package.py",
        "test_others_in_their_place_are_not[flash_attn-a script]",
    ),
    seam(
        "audit: nothing is compared",
        "auditing.fields:Sides.split",
        result(lambda found: ([{} for _ in found[0]], [{} for _ in found[1]], [])),
        "auditing/test_other_outputs.py",
        "test_what_leaks_beside_the_logits_is_refused[whole numbers]",
        "test_what_leaks_beside_the_logits_is_refused[a number]",
        "test_an_audit_does_not_pass_over_it_where_nothing_was_proven",
    ),
)
