"""What the tests of unfamiliar code share: documents, what stock gives them, and the verdict on an enabled model.

The reference is always the stock version of the very same unfamiliar code: each document of a packed row alone, or the
same padded batch. An enabled model gives that, or raises an `AutopackError`; a test says whether it insists on the
former.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

import autopack
from autopack import tiny
from autopack.errors import AutopackError

LENGTHS = (5, 7, 4)
"""The documents of every call: longer, in part, than the windows (4) of tiny models."""
FLOAT64 = 1e-9
"""Largest error of logits in float64, of their deviation: rounding leaves about 1e-14, and leaks start near 1e-2."""
IN_FLOAT32 = 1e-5
"""The same for types whose own code computes a part in float32 whatever its inputs are; rounding leaves about 1e-7."""
FLOAT32_TYPES = ("mamba2", "bamba", "mpt", "gptj", "codegen", "gpt_neo", "llama4_text")
FLOAT32 = 1e-4
"""The same for models in float32, as in the auditor."""
LOSS = 1e-5
"""Largest relative error of a loss, which transformers computes in float32: rounding leaves about 1e-7."""
GRADIENT = 1e-4
"""Largest error of a gradient, which comes through that loss, in which sums over all tokens cancel."""
IGNORED = -100
LEAK = 1e-2
"""Least error that a negative control must show."""

DECODERS = (
    "llama",
    "gemma3_text",
    "qwen2_moe",
    "gpt2",
    "gpt_neox",
    "opt",
    "bloom",
    "falcon",
    "mamba",
    "mamba2",
    "bamba",
    "mpt",
)
"""Decoders with rotary, learned and no positions, distance biases, windows, experts, recurrences, and both."""
ATTENDING = ("llama", "gemma3_text", "qwen2_moe", "gpt2", "gpt_neox", "opt", "phi", "olmo2", "starcoder2", "stablelm")
"""Decoders that attend through transformers' attention interface."""
ENCODERS = ("bert", "roberta", "distilbert", "electra", "albert", "deberta-v2", "mpnet", "modernbert")
"""Masked language models."""


def crossed(one: Sequence[Any], other: Sequence[Any], each: int = 2) -> list[tuple[Any, Any]]:
    """Pairs in which every element of `one` meets `each` of `other`, and all of `other` have their turn.

    All pairs would take minutes: an audit on the spot takes a second.
    """
    step = max(1, len(other) // each)
    return [(a, other[(i + j * step) % len(other)]) for i, a in enumerate(one) for j in range(each)]


def alternating(pairs: Sequence[tuple[Any, ...]], other: Sequence[Any]) -> list[tuple[Any, ...]]:
    """The pairs, with an element of `other` beside each, in turn."""
    return [(*pair, other[i % len(other)]) for i, pair in enumerate(pairs)]


Calls = tuple[tuple[Callable[[Any], "Result"], Callable[[Any], "Result"]], ...]
"""Calls of an enabled model, each with the reference that a model which is not enabled gives."""
Change = Callable[[Any], Any]
"""Makes a model unfamiliar, in place, or returns another one with the same parameters."""


@cache
def _built(model_type: str, task: str, overrides: tuple[tuple[str, Any], ...]) -> PreTrainedModel:
    given = dict(overrides)
    implementation, dtype = given.pop("attn_implementation", None), given.pop("dtype", torch.float64)
    for wanted in [implementation] if implementation else ["sdpa", "eager"]:
        try:
            model = tiny.build(model_type, task=task, attn_implementation=wanted, dtype=dtype, **given)
            if getattr(model.config, "_experts_implementation", None) is not None:
                model.set_experts_implementation("eager")  # the default has no kernel for float64
            return model
        except tiny.CannotBuild as error:
            if implementation or wanted == "eager" or "does not support" not in str(error):
                raise
    raise AssertionError("unreachable")


def build(model_type: str = "llama", task: str = "causal-lm", **overrides: Any) -> Any:
    """A tiny model in float64 without dropout; the same arguments give the same parameters."""
    hashable = {name: value for name, value in overrides.items() if value.__hash__ is not None}
    if len(hashable) == len(overrides):
        return copy.deepcopy(_built(model_type, task, tuple(sorted(hashable.items(), key=lambda item: item[0]))))
    return _built.__wrapped__(model_type, task, tuple(overrides.items()))


def subclass(model: PreTrainedModel, forward: Any, name: str = "Chat", **members: Any) -> None:
    """Make the model one of a subclass of its class with this forward, as if it had been built as one."""
    model.__class__ = type(name, (type(model),), {"forward": forward, "__module__": "users_code", **members})


def rebuilt(model: PreTrainedModel, cls: type[PreTrainedModel]) -> PreTrainedModel:
    """A model of a class of the user's, built by its own constructor, with the parameters of `model`."""
    other = cls(copy.deepcopy(model.config)).to(model.dtype)
    other.load_state_dict(model.state_dict())
    return other.eval()


@dataclass
class Result:
    """What came of a call: the logits or states of each document, the loss and the gradients of its parameters."""

    documents: list[torch.Tensor]
    loss: torch.Tensor | None = None
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    within: float = FLOAT64
    """Largest error of the states."""


def within(model: Any) -> float:
    """Largest error of the states of a model."""
    if next(model.parameters()).dtype == torch.float32:
        return FLOAT32
    return IN_FLOAT32 if model.config.model_type in FLOAT32_TYPES else FLOAT64


def spans(lengths: Sequence[int] = LENGTHS) -> list[tuple[int, int]]:
    """First and end column of each document of a row."""
    return list(pairwise(accumulate(lengths, initial=0)))


def ids(seed: int = 0) -> torch.Tensor:
    """The tokens of all documents in one row, (1, T)."""
    return tiny.tokens(None, 1, sum(LENGTHS), seed=seed)


def declared(model: Any, form: str = "") -> dict[str, torch.Tensor]:
    """The arguments that declare the documents of the row: positions, or segments where a model takes none."""
    if not form:
        own = next(cls for cls in type(model).__mro__ if cls.__module__.startswith("transformers.models."))
        form = "position_ids" if "position_ids" in own.forward.__code__.co_varnames else "segments"
        if hasattr(own.forward, "__wrapped__"):
            from inspect import signature

            form = "position_ids" if "position_ids" in signature(own.forward).parameters else "segments"
    if form == "position_ids":
        first = autopack.registry.first_position(model.config) if model.config.model_type in ENCODERS else 0
        return {"position_ids": torch.cat([torch.arange(first, first + n) for n in LENGTHS])[None]}
    if form == "segments":
        return {"attention_mask": torch.cat([torch.full((n,), i + 1) for i, n in enumerate(LENGTHS)])[None]}
    assert form == "cu_seq_lens", form
    bounds = torch.tensor([0, *accumulate(LENGTHS)], dtype=torch.int32)
    longest = max(LENGTHS)
    return {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """The gradients of all parameters by name, which are cleared."""
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def states_of(output: Any) -> torch.Tensor:
    """The logits of an output, or the hidden states of a backbone's."""
    if isinstance(output, torch.Tensor):
        return output
    for name in ("logits", "last_hidden_state"):
        if getattr(output, name, None) is not None:
            return getattr(output, name)
    first = output[0]
    return first if first.dim() > 0 else output[1]


def loss_of(output: Any) -> torch.Tensor | None:
    """The loss of an output, of a tuple too."""
    if isinstance(output, tuple):
        return output[0] if output[0].dim() == 0 else None
    return getattr(output, "loss", None)


@dataclass(frozen=True)
class Way:
    """How a model is called.

    `names` renames arguments, `labels` says whether they are given and under which name, `shifts` whether the loss
    compares with the next token, and `reduction` how losses of documents are put together: the `mean` or `sum` over
    their tokens, or the mean over `documents`. `given` holds other arguments of every call, and `form` how packed rows
    are declared (see `declared`); `none` declares nothing.
    """

    names: Mapping[str, str] = field(default_factory=dict)
    labels: str | None = "labels"
    shifts: bool = True
    reduction: str = "mean"
    given: Mapping[str, Any] = field(default_factory=dict)
    form: str = ""

    def _call(self, model: Any, arguments: dict[str, Any]) -> Any:
        arguments = {self.names.get(name, name): value for name, value in arguments.items()}
        return model(**arguments, **self.given)

    def _labels(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        return {} if self.labels is None else {self.labels: tokens}

    def alone(self, model: Any) -> Result:
        """What each document gets by itself, and the loss over all of them."""
        tokens, documents, losses, counts = ids(), [], [], []
        for a, b in spans():
            labels = self._labels(tokens[:, a:b])
            output = self._call(model, {"input_ids": tokens[:, a:b], **labels})
            documents.append(states_of(output)[0])
            losses.append(loss_of(output))
            compared = next(iter(labels.values())).flatten()[int(self.shifts) :] if labels else tokens[0, a:b]
            counts.append(int((compared != IGNORED).sum()))
        if losses[0] is None:
            return Result(documents, within=within(model))
        weights = {"sum": [1] * len(counts), "mean": [n / sum(counts) for n in counts]}.get(self.reduction)
        weights = weights or [1 / len(counts)] * len(counts)
        loss = sum(one * weight for one, weight in zip(losses, weights, strict=True))
        loss.backward()
        return Result(documents, loss, gradients(model), within(model))

    def packed(self, model: Any) -> Result:
        """The documents as one packed row."""
        declaration = {} if self.form == "none" else declared(model, self.form)
        output = self._call(model, {"input_ids": ids(), **declaration, **self._labels(ids())})
        return self._result(model, output, [states_of(output)[0, a:b] for a, b in spans()])

    def padded(self, model: Any, side: str = "right") -> Result:
        """The documents as a padded batch with a mask, one per row."""
        rows = [nn.functional.pad(part, self._padding(part, side)) for part in ids()[0].split(LENGTHS)]
        mask = [nn.functional.pad(torch.ones_like(p), self._padding(p, side)) for p in ids()[0].split(LENGTHS)]
        tokens, real = torch.stack(rows), torch.stack(mask)
        labels = self._labels(tokens.masked_fill(real == 0, IGNORED))
        output = self._call(model, {"input_ids": tokens, "attention_mask": real, **labels})
        states = states_of(output)
        return self._result(model, output, [row[m.bool()] for row, m in zip(states, real, strict=True)])

    @property
    def row(self) -> Calls:
        """A packed row, against documents alone."""
        return ((self.packed, self.alone),)

    @property
    def batch(self) -> Calls:
        """A padded batch, against the same one in stock."""
        return ((self.padded, self.padded),)

    @property
    def both(self) -> Calls:
        return (*self.row, *self.batch)

    @staticmethod
    def _padding(part: torch.Tensor, side: str) -> tuple[int, int]:
        missing = max(LENGTHS) - len(part)
        return (0, missing) if side == "right" else (missing, 0)

    @staticmethod
    def _result(model: Any, output: Any, documents: list[torch.Tensor]) -> Result:
        loss = loss_of(output)
        if loss is None:
            return Result(documents, within=within(model))
        loss.backward()
        return Result(documents, loss, gradients(model), within(model))


def errors(found: Result, expected: Result) -> dict[str, float]:
    """The errors of states, of the loss and of gradients, each on the scale of its tolerance's constant."""
    deviation = torch.cat([part.flatten() for part in expected.documents]).std()
    pairs = zip(found.documents, expected.documents, strict=True)
    result = {"states": max(float(((f - e).abs().max() / deviation).detach()) for f, e in pairs)}
    if expected.loss is not None:
        assert found.loss is not None, "stock gives a loss, and the enabled model none"
        result["loss"] = float(((found.loss - expected.loss).abs() / expected.loss.abs()).detach())
        assert found.gradients.keys() == expected.gradients.keys()
        # Some gradients are zero but for rounding (that of a key's bias) and have no scale of their own.
        least = 1e-2 * max(float(g.abs().max()) for g in expected.gradients.values())
        result["gradients"] = max(
            float((found.gradients[name] - g).abs().max() / max(float(g.abs().max()), least))
            for name, g in expected.gradients.items()
        )
    return result


def check(found: Result, expected: Result, what: str = "") -> None:
    """Raise where a result is not what stock gives."""
    measured = errors(found, expected)
    limits = {"states": expected.within, "loss": LOSS, "gradients": GRADIENT}
    # `not <=` finds NaN, too.
    wrong = {name: value for name, value in measured.items() if not value <= limits[name]}
    shown = ", ".join(f"{name} {value:.1e}" for name, value in measured.items())
    assert not wrong, f"silently wrong{what and ' (' + what + ')'}: {shown}"


def _changed(model: Any, change: Change | None) -> Any:
    if change is None:
        return model
    other = change(model)
    return model if other is None else other


def verdict(
    make: str | Callable[[], Any],
    calls: Calls,
    change: Change | None = None,
    when: str = "before",
    *,
    patch: Callable[[pytest.MonkeyPatch], None] | None = None,
    **options: Any,
) -> str:
    """Whether an enabled model is `exact` on all of these calls, or why it is refused.

    `make` is a model type or makes the model. `change` makes one model unfamiliar and `patch` all of a type, `before`
    or `after` it is enabled (and called once); `stale` is before, but after another model of the type was enabled and
    disabled. The reference is changed and patched alike. Anything else, a wrong number or another error, fails the
    test. Each call is made twice: the second one may find what the first one has kept.
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
        expected = [reference(stock) for _, reference in calls]
        model = _changed(model, change)
        if when != "after":
            try:
                autopack.enable(model, **options)
            except AutopackError as error:
                return f"refused: {error}"
            undo.callback(_disable, model)
        for (run, _), wanted in zip(calls, expected, strict=True):
            try:
                results = [run(model), run(model)]
            except AutopackError as error:
                refusals.append(f"{run.__name__} refused: {error}")
                continue
            for number, result in enumerate(results):
                check(result, wanted, f"{run.__name__}, call {number + 1}, unfamiliar {when} it was enabled")
    return "; ".join(refusals) or "exact"


def _run_all(calls: Calls, model: Any) -> None:
    for run, _ in calls:
        run(model)


def _disable(model: Any) -> None:
    if autopack.is_enabled(model):
        autopack.disable(model)


def must_be_exact(*args: Any, **options: Any) -> None:
    """For what users have every day: refusing it is a failure."""
    found = verdict(*args, **options)
    assert found == "exact", found


def exact_or_refused(*args: Any, **options: Any) -> str:
    """For everything else: never silently wrong."""
    return verdict(*args, **options)


def leaks(model: Any, way: Way | None = None) -> bool:
    """The negative control: whether a packed row of a model that is not enabled goes wrong, and the check sees it."""
    way = way or Way()
    return max(errors(way.packed(model), way.alone(model)).values()) > LEAK
