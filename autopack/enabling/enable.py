"""Enable a model or the models of a trainer, and disable them."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import fields
from typing import Any, Literal

from torch import nn
from transformers import PreTrainedModel

from autopack import registry
from autopack.attention.choose import BACKENDS, candidates
from autopack.calls.entry import why_alone
from autopack.enabling.attach import detach, examine, strip_severed
from autopack.enabling.handle import ONE, EnabledTrainer, Handle, leave_harness, take_back, take_off
from autopack.enabling.prove import renew, settle
from autopack.errors import InvalidPacking, UnsupportedModel
from autopack.inspection.heads import row_head
from autopack.integrations import boundaries, lm_eval, peft
from autopack.integrations.trainers import adapter_of
from autopack.integrations.wrappers import (
    forward_around,
    holds_models,
    models_of_trainer,
    parts_of,
    unwrap,
)
from autopack.options import Options
from autopack.runtime.marks import ENABLED, enabled_at, holds_marks
from autopack.runtime.model import EnabledModel
from autopack.runtime.row_group import RowGroup
from autopack.watching.live import Live

logger = logging.getLogger(__name__)


def enable(
    model: Any,
    *,
    backend: str = "auto",
    unpad: bool = True,
    share: bool = True,
    verify: bool | Literal["strict"] = True,
    check_every: int | None = None,
    sequence_parallel: Any = None,
    max_tokens: int | Literal["auto"] | None = None,
) -> Handle:
    """Make packed rows exact for this model, and run its padded batches as packed rows.

    Every document of a packed row gets what it would get alone, or the call raises. A padded batch
    of shape (rows, columns), with a 0/1 `attention_mask`, gives what it gave before, in the shape
    that it gave before.

    Args:
        model: A transformers `PreTrainedModel`, plain or inside PEFT (LoRA and the like), DDP,
            accelerate, `torch.compile` or a module or object that holds one: a Lightning module (or
            the `lightning.Trainer` that runs it), a pipeline, a `SentenceTransformer`,
            `CrossEncoder` or `SetFitModel`, lm-eval's `HFLM`; or a `transformers.Trainer`, whose
            policy, reference and other models are enabled; or a list, tuple or dict of all these.
            Only these instances change: they get forward hooks, and the attention functions of
            transformers get stand-ins that are inert for every other model.
        backend: What computes attention on packed rows: `auto`, `flash`, `varlen`, `flex`, `sdpa`
            or `eager`. `auto` chooses at each call from the model's `attn_implementation`, device,
            dtype and what the layer asks for.
        unpad: Run a padded batch as one packed row and give its outputs their shape back, zero at
            padding, wherever that is the same. Whether a loss made outside of the model reads
            padding is found out in the first batches; evaluation without labels says
            `use_cache=False`. False leaves padded batches as they come.
        share: Compute once what several rows of a padded batch begin with (completions of one
            prompt, choices below one passage), where that saves a tenth of its tokens and neither
            dropout nor noise is on; outputs and gradients stay the same (docs/steps.md). False
            computes every row.
        verify: Prove a model by a tiny twin of it, and check its calls closely where no twin tells
            or third-party code takes part (docs/trust.md). "strict" refuses a model that no twin
            proves as a whole. False trusts the structure that was found, and checks no call unless
            `check_every` asks for it.
        check_every: None checks calls 1, 2, 4, 8 and so on, and those that go beyond the calls
            checked before: a call is run again with other tokens in some documents, and what the
            others get has to stay the same. N checks every Nth training call as well, 0 checks
            none. A difference beyond rounding raises `LeakDetected` before the call runs; the first
            padded batch that differs keeps its padding. `handle.checked` has the counts.
        sequence_parallel: A process group of torch.distributed, or a DeviceMesh of one dimension:
            its processes share rows, each calls the model with an equal part of the columns of
            every one (`autopack.packing.shard_rows`), and attention goes over whole rows by an
            exchange of tokens for heads (docs/distributed.md). Rows that DeepSpeed shares out
            (ALST) need no word of it.
        max_tokens: Of a trainer, the most real tokens of one forward. Each optimizer step keeps its
            documents, by batch size, accumulation and ranks; autopack deals them anew to
            micro-batches and ranks, by cost. Losses and gradients stay the same (docs/steps.md).
            "auto" measures in the first two steps what fits into the memory of a GPU. None leaves
            batches as they come.

    Returns:
        A handle whose repr says what was done; `handle.remove()` takes everything back, and so does
        leaving the block where it is used with `with`. A second call changes nothing, and the model
        stays enabled where a block around that call is left. `handle.models` has the handle of each
        model of a trainer, or of several. Where one of several cannot be enabled, none is.

    Raises:
        ValueError: An option has a value that it does not take.
        UnsupportedModel: The model, or the backend with it, cannot be served exactly. Nothing was
            changed.
        SiteDrift: The installed transformers lacks a function that autopack stands at. Nothing was
            changed.

    The method follows "Enhancing Training Efficiency Using Packing with Flash Attention" (arXiv
    2407.09105), carried to every attention implementation.
    """
    rows = None if sequence_parallel is None else RowGroup.of(sequence_parallel)
    given = Options(backend, unpad, share, verify, check_every, rows)
    with ExitStack() as undo:
        handle = _enable_any(model, given, undo, max_tokens)
        undo.pop_all()
    return handle


def _enable_any(
    model: Any, given: Options, undo: ExitStack, max_tokens: int | str | None = None
) -> Handle:
    """Return the handle of a model, trainer or several, enabled; push callbacks into `undo`.

    Nothing is put there for a model that was enabled before.
    """
    if adapter_of(model) is not None:
        return _enable_trainer(model, given, undo, max_tokens)
    if max_tokens is not None:
        raise ValueError(
            f"max_tokens={max_tokens!r} cuts the steps of a transformers Trainer, and this is a "
            f"{type(model).__name__}. Pass the trainer, or call autopack.micro_batches in a loop "
            "of your own."
        )
    parts = parts_of(model)
    if parts is not None:
        return Handle.of_several(
            {name: _enable_any(part, given, undo) for name, part in parts.items()}
        )
    return _enable_one(model, given, undo)


def _enable_one(model: Any, given: Options, undo: ExitStack) -> Handle:
    """Return the handle of one model: enable it, or check that it is enabled with these options."""
    base = unwrap(model)
    enabled = enabled_at(base)
    if enabled is not None and not enabled.active:
        take_off(enabled)  # to disable it was interrupted
        enabled = None
    is_new = enabled is None
    if enabled is None:
        enabled = _enable_model(base, given)
        undo.callback(take_off, enabled)
    else:
        _check_same_options(enabled.options, given)
    enabled.around = forward_around(model, base) or enabled.around
    if lm_eval.is_harness(model) and enabled.harness is None:
        lease = lm_eval.lease()
        lease.follow(())
        enabled.harness = lease
        undo.callback(leave_harness, enabled)
    return Handle({ONE: enabled}, [enabled] if is_new else [])


def _enable_model(base: PreTrainedModel, wanted: Options) -> EnabledModel:
    """Mark, hook and prove a model; return its `EnabledModel`; undo all of it if that fails."""
    peft.check(base)
    strip_severed(base)
    if holds_marks(base):
        raise UnsupportedModel(
            "a part of this model is enabled on its own; disable that part, then enable the whole",
            code="part-enabled",
        )
    family = registry.family_for(base)
    enabled = examine(base, family, wanted, renew)
    _check_backend(enabled)
    try:
        base.__dict__[ENABLED] = enabled
        settle(enabled, family)
        _refuse_leaks(enabled)
    except BaseException:
        detach(enabled)
        raise
    if wanted.check_every or (wanted.verify and wanted.check_every is None):
        enabled.live = Live(wanted.check_every or 0)
    head = row_head(base)
    reason = (
        enabled.traits.whole_model_reason
        if head is None or head.of_choices
        else why_alone(enabled, 0)
    )
    if reason is not None:
        logger.warning(
            "autopack runs %s on one document after another, those of one length as a batch: %s. "
            "It is exact, and no faster than batches of documents of like lengths.",
            type(base).__name__,
            reason,
        )
    return enabled


def _check_same_options(found: Options, given: Options) -> None:
    """Raise `ValueError` if an option was given that differs from the enabled model's.

    An option of its default value counts as not given.
    """
    for each in fields(Options):
        name, one, other = each.name, getattr(found, each.name), getattr(given, each.name)
        if other not in (each.default, one):
            raise ValueError(
                f"the model is enabled with {name}={one!r}; call autopack.disable(model) before "
                f"enabling it with {name}={other!r}"
            )


def _check_backend(enabled: EnabledModel) -> None:
    """Raise `UnsupportedModel` if the chosen backend cannot serve the model on this machine."""
    backend = enabled.options.backend
    if backend == "auto":
        return
    for implementation in enabled.implementations():
        possible = candidates(implementation)
        if backend not in possible:
            raise UnsupportedModel(
                f"backend={backend!r} cannot serve {type(enabled.module).__name__} with "
                f"attn_implementation={implementation!r}; possible: {', '.join(possible)}. Load "
                "the model with another attn_implementation, or use backend='auto'.",
                code="backend-unavailable",
            )
        usable, reason = BACKENDS[backend].availability()
        if not usable and implementation in BACKENDS[backend].stands_in:
            raise UnsupportedModel(
                f"backend={backend!r} is not available here: {reason}. Use backend='auto'.",
                code="backend-unavailable",
            )


def _refuse_leaks(enabled: EnabledModel) -> None:
    """Raise `UnsupportedModel` for a model that is not exact; warn if only packed rows are not."""
    proof, name = enabled.proof, type(enabled.module).__name__
    if proof.why_not_packed is not None and enabled.options.verify == "strict" and not proof.source:
        raise UnsupportedModel(
            f"verify='strict' refuses {name} ({enabled.anatomy.model_type!r}): "
            f"{proof.why_not_packed}. The model is left as it was; verify=True proves it as far as "
            "that goes, and checks its calls.",
            code="not-proven",
        )
    if proof.why_not_packed is not None and proof.why_not_unpadded is None:
        logger.warning(
            "autopack runs padded batches of %s without their padding, but refuses its packed "
            "rows: its own forward mixes documents (%s)",
            name,
            proof.why_not_packed,
        )
    elif proof.why_not_packed is not None:
        raise UnsupportedModel(
            f"autopack enabled {name} ({enabled.anatomy.model_type!r}) and audited it, and it is "
            f"not exact: {proof.why_not_packed}. The model is left as it was; train it on padded "
            "batches, one document per row.",
            code="not-exact",
        )


def _enable_trainer(
    trainer: Any, given: Options, undo: ExitStack, max_tokens: int | str | None
) -> Handle:
    """Enable the models of a trainer, check its data, cut its steps, add logs; return a handle."""
    # it needs transformers' callbacks, which models alone do not
    from autopack.enabling import trainer_logs
    from autopack.steps.trainers import cut_steps

    needed, others = models_of_trainer(trainer)
    handles, left_alone = {}, {}
    for name, model in {**needed, **others}.items():
        try:
            handles[name] = _enable_one(model, given, undo)
        except UnsupportedModel as error:
            if name in needed:
                raise
            left_alone[name] = str(error)
    of_models = Handle.of_several(handles)
    if not trainer_logs.logs_packing(trainer):
        undo.callback(take_back, trainer)
    kept = boundaries.keep_columns(trainer)
    lost = boundaries.what_is_lost(trainer)
    if lost is not None:
        raise InvalidPacking(lost, code="trainer-loses-documents")
    cut = boundaries.say_what_is_cut(trainer, of_models.enabled.logged)
    if max_tokens is not None:
        cut_steps(trainer, of_models.enabled, max_tokens)
    trainer_logs.add_logs(trainer, of_models.enabled.tally)
    return of_models.of_trainer(EnabledTrainer(trainer, left_alone, kept, cut))


def disable(model: Any) -> None:
    """Take back everything that `enable` did to a model, a trainer, or each of several.

    Does nothing where nothing is enabled. A copy of a part of an enabled model, such as a layer or
    a backbone, becomes plain too.
    """
    parts = parts_of(model)
    if parts is not None:
        for part in parts.values():
            disable(part)
        return
    if isinstance(model, nn.Module) and strip_severed(model) and not holds_models(model):
        return  # a layer
    if adapter_of(model) is not None:
        take_back(model)
    for base in _models_of(model):
        if (enabled := enabled_at(base)) is not None:
            take_off(enabled)


def is_enabled(model: Any) -> bool:
    """Return True if `enable` is in force on a model, or on the model that a trainer trains.

    A model may be wrapped. For a list, tuple or dict, return True if it is in force on all.
    """
    parts = parts_of(model)
    if parts is not None:
        return all(map(is_enabled, parts.values()))
    enabled = enabled_at(_models_of(model)[0])
    return enabled is not None and enabled.active


def _models_of(model: Any) -> list[PreTrainedModel]:
    """Return the transformers models of a trainer, or the one that a model is or wraps."""
    if adapter_of(model) is None:
        return [unwrap(model)]
    needed, others = models_of_trainer(model)
    return [unwrap(part) for part in (*needed.values(), *others.values())]
