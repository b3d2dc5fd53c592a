"""Subclasses of whole models: thin ones of any signature are exact; those that do more are exact or refused."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

import autopack
from tests.unfamiliar.common import (
    DECODERS,
    LENGTHS,
    Result,
    Way,
    build,
    crossed,
    exact_or_refused,
    ids,
    leaks,
    must_be_exact,
    rebuilt,
    spans,
    states_of,
    subclass,
)

pytestmark = pytest.mark.sampled(2)

WAY = Way()


def passes_all_on(self: Any, *args: Any, **kwargs: Any) -> Any:
    return super(type(self), self).forward(*args, **kwargs)


def names_some(self: Any, input_ids: Any = None, attention_mask: Any = None, labels: Any = None, **kwargs: Any) -> Any:
    own = super(type(self), self)
    return own.forward(input_ids=input_ids, attention_mask=attention_mask, labels=labels, **kwargs)


def takes_more(self: Any, input_ids: Any = None, *, temperature: float = 1.0, **kwargs: Any) -> Any:
    output = super(type(self), self).forward(input_ids, **kwargs)
    output.logits = output.logits / temperature
    return output


def renames_labels(self: Any, input_ids: Any = None, targets: Any = None, **kwargs: Any) -> Any:
    return super(type(self), self).forward(input_ids=input_ids, labels=targets, **kwargs)


def renames_tokens(self: Any, tokens: Any = None, labels: Any = None, **kwargs: Any) -> Any:
    return super(type(self), self).forward(input_ids=tokens, labels=labels, **kwargs)


def renames_all(self: Any, tokens: Any, where: Any = None, mask: Any = None, targets: Any = None) -> Any:
    given = {"position_ids": where, "attention_mask": mask, "labels": targets}
    given = {name: value for name, value in given.items() if value is not None}
    return super(type(self), self).forward(input_ids=tokens, **given)


def takes_a_batch(self: Any, batch: dict[str, Any]) -> Any:
    return super(type(self), self).forward(**batch)


def gives_a_tuple(self: Any, *args: Any, **kwargs: Any) -> Any:
    return super(type(self), self).forward(*args, **kwargs).to_tuple()


def gives_a_dictionary(self: Any, *args: Any, **kwargs: Any) -> Any:
    output = super(type(self), self).forward(*args, **kwargs)
    return type(output)(loss=output.loss, logits=output.logits)


def logged(forward: Any) -> Any:
    """A decorator of the user's that tells nothing of what it decorates."""

    def inner(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    return inner


def logged_well(forward: Any) -> Any:
    return functools.wraps(forward)(logged(forward))


RENAMED = {"input_ids": "tokens", "position_ids": "where", "attention_mask": "mask", "labels": "targets"}
THIN = {
    "passes all on": (passes_all_on, WAY),
    "names some": (names_some, WAY),
    "takes more": (takes_more, WAY),
    "renames labels": (renames_labels, Way(names={"labels": "targets"})),
    "renames tokens": (renames_tokens, Way(names={"input_ids": "tokens"})),
    "renames all": (renames_all, Way(names=RENAMED)),
    "gives a tuple": (gives_a_tuple, WAY),
    "gives a dictionary": (gives_a_dictionary, WAY),
    "decorated": (logged(passes_all_on), WAY),
    "decorated with wraps": (logged_well(names_some), WAY),
}


@pytest.mark.parametrize(("thin", "model_type"), crossed(list(THIN), DECODERS))
def test_thin_subclasses_are_exact_on_packed_rows(model_type, thin):
    forward, way = THIN[thin]
    must_be_exact(model_type, way.row, lambda model: subclass(model, forward))


@pytest.mark.parametrize(("thin", "model_type"), crossed(list(THIN), DECODERS[::-1], 1))
def test_thin_subclasses_are_exact_on_padded_batches(model_type, thin):
    forward, way = THIN[thin]
    must_be_exact(model_type, way.batch, lambda model: subclass(model, forward))


@pytest.mark.parametrize(
    ("model_type", "form"), crossed(["llama", "gpt2", "bloom", "mamba"], ["segments", "cu_seq_lens"], 1)
)
def test_thin_subclasses_read_every_form_of_declaration(model_type, form):
    way = Way(form=form)
    must_be_exact(model_type, ((way.packed, WAY.alone),), lambda model: subclass(model, passes_all_on))


@pytest.mark.parametrize("model_type", DECODERS)
def test_the_control_leaks(model_type):
    """Without autopack every one of these subclasses mixes documents; that is what the tests above would see."""
    if model_type == "mpt":
        pytest.skip("stock MPT takes neither positions nor segments, so nothing can be declared to it")
    model = build(model_type)
    subclass(model, passes_all_on)
    assert leaks(model, Way(form="none"))


@pytest.mark.parametrize("model_type", DECODERS)
def test_a_subclass_built_by_its_own_constructor_is_exact(model_type):
    """The name of its class decides transformers' `loss_type`, and nothing else."""

    def change(model: Any) -> Any:
        return rebuilt(model, type("Chat", (type(model),), {"forward": passes_all_on, "__module__": "users_code"}))

    must_be_exact(model_type, WAY.both, change)


NAMES = ["LlamaForCausalLM", "LlamaModel", "LlamaForMaskedLM", "LlamaForSequenceClassification"]


@pytest.mark.parametrize(
    ("name", "module"), crossed(NAMES, ["users_code", "transformers.models.llama.modeling_llama"], 1)
)
def test_a_subclass_may_have_any_name(name, module):
    def change(model: Any) -> None:
        subclass(model, passes_all_on, name, __module__=module)

    must_be_exact("llama", WAY.both, change)


@pytest.mark.parametrize("model_type", DECODERS[:8])
def test_a_subclass_that_claims_to_be_of_transformers_is_read_like_any_other(model_type):
    """Its attention sees no mask: only running it tells that documents meet."""

    def forward(self: Any, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        output = super(type(self), self).forward(input_ids=input_ids, labels=labels, **kwargs)
        mean = output.logits.cumsum(1) / torch.arange(1, output.logits.shape[1] + 1)[:, None]
        output.logits = output.logits + mean
        return output

    def change(model: Any) -> None:
        base = type(model)
        subclass(model, forward, base.__name__, __module__=base.__module__, __qualname__=base.__qualname__)

    exact_or_refused(model_type, WAY.both, change)


@pytest.mark.parametrize("model_type", DECODERS)
def test_a_batch_as_one_argument(model_type):
    """What is declared lies in a dictionary that no entry can read; the backbone further in is given it openly."""

    class Batched(Way):
        def _call(self, model: Any, arguments: dict[str, Any]) -> Any:
            return model(batch=arguments)

    way = Batched()
    exact_or_refused(model_type, way.both, lambda model: subclass(model, takes_a_batch))


def makes_positions(self: Any, input_ids: Any = None, **kwargs: Any) -> Any:
    # A document begins where the user's data has a token that the tests put there.
    begins = input_ids == BEGIN
    columns = torch.arange(input_ids.shape[1])
    first = torch.where(begins, columns, 0).cummax(1).values
    return super(type(self), self).forward(input_ids, position_ids=columns - first, **kwargs)


BEGIN = 7


class FromTokens(Way):
    """Calls that declare nothing: documents begin at a token of the user's."""

    def _call(self, model: Any, arguments: dict[str, Any]) -> Any:
        arguments = {**arguments, "input_ids": arguments["input_ids"].clone()}
        arguments.pop("position_ids", None)
        columns = [a for a, _ in spans()] if arguments["input_ids"].shape == ids().shape else [0]
        arguments["input_ids"][:, columns] = BEGIN
        if "labels" in arguments:
            arguments["labels"] = arguments["input_ids"].where(arguments["labels"] != -100, -100)
        return super()._call(model, arguments)


@pytest.mark.parametrize(
    "model_type", ["llama", "gemma3_text", "qwen2_moe", "gpt2", "gpt_neox", "opt", "falcon", "phi"]
)
def test_a_forward_that_makes_its_own_positions(model_type):
    way = FromTokens(form="none")
    exact_or_refused(model_type, way.both, lambda model: subclass(model, makes_positions))


OTHER = (3, 6, 7)


def runs_twice(self: Any, input_ids: Any = None, position_ids: Any = None, **kwargs: Any) -> Any:
    """Two views of one row; a document alone has one of them."""
    if input_ids.shape[1] != sum(LENGTHS):
        return super(type(self), self).forward(input_ids, **kwargs)
    other = torch.cat([torch.arange(n) for n in OTHER])[None]
    states = self.base_model(input_ids, position_ids=position_ids).last_hidden_state
    again = self.base_model(input_ids, position_ids=other).last_hidden_state
    output = super(type(self), self).forward(input_ids, position_ids=position_ids, **kwargs)
    head = self.get_output_embeddings()
    output.logits = torch.cat([head(states), head(again)])
    return output


def two_views(model: Any) -> Result:
    """Both views, by documents alone."""
    tokens = ids()
    parts = [*tokens.split(LENGTHS, 1), *tokens.split(OTHER, 1)]
    found = [model(input_ids=part).logits[0] for part in parts]
    return Result(found)


def both_views_packed(model: Any) -> Result:
    states = states_of(model(input_ids=ids(), position_ids=torch.cat([torch.arange(n) for n in LENGTHS])[None]))
    return Result([*states[0].split(LENGTHS), *states[1].split(OTHER)])


@pytest.mark.parametrize("model_type", ["llama", "qwen2_moe", "gpt2", "gpt_neox", "opt", "phi", "olmo2", "stablelm"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_backbone_that_is_called_twice_with_two_layouts(model_type, when):
    def run(model: Any) -> Result:
        changed = "runs_twice" in str(type(model).forward)
        return both_views_packed(model) if changed else WAY.packed(model)

    change = lambda model: subclass(model, runs_twice)  # noqa: E731
    exact_or_refused(model_type, ((run, two_views),), change, when)


def adds_the_previous(self: Any, *args: Any, **kwargs: Any) -> Any:
    output = super(type(self), self).forward(*args, **kwargs)
    states = output.last_hidden_state
    output["last_hidden_state"] = states + nn.functional.pad(states, (0, 0, 1, 0))[:, :-1]
    return output


@pytest.mark.parametrize(("model_type", "when"), crossed(DECODERS, ["before", "after"], 1))
def test_a_thin_subclass_of_the_backbone_is_exact(model_type, when):
    def change(model: Any) -> None:
        backbone = model.base_model
        cls = type("Backbone", (type(backbone),), {"forward": passes_all_on, "__module__": "users_code"})
        setattr(model, model.base_model_prefix, rebuilt(backbone, cls))

    insist = must_be_exact if when == "before" else exact_or_refused
    insist(model_type, WAY.both, change, when)


@pytest.mark.parametrize(("model_type", "when"), crossed(DECODERS, ["before", "after"], 1))
def test_a_subclass_of_the_backbone_that_mixes_tokens(model_type, when):
    def change(model: Any) -> None:
        subclass(model.base_model, adds_the_previous, type(model.base_model).__name__)

    exact_or_refused(model_type, WAY.both, change, when)


@pytest.mark.parametrize("model_type", DECODERS)
def test_an_instance_that_becomes_a_thin_subclass_after_it_is_enabled(model_type):
    must_be_exact(model_type, WAY.row, lambda model: subclass(model, passes_all_on), "after")


def test_disabled_subclasses_are_as_they_were():
    model = build()
    subclass(model, passes_all_on)
    try:
        autopack.enable(model)
    finally:
        if autopack.is_enabled(model):
            autopack.disable(model)
    assert leaks(model)
