"""One comparison for all tests of exactness: packed rows and padded batches against what stock
transformers gives.

A *subject* is a model type, or a function that makes a model, and a change that a user makes to it:
code of the user's, or a setting (PEFT, checkpointing, compilation, hooks). A `Call` gives its
documents alone, as one packed row, or as a padded batch, each as a `Result`. `verdict` says whether
an enabled model is exact on such calls, or by which code it is refused; anything else fails.

The reference is stock with the very same change. The control is a packed row without a declaration
of its documents: it has to leak."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from itertools import accumulate
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import autopack
from autopack import tiny
from autopack.errors import AutopackError
from tests.conftest import LEAK, positions, weights_like
from tests.subjects import build

LENGTHS = (5, 7, 4)
"""The documents of every call: longer, in part, than the windows (4) of tiny models."""
IGNORED = -100


class Limits(NamedTuple):
    """Largest errors of states (by deviation), of the loss, of a gradient (by largest entry)."""

    states: float
    loss: float = 1e-5
    """transformers computes it in float32: rounding leaves about 1e-7."""
    gradients: float = 1e-4
    """They come through that loss, and sums over all tokens cancel in them."""
    least: float = 1e-2
    """Scale of the smallest gradients, of the largest: some are zero but for rounding."""


FLOAT64 = Limits(1e-9)
"""Rounding leaves about 1e-14, and leaks start near 1e-2."""
IN_FLOAT32 = Limits(1e-5)
"""For types whose own code computes a part in float32; rounding leaves about 1e-7."""
FLOAT32 = Limits(1e-4)
"""As in the auditor: rounding leaves about 1e-6."""
FLOAT32_TYPES = "mamba2 bamba mpt gptj codegen gpt_neo llama4_text".split()

WHEN = ("before", "after")
"""Times at which a model is changed: before it is enabled, or after that (and after one call)."""


@dataclass
class Result:
    """Results of a call: logits or states of each document, loss, and gradients by parameter."""

    documents: list[torch.Tensor]
    loss: torch.Tensor | None = None
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    limits: Limits = FLOAT64

    @classmethod
    def of(cls, model, documents, loss, limits: Limits | None = None) -> Result:
        """Return the result with the gradients of a loss, if there is one; clears the model's."""
        limits = limits or limits_of(model)
        if loss is None:
            return cls([*documents], limits=limits)
        loss.backward()
        return cls([part.detach() for part in documents], loss.detach(), gradients(model), limits)


def limits_of(model) -> Limits:
    """Return the largest errors of a model's results, by its dtype."""
    if next(model.parameters()).dtype == torch.float32:
        return FLOAT32
    return IN_FLOAT32 if model.config.model_type in FLOAT32_TYPES else FLOAT64


def gradients(model):
    """Return the gradients of all parameters by name, and clear them in the model."""
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def mean_loss(losses, counts, reduction="mean"):
    """Return the loss over all documents: `sum`, `mean` by tokens, or mean over `documents`."""
    weights = counts if reduction == "mean" else [1] * len(counts)
    total = sum(one * weight for one, weight in zip(losses, weights, strict=True))
    return total if reduction == "sum" else total / sum(weights)


def next_token_loss(logits, labels, **options):
    """Return the cross-entropy of logits against the label of the next token."""
    targets = labels[:, 1:].flatten()
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets, **options)


def errors(found: Result, expected: Result):
    """Return the errors of states, loss and gradients by name, each on the scale of `Limits`."""
    deviation = torch.cat([part.flatten() for part in expected.documents]).std()
    pairs = zip(found.documents, expected.documents, strict=True)
    result = {"states": max(float(((f - e).abs().max() / deviation).detach()) for f, e in pairs)}
    if expected.loss is not None:
        assert found.loss is not None, "stock gives a loss, and the enabled model none"
        result["loss"] = float(((found.loss - expected.loss).abs() / expected.loss.abs()).detach())
        assert found.gradients.keys() == expected.gradients.keys()
        least = expected.limits.least * max(
            float(g.abs().max()) for g in expected.gradients.values()
        )
        result["gradients"] = max(
            float((found.gradients[name] - g).abs().max() / max(float(g.abs().max()), least))
            for name, g in expected.gradients.items()
        )
    return result


def check(found: Result, expected: Result, what=""):
    """Raise `AssertionError` if a result differs from the expected one by more than its limits."""
    measured, limits = errors(found, expected), expected.limits._asdict()
    # `not <=` finds NaN, too.
    wrong = {name: value for name, value in measured.items() if not value <= limits[name]}
    shown = ", ".join(f"{name} {value:.1e}" for name, value in measured.items())
    assert not wrong, f"silently wrong{what and ' (' + what + ')'}: {shown}"


def weighted(model, logits, **limits) -> Result:
    """Return the result of a loss that sums all logits of a call with fixed random weights."""
    loss = (logits * weights_like(logits)).sum()
    return Result.of(model, [logits], loss, limits_of(model)._replace(**limits))


def leaks(found: Result, expected: Result):
    """Return True if a result is so wrong that the check sees it (the negative control).

    Its experts may be others than in the expected result.
    """
    return (
        found.gradients.keys() != expected.gradients.keys()
        or max(errors(found, expected).values()) > LEAK
    )


def ids(seed=0, lengths=LENGTHS):
    """Return the tokens of all documents in one row, (1, T)."""
    return tiny.tokens(None, 1, sum(lengths), seed=seed)


def counted(lengths=LENGTHS, first=0):
    """Return positions (1, T) that begin anew with each document."""
    return positions(lengths, start=first)


def numbered(lengths=LENGTHS):
    """Return the number of each token's document, from 1, as (1, T)."""
    return torch.arange(1, 1 + len(lengths)).repeat_interleave(torch.tensor(lengths))[None]


def in_rows(parts, side="right", value=0):
    """Return a tensor with a row for each part, padded on a side."""
    if side == "left":
        return in_rows([part.flip(0) for part in parts], value=value).flip(1)
    return nn.utils.rnn.pad_sequence([*parts], batch_first=True, padding_value=value)


def padded_batch(parts, side="right"):
    """Return a batch of `input_ids` with a row for each part, and its `attention_mask`."""
    mask = in_rows([torch.ones_like(part) for part in parts], side)
    return {"input_ids": in_rows(parts, side), "attention_mask": mask}


def form_of(model):
    """Return the form that declares a model's rows: positions, or segments if it takes none."""
    own = next(
        cls for cls in type(model).__mro__ if cls.__module__.startswith("transformers.models.")
    )
    return "position_ids" if "position_ids" in signature(own.forward).parameters else "segments"


def declared(model, form="", lengths=LENGTHS):
    """Return arguments that declare a row's documents, in a form or in several (`one+other`)."""
    form = form or form_of(model)
    if "+" in form:
        parts = [declared(model, part, lengths) for part in form.split("+")]
        return {name: value for part in parts for name, value in part.items()}
    if form == "position_ids":
        return {"position_ids": counted(lengths, autopack.registry.first_position(model.config))}
    if form == "seq_idx":
        return {form: numbered(lengths)}
    if form == "segments":
        return {"attention_mask": numbered(lengths)}
    assert form == "cu_seq_lens", form
    bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    return {f"cu_seq_lens_{each}": bounds for each in "qk"} | {
        f"max_length_{each}": max(lengths) for each in "qk"
    }


def states_of(output):
    """Return the logits of an output, or a backbone's hidden states."""
    if isinstance(output, torch.Tensor):
        return output
    for name in ("logits", "last_hidden_state"):
        if getattr(output, name, None) is not None:
            return getattr(output, name)
    return output[0] if output[0].dim() > 0 else output[1]


def loss_of(output):
    """Return the loss of an output, which may be a tuple; None if it has none."""
    if isinstance(output, tuple):
        return output[0] if output[0].dim() == 0 else None
    return getattr(output, "loss", None)


Calls = tuple[tuple[Callable[[Any], Result], ...], ...]
"""Calls of an enabled model, each with the reference of stock, and the control, if there is one."""
Change = Callable[[Any], Any]
"""Makes a model unfamiliar, in place, or returns another one with the same parameters."""


@dataclass(frozen=True)
class Call:
    """Form of calling a model: its arguments, labels, declarations and documents.

    `names` renames arguments. `labels` is the name of the labels, or None for none. `shifts` is
    True if the loss compares with the next token, and `reduction` says how losses of documents are
    put together (see `mean_loss`). `given` are other arguments of all calls, `form` is the form in
    which rows are declared (see `declared`); `none` declares nothing.
    """

    names: Mapping[str, str] = field(default_factory=dict)
    labels: str | None = "labels"
    shifts: bool = True
    reduction: str = "mean"
    given: Mapping[str, Any] = field(default_factory=dict)
    form: str = ""
    lengths: Sequence[int] = LENGTHS

    def run(self, model, arguments):
        """Call a model with renamed arguments and the given ones, and return its output."""
        arguments = {self.names.get(name, name): value for name, value in arguments.items()}
        return model(**arguments, **self.given)

    def labelled(self, tokens):
        """Return tokens as the argument of labels, by its name; {} for calls without labels."""
        return {} if self.labels is None else {self.labels: tokens}

    def is_row(self, tokens):
        """Return True if tokens are the packed row, not a document alone or a padded batch."""
        return tokens.shape[:2] == (1, sum(self.lengths))

    def alone(self, model) -> Result:
        """Return the results of each document by itself, with the loss over all of them."""
        documents, losses, counts = [], [], []
        for part in ids(lengths=self.lengths).split(tuple(self.lengths), 1):
            labels = self.labelled(part)
            output = self.run(model, {"input_ids": part, **labels})
            documents.append(states_of(output)[0])
            losses.append(loss_of(output))
            compared = (
                next(iter(labels.values())).flatten()[int(self.shifts) :] if labels else part[0]
            )
            counts.append(int((compared != IGNORED).sum()))
        loss = None if losses[0] is None else mean_loss(losses, counts, self.reduction)
        return Result.of(model, documents, loss)

    def packed(self, model) -> Result:
        """Return the results of the documents as one packed row."""
        return self._row(
            model, {} if self.form == "none" else declared(model, self.form, self.lengths)
        )

    def undeclared(self, model) -> Result:
        """Return the results of the packed row without a declaration of its documents."""
        return self._row(model, {})

    def _row(self, model, declaration) -> Result:
        """Return the results of the packed row with a declaration, split into documents."""
        tokens = ids(lengths=self.lengths)
        output = self.run(model, {"input_ids": tokens, **declaration, **self.labelled(tokens)})
        assert torch.equal(tokens, ids(lengths=self.lengths)), "the caller's stay as they are"
        states = states_of(output)[0, : tokens.shape[1]]  # a call may put padding behind
        return Result.of(model, states.split(tuple(self.lengths)), loss_of(output))

    def padded(self, model, side="right") -> Result:
        """Return the results of the documents as a padded batch with a mask, one per row."""
        parts = ids(lengths=self.lengths)[0].split(tuple(self.lengths))
        batch = padded_batch(parts, side)
        tokens, real = batch.values()
        labels = self.labelled(tokens.masked_fill(real == 0, IGNORED))
        output = self.run(model, {**batch, **labels})
        states = [row[m.bool()] for row, m in zip(states_of(output), real, strict=True)]
        return Result.of(model, states, loss_of(output))

    def padded_left(self, model) -> Result:
        """Return the results of the documents as a batch with padding on the left."""
        return self.padded(model, "left")

    @property
    def row(self) -> Calls:
        """Packed rows, with documents alone as reference and an undeclared row as control."""
        return ((self.packed, self.alone, self.undeclared),)

    @property
    def batch(self) -> Calls:
        """Padded batches, with the same batch in stock as reference."""
        return ((self.padded, self.padded),)

    @property
    def both(self) -> Calls:
        """Packed rows and padded batches, as in `row` and `batch`."""
        return (*self.row, *self.batch)


def _changed(model, change: Change | None):
    """Return the model that a change makes, or the same one if it changes that in place."""
    other = None if change is None else change(model)
    return model if other is None else other


def verdict(
    make: str | Callable[[], Any],
    calls: Calls,
    change: Change | None = None,
    when="before",
    *,
    patch: Callable[[pytest.MonkeyPatch], None] | None = None,
    **options,
):
    """Return `exact` if an enabled model is exact on all these calls, or why it is refused.

    `make` is a model type or makes the model. `change` makes one model unfamiliar and `patch` all
    of a type, `before` or `after` it is enabled (and called once); `stale` is before, but after
    another model of the type was enabled and disabled. The reference is changed and patched alike.
    Anything else, a wrong number or another error, fails the test. Each call is made twice: the
    second one may find what the first one has kept.
    """
    if isinstance(make, str):
        make = partial(build, make)
    if when == "stale":
        with autopack.enable(make(), **options) as handle:
            _run_all(calls, handle.model)
    refusals = []
    with ExitStack() as undo:
        model = make()
        if when == "after":
            undo.callback(_disable, autopack.enable(model, **options).model)
            _run_all(calls, model)
        if patch is not None:
            patch(undo.enter_context(pytest.MonkeyPatch.context()))
        stock = _changed(make(), change)
        expected = [reference(stock) for _, reference, *_ in calls]
        for (_, _, *controls), wanted in zip(calls, expected, strict=True):
            assert all(leaks(control(stock), wanted) for control in controls), "stock does not leak"
        model = _changed(model, change)
        if when != "after":
            try:
                autopack.enable(model, **options)
            except AutopackError as error:
                return f"refused: {error}"
            undo.callback(_disable, model)
        for (run, *_), wanted in zip(calls, expected, strict=True):
            try:
                results = [run(model), run(model)]
            except AutopackError as error:
                refusals.append(f"{run.__name__} refused: {error}")
                continue
            for number, result in enumerate(results):
                check(
                    result,
                    wanted,
                    f"{run.__name__}, call {number + 1}, unfamiliar {when} it was enabled",
                )
    return "; ".join(refusals) or "exact"


def _run_all(calls: Calls, model):
    """Run all calls on a model, without a look at their results."""
    for run, *_ in calls:
        run(model)


def _disable(model):
    """Disable a model if it is enabled."""
    if autopack.is_enabled(model):
        autopack.disable(model)


def must_be_exact(*args, **options):
    """Raise `AssertionError` unless the verdict is `exact`; for uses that may not be refused."""
    assert (found := verdict(*args, **options)) == "exact", found
