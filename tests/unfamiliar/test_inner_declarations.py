"""Declarations that appear behind the outermost entry, or that a hook of the user's changes on the way.

Hooks that a user adds before `enable` run before autopack's, those added later run after it: both are everyday.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.unfamiliar.common import (
    ATTENDING,
    LENGTHS,
    Result,
    Way,
    alternating,
    build,
    crossed,
    exact_or_refused,
    ids,
    subclass,
)
from tests.unfamiliar.parts import layers_of

pytestmark = pytest.mark.sampled(2)

WHEN = ("before", "after")
HOOKED = [("before", False), ("after", True), ("after", False), ("before", True), ("after", True)]
"""When a hook is added, and whether to the backbone or to the whole."""
SILENT = Way(form="none")
"""Calls that declare nothing by themselves."""
POSITIONS = torch.cat([torch.arange(n) for n in LENGTHS])[None]
SEGMENTS = torch.cat([torch.full((n,), i + 1) for i, n in enumerate(LENGTHS)])[None]


def is_row(tokens: Any) -> bool:
    """Whether a call is one of the packed row, and not of a document alone or of a padded batch."""
    return isinstance(tokens, torch.Tensor) and tokens.shape[:2] == ids().shape


def _adds(**added: torch.Tensor) -> Any:
    def hook(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        tokens = kwargs.get("input_ids", args[0] if args else kwargs.get("inputs_embeds"))
        return (args, {**kwargs, **added}) if is_row(tokens) else None

    return hook


def hooked(hook: Any, inner: bool, kind: str = "pre") -> Any:
    """Adds a hook of the user's to the model, or to its backbone."""

    def change(model: Any) -> None:
        # OPT's head calls the decoder of its base model, and never that model.
        module = getattr(model.base_model, "decoder", model.base_model) if inner else model
        register = module.register_forward_pre_hook if kind == "pre" else module.register_forward_hook
        register(hook, with_kwargs=True)

    return change


ADDED = {
    "positions": _adds(position_ids=POSITIONS),
    "segments": _adds(attention_mask=SEGMENTS),
    "positions and no cache": _adds(position_ids=POSITIONS, use_cache=False),
}


@pytest.mark.parametrize(("model_type", "name", "place"), alternating(
    crossed(ATTENDING, ["positions", "positions and no cache"], 2), HOOKED
))  # fmt: skip
def test_a_pre_hook_that_adds_positions(model_type, name, place):
    when, inner = place
    exact_or_refused(model_type, SILENT.row, hooked(ADDED[name], inner), when)


@pytest.mark.parametrize(("model_type", "place"), crossed(["llama", "gpt2", "opt", "bloom", "mamba"], HOOKED[:4], 2))
def test_a_pre_hook_that_adds_segments(model_type, place):
    when, inner = place
    exact_or_refused(model_type, SILENT.row, hooked(ADDED["segments"], inner), when)


OTHER = torch.cat([torch.arange(n) for n in (3, 6, 7)])[None]


def by_other_lengths(model: Any) -> Result:
    """What the documents that the hook declares get alone, in the form of those that the call declares."""
    states = torch.cat([model(input_ids=part).logits[0] for part in ids().split((3, 6, 7), 1)])
    return Result(list(states.split(LENGTHS)))


@pytest.mark.parametrize(("model_type", "place"), crossed(ATTENDING, HOOKED[:4], 2))
def test_a_pre_hook_that_declares_other_documents(model_type, place):
    """The code that runs is told of other documents than the call: theirs is the result, or none."""
    when, inner = place
    way = Way(labels=None)
    hook = _adds(position_ids=OTHER)
    exact_or_refused(model_type, ((way.packed, by_other_lengths),), hooked(hook, inner), when)


def hides_tokens(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """A pre-hook that masks the last token of every document: to autopack it is padding then."""
    tokens = kwargs.get("input_ids")
    if tokens is None or not isinstance(kwargs.get("attention_mask"), torch.Tensor):
        return None
    mask = kwargs["attention_mask"].clone()
    mask[:, 2] = 0
    return args, {**kwargs, "attention_mask": mask}


@pytest.mark.parametrize(("model_type", "place"), crossed(ATTENDING, HOOKED[:4], 1))
def test_a_pre_hook_that_changes_the_mask_of_a_padded_batch(model_type, place):
    """A hole in a document; what stock makes of it is the reference."""
    when, inner = place
    exact_or_refused(model_type, WITHOUT_LABELS.batch, hooked(hides_tokens, inner), when)


WITHOUT_LABELS = Way(labels=None)


def changes_labels(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """A pre-hook that leaves some labels out, and puts one where there was none."""
    labels = kwargs["labels"].clone()
    labels[labels % 3 == 0] = -100
    return args, {**kwargs, "labels": labels}


class FewerLabels(Way):
    """Counts what the hook leaves."""

    def _labels(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"labels": tokens.where(tokens % 3 != 0, -100)}


@pytest.mark.parametrize(("model_type", "when"), crossed([*ATTENDING, "bloom", "mamba", "falcon"], WHEN, 1))
def test_a_pre_hook_that_changes_labels(model_type, when):
    exact_or_refused(model_type, FewerLabels().both, hooked(changes_labels, False), when)


def gives_labels(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    mask = kwargs.get("attention_mask")
    labels = kwargs["input_ids"] if mask is None else kwargs["input_ids"].masked_fill(mask == 0, -100)
    return args, {**kwargs, "labels": labels}


class LabelsOfTheHook(Way):
    """No labels are given with the call."""

    def _call(self, model: Any, arguments: dict[str, Any]) -> Any:
        arguments.pop("labels", None)
        return super()._call(model, arguments)


@pytest.mark.parametrize(("model_type", "when"), crossed(["mamba", *ATTENDING, "bloom", "falcon"], WHEN, 1))
def test_a_pre_hook_that_gives_labels(model_type, when):
    exact_or_refused(model_type, LabelsOfTheHook().both, hooked(gives_labels, False), when)


def previous(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
    """A forward hook that adds to each token what the one before it got."""
    states = output.last_hidden_state
    output["last_hidden_state"] = states + nn.functional.pad(states, (0, 0, 1, 0))[:, :-1]
    return output


def scaled(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
    output["last_hidden_state"] = output.last_hidden_state * 1.5
    return output


@pytest.mark.parametrize(("model_type", "hook", "when"), alternating(
    crossed([*ATTENDING, "bloom", "mamba", "mpt"], [previous, scaled], 1), ["before", "before", "after", "after"]
))  # fmt: skip
def test_a_forward_hook_that_changes_what_the_backbone_gives(model_type, hook, when):
    exact_or_refused(model_type, Way().both, hooked(hook, True, "post"), when)


def previous_in_a_layer(module: nn.Module, args: Any, output: Any) -> Any:
    states = output[0] if isinstance(output, tuple) else output
    states = states + nn.functional.pad(states, (0, 0, 1, 0))[:, :-1]
    return (states, *output[1:]) if isinstance(output, tuple) else states


def first_in_a_layer(module: nn.Module, args: Any) -> Any:
    """A pre-hook that steers: it adds the first token's state to every token's."""
    return (args[0] + args[0][:, :1], *args[1:])


ON_LAYERS = [("before", "pre"), ("after", "pre"), ("before", "post"), ("after", "post")]


@pytest.mark.parametrize(("model_type", "place"), crossed([*ATTENDING, "bloom", "mamba", "mpt"], ON_LAYERS, 2))
def test_a_hook_on_a_layer_that_mixes_tokens(model_type, place):
    when, kind = place

    def change(model: Any) -> None:
        layer = layers_of(model)[0]
        if kind == "pre":
            layer.register_forward_pre_hook(first_in_a_layer)
        else:
            layer.register_forward_hook(previous_in_a_layer)

    exact_or_refused(model_type, Way().both, change, when)


def masks_the_inside(self: Any, input_ids: Any = None, attention_mask: Any = None, **kwargs: Any) -> Any:
    """An unpadded batch whose backbone is given another mask: a token in the middle is hidden."""
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask.clone()
    mask[:, 1] = 0
    states = self.base_model(input_ids=input_ids, attention_mask=mask).last_hidden_state
    output = super(type(self), self).forward(input_ids=input_ids, attention_mask=attention_mask, **kwargs)
    output.logits = output.logits + self.get_output_embeddings()(states)
    return output


def forgets_the_mask(self: Any, input_ids: Any = None, attention_mask: Any = None, **kwargs: Any) -> Any:
    """A second pass over all columns, those of padding too: what it gives to real tokens is causal."""
    states = self.base_model(input_ids=input_ids).last_hidden_state
    output = super(type(self), self).forward(input_ids=input_ids, attention_mask=attention_mask, **kwargs)
    output.logits = output.logits + self.get_output_embeddings()(states)
    return output


def pools_inside(self: Any, input_ids: Any = None, attention_mask: Any = None, **kwargs: Any) -> Any:
    """A pooling head: the mean over the real tokens of each row is added to each of them."""
    output = super(type(self), self).forward(input_ids=input_ids, attention_mask=attention_mask, **kwargs)
    mask = torch.ones_like(input_ids) if attention_mask is None else (attention_mask > 0).long()
    mean = (output.logits * mask[..., None]).sum(1, keepdim=True) / mask.sum(1)[:, None, None]
    output.logits = output.logits + mean
    return output


def regularised(self: Any, input_ids: Any = None, attention_mask: Any = None, **kwargs: Any) -> Any:
    """A penalty on the change from token to token, added to the loss."""
    output = super(type(self), self).forward(input_ids=input_ids, attention_mask=attention_mask, **kwargs)
    steps = output.logits[:, 1:] - output.logits[:, :-1]
    mask = torch.ones_like(input_ids) if attention_mask is None else (attention_mask > 0).long()
    if output.loss is not None:
        output.loss = (
            output.loss + 0.1 * (steps.square().mean(-1) * mask[:, 1:] * mask[:, :-1]).sum() / mask[:, 1:].sum()
        )
    return output


TEACHERS: dict[str, Any] = {}


def teaches(self: Any, input_ids: Any = None, attention_mask: Any = None, **kwargs: Any) -> Any:
    """A stock teacher, called with what the model was called with."""
    output = super(type(self), self).forward(input_ids=input_ids, attention_mask=attention_mask, **kwargs)
    kwargs.pop("labels", None)
    with torch.no_grad():
        wanted = TEACHERS[self.config.model_type](input_ids=input_ids, attention_mask=attention_mask, **kwargs).logits
    output.logits = output.logits - 0.5 * wanted
    return output


INSIDE = (masks_the_inside, forgets_the_mask, pools_inside, regularised, teaches)


@pytest.mark.parametrize(("model_type", "forward", "when"), alternating(
    crossed([*ATTENDING, "bloom", "mamba"], INSIDE, 2), WHEN
))  # fmt: skip
def test_a_forward_that_does_more_inside(model_type, forward, when):
    TEACHERS[model_type] = build(model_type)
    exact_or_refused(model_type, Way().both, lambda model: subclass(model, forward), when)


@pytest.mark.parametrize("forward", INSIDE)
@pytest.mark.parametrize("model_type", ["llama", "gpt2", "bloom"])
def test_what_is_done_inside_changes_the_result(model_type, forward):
    """The control: each of these forwards gives something else than the stock one."""
    TEACHERS[model_type] = build(model_type)
    model, plain = build(model_type), Way().padded(build(model_type))
    subclass(model, forward)
    found = Way().padded(model)
    pairs = zip(found.documents, plain.documents, strict=True)
    moved = max(float((f - p).abs().max()) for f, p in pairs)
    assert moved > 1e-3 or abs(found.loss - plain.loss) > 1e-3
