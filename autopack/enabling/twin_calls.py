"""Answers of a tiny twin about kinds of calls: rows that begin alike, parts of rows on ranks,
documents with media."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from transformers import PreTrainedModel

from autopack.auditing.auditor import Audit
from autopack.auditing.cases import FORMS, Case
from autopack.auditing.compare import (
    OF_TWINS,
    Arguments,
    Fields,
    errors_between,
    gradient_error,
    scales_of,
)
from autopack.auditing.running import gradients_of, left_as_found, trained, weighted_sum
from autopack.enabling.by_twin import (
    ask_twins,
    callable_part,
    enabled_like,
    is_refusal,
    parts_outside,
)
from autopack.errors import AutopackError
from autopack.inspection.foreign import hooks_of, is_own, whose
from autopack.inspection.randomness import generators_restored
from autopack.layout import IGNORED_LABEL
from autopack.layout.row_parts import shard_rows
from autopack.proving import kept
from autopack.proving import twin as twins
from autopack.proving.apart import ThreadGroup, ranks_of_threads, run_together
from autopack.proving.twin import NoTwin
from autopack.runtime.model import EnabledModel
from autopack.runtime.scope import stock
from autopack.tiny import images, media_rows, sounds
from autopack.tiny.images import as_videos
from autopack.tiny.media_rows import Document

Result = tuple[list[Fields], list[Tensor]]
"""The outputs of a call, of each document if they can be told apart, and the gradients of a sum of
them."""
Labels = Literal["no", "shifted", "as they are"]
"""Labels of a call with parts of rows: none, at the tokens that predict them, or at their own."""
MakeTwin = Callable[[], PreTrainedModel]

_ALIKE = (11,) * 4
"""Tokens of documents behind what they begin with: a batch of them has no padding, for which stock
may lack numbers."""

_RANKS = 2
_LENGTHS = (27, 7, 52, 10)
"""Lengths of the documents of a row, and in reverse of another one; a rank has half of both.

One is longer than a part, none ends with one.
"""
_PADDING = 4
"""Columns of padding behind the documents of some rows."""

_PARTS: tuple[tuple[int | str, ...], ...] = (
    (3, "medium"),
    ("medium", 4),
    (7,),
    (2, "medium", 3, "medium"),
)
"""Runs of text, and media, over and over: some touch across the end of a document, and some
documents have none."""
_MOST = 256
"""Of more media in a call than this no twin is asked."""


# --- Rows that begin alike


def _why_not_prefixes(enabled: EnabledModel, make: MakeTwin, dtype: torch.dtype) -> str | None:
    """Return the reason why common beginnings cannot be computed once; None if they can."""
    with enabled_like(make(), enabled, share=True, unpad=True) as twin_enabled:
        # Its weights lie elsewhere than those of the model, and its first batches are to be packed
        # too.
        twin_enabled.traits.mixing_weights = 0.0
        part = callable_part(twin_enabled)
        with left_as_found(part):
            report = Audit(
                part, OF_TWINS[dtype], _ALIKE, ("default", "right-padded"), alike=True
            ).run()
            shared = twin_enabled.tally.training.shared + twin_enabled.tally.evaluation.shared
    for result in report.results:
        for said in filter(None, (result.failure, result.loss_refused)):
            if is_refusal(said):
                return f"its twin refuses it: {said.partition(': ')[2]}".partition(". ")[0]
            raise RuntimeError(said)
    if not shared:
        raise NoTwin("it takes none of the tokens together")
    return None if report.exact else f"its twin gives something else: {report.worst_case}"


# --- Parts of rows that ranks share


def _why_not_parts(
    enabled: EnabledModel, make: MakeTwin, dtype: torch.dtype, labels: Labels
) -> str | None:
    """Return the reason why parts of rows on ranks differ from whole rows; None if they do not.

    With labels a call asks for a loss too. The losses of all parts have to add up: of
    `num_items_in_batch` tokens where the loss is of shifted labels, else by the tokens that each
    part counts.
    """

    def results_of(twin: PreTrainedModel, group: ThreadGroup | None = None) -> list[Result]:
        """Return results of a part of rows (of whole rows without group), in each mode."""
        found = []
        with enabled_like(twin, enabled, sequence_parallel=group) as twin_enabled:
            if callable_part(twin_enabled) is not twin:
                raise NoTwin(
                    "its own forward cannot be called with tokens and positions by their names"
                )
            for training, padded in itertools.product((False, True), repeat=2):
                with left_as_found(twin):  # without dropout
                    twin.train(training)
                    found.append(_result_of_part(twin, _rows(twin, labels, padded), group, labels))
        return found

    wanted, groups = results_of(make()), ranks_of_threads(_RANKS)
    models = {group: make() for group in groups}
    # what one thread puts back, another may have drawn from
    with generators_restored(models[groups[0]]):
        parts = run_together(groups, lambda group: results_of(models[group], group))
    return _difference(list(map(_join_parts, zip(*parts, strict=True))), wanted, dtype)


def _rows(model: Any, labels: Labels, padded: bool) -> Arguments:
    """Return a call's arguments: packed rows, with labels and padding as asked for."""
    case = Case(model, _LENGTHS)
    form = FORMS["two rows"]
    call = case.call(replace(form, mask="ones", padding=_PADDING) if padded else form)
    batch = case.given(call)
    if labels != "no":
        owner = call.sides.halves[0].owner
        # The first document has none, so that a part of one row has another share of labels than
        # one of all.
        ignored = torch.from_numpy((owner <= 0) | (np.diff(owner, prepend=-2) != 0)).to(
            model.device
        )
        batch["labels"] = batch["input_ids"].masked_fill(ignored, IGNORED_LABEL)
        if labels == "shifted":
            batch["num_items_in_batch"] = int((~ignored).sum())
    return batch


def _result_of_part(
    model: Any, batch: Arguments, group: ThreadGroup | None, labels: Labels
) -> Result:
    """Return weighted outputs of a rank's part (all without `group`) and their sum's gradients."""
    given, share = batch, 1.0
    if group is not None:
        given = shard_rows(batch, group.rank, group.ranks, shift_labels=labels == "shifted")
        if labels == "as they are":  # a mean over the tokens of this part
            part, all_of_them = (each["labels"] != IGNORED_LABEL for each in (given, batch))
            share = int(part.sum()) / int(all_of_them.sum())
    # What stands in padding is nobody's.
    counted = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))
    found: Fields = {}
    for name, value in model(**given, use_cache=False, return_dict=True).items():
        if isinstance(value, Tensor) and value.requires_grad:
            weights: Any = share
            if name != "loss":
                size = (*counted.shape, *value.shape[2:])
                weights = torch.linspace(0.5, 1.5, prod(size)).to(value).reshape(size)
                real = counted.to(value).reshape(*counted.shape, *[1] * (value.dim() - 2))
                weights = weights * real / counted.numel()
                weights = weights if group is None else group.part(weights, 1)
            found[name] = value * weights
    whole: Any = sum(each.sum() for each in found.values())
    return [found], gradients_of(whole, trained(model))


def _join_parts(parts: Sequence[Result]) -> Result:
    """Return one result of all parts: outputs side by side, losses and gradients added."""
    found: Fields = {}
    for name in parts[0][0][0]:
        values = [fields[name] for (fields,), _ in parts]
        found[name] = torch.cat(values, dim=1) if values[0].dim() else torch.stack(values).sum()
    return [found], [sum(each) for each in zip(*(grads for _, grads in parts), strict=True)]


# --- Documents with media


def _why_not_media(
    enabled: EnabledModel, make: MakeTwin, dtype: torch.dtype, kind: str, count: int
) -> str | None:
    """Return the reason why documents with `count` media of a kind mix; None if they do not.

    `kind` is "image", "video" or "sound". Norms over a batch stay in evaluation: while they train,
    such calls raise.
    """
    twin: Any = make()
    documents = _documents(twin, kind, count)
    wanted, found = [], []
    with enabled_like(twin, enabled) as twin_enabled:
        for training in (False, True):
            with left_as_found(twin):  # without dropout
                twin.train(training)
                for module in twin.modules():
                    if isinstance(module, _BatchNorm):
                        module.eval()
                with stock(twin_enabled):
                    wanted.append(
                        _result(
                            twin, [media_rows.alone(twin, each).logits[0] for each in documents]
                        ),
                    )
                logits = twin(**media_rows.packed(twin, documents)).logits[0]
                found.append(_result(twin, [*logits.split([*map(len, documents)])]))
    return _difference(found, wanted, dtype)


def _documents(model: Any, kind: str, count: int) -> list[Document]:
    """Return about `count` different documents that hold as many media of a kind.

    Documents of text alone are left out where the type needs media. Raises `NoTwin` for a type with
    no known form of such media, or for more of them than a twin is asked of.
    """
    if count > _MOST:
        raise NoTwin(f"a call has more than {_MOST} {kind}s or documents")
    if media_rows.form_of(model, "sounds" if kind == "sound" else "images") is None:
        raise NoTwin(f"nobody knows how a tiny {model.config.model_type!r} takes {kind}s")
    parts = list(itertools.islice(itertools.cycle(_PARTS), count))
    if kind == "sound":
        return [
            sounds.document(model, each, seed=n + 1, frames=sounds.FRAMES)
            for n, each in enumerate(parts)
        ]
    parts = [each for each in parts if "medium" in each or not images.needs_images(model)]
    found = [images.document(model, each, seed=n + 1) for n, each in enumerate(parts)]
    return [as_videos(model, each) for each in found] if kind == "video" else found


def _result(twin: PreTrainedModel, logits: list[Tensor]) -> Result:
    """Return the logits of documents, and the parameters' gradients of a weighted sum of them."""
    documents = [{"logits": each} for each in logits]
    total = weighted_sum(documents, {"logits": 1.0})
    assert total is not None
    return documents, gradients_of(total, trained(twin))


# --- What they have in common


_ASKED: dict[str, Callable[..., str | None]] = {
    "prefixes": _why_not_prefixes,
    "parts": _why_not_parts,
    "media": _why_not_media,
}


def why_not(enabled: EnabledModel, kind: str, *given: Any) -> str | None:
    """Return the reason why calls of a kind are not exact on a model's twin; None if they are.

    `kind` is the name that `EnabledModel.twin_says` has for it, `given` are further arguments of
    the question. The answer about a model whose code and hooks are all the library's is kept.
    Weights of the model have no part in it. The first precision that runs decides.
    """

    def make_twin(dtype: torch.dtype, device: str) -> PreTrainedModel:
        twin = twins.of(enabled.module, dtype, device)
        parts_outside(twin)
        for name, module in twin.others.items() if kind == "parts" else ():
            # It may look at earlier tokens.
            if not is_own(kept.own_class(module)):
                raise NoTwin(f"it has no {type(module).__name__}, which {name} is")
        return twin.model.eval()

    def answer(dtypes: tuple[torch.dtype, ...], device: str) -> str | None:
        failure: Exception | None = None
        for dtype in dtypes:
            try:
                return _ASKED[kind](enabled, partial(make_twin, dtype, device), dtype, *given)
            except AutopackError as error:
                return f"its twin refuses it: {error.message}".partition(". ")[0]
            except NoTwin:
                raise
            except Exception as error:  # a class may compute nothing at this size, or no float64
                failure = error
        raise NoTwin(f"it raised {type(failure).__name__}: {failure}")

    try:
        for name, module in enabled.module.named_modules() if kind == "parts" else ():
            for hook in hooks_of(module).values():
                # One that looks at the token before finds none at the beginning of a part, which no
                # check of a call sees.
                if not is_own(hook):
                    raise NoTwin(f"it has no hook, and {whose(hook)} is on {name}")
        return ask_twins(enabled, (kind, *given), answer)
    except NoTwin as error:
        return f"no twin of it tells whether it gives the same: {error}"


def _difference(found: list[Result], wanted: list[Result], dtype: torch.dtype) -> str | None:
    """Return in words how two lists of results differ; None if by rounding only."""
    # What casts to float32 in code of its own rounds as float32 does.
    tolerance, of_gradients, _ = map(max, OF_TWINS[dtype], OF_TWINS[torch.float32])
    for (documents, gradients), (expected, right_gradients) in zip(found, wanted, strict=True):
        error, name = max(errors_between(documents, expected, scales_of(expected)))
        if not error <= tolerance:
            return f"its twin gives something else: {name} by {error:.0e} of its deviation"
        # Stock alone may have no numbers: eager attention of tokens that see no image, in Idefics.
        sound = [bool(each.isfinite().all()) for each in right_gradients]
        both = ([*itertools.compress(each, sound)] for each in (gradients, right_gradients))
        error = gradient_error(*both)
        if not error <= of_gradients:
            return f"its twin gives something else: gradients by {error:.0e} of their size"
    return None
