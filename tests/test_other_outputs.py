"""Whole numbers, lists, objects and single numbers in an output are compared as floating-point tensors are.

Each model here is exact in its logits, and returns something beside them that is not: `enable` refuses its packed rows,
and `verify="never"` shows what would have gone wrong. What is exact is served.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

import autopack
from autopack import tiny
from autopack.auditing.fields import fields_of
from autopack.errors import LeakDetected, UnsupportedModel

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

LENGTHS = (9, 4, 7)
LONG = 900
"""Tokens of a row, more than any audit of this model has run."""


@dataclass
class Output(CausalLMOutputWithPast):
    """An output with one more field, whatever that is."""

    more: Any = None


@dataclass
class Plain:
    """What transformers does not know as an output."""

    tags: torch.Tensor


def tags(logits: torch.Tensor, mixes: bool) -> torch.Tensor:
    """The likeliest tag of each token, (rows, columns), which may depend on what was likely before: a small CRF."""
    scores = logits[..., :5]
    if mixes:
        scores = scores + 0.5 * scores.cumsum(1)
    return scores.argmax(-1)


def build(more: Callable[[torch.Tensor], Any]) -> Any:
    class Users(LlamaForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            return Output(logits=output.logits, loss=output.loss, more=more(output.logits))

    stock = tiny.build("llama")
    model = Users._from_config(stock.config)
    model.load_state_dict(stock.state_dict())
    return model.eval()


def row() -> dict[str, torch.Tensor]:
    ids = tiny.tokens(tiny.config("llama"), 1, sum(LENGTHS))
    return {"input_ids": ids, "position_ids": torch.cat([torch.arange(n) for n in LENGTHS])[None]}


LEAKS: dict[str, Callable[[torch.Tensor], Any]] = {
    "whole numbers": lambda logits: tags(logits, True),
    "truth values": lambda logits: tags(logits, True) % 2 == 1,
    "lists of lists": lambda logits: tags(logits, True).tolist(),
    "numpy": lambda logits: tags(logits, True).numpy(),
    "a dataclass": lambda logits: Plain(tags(logits, True)),
    "an object": lambda logits: SimpleNamespace(inner=SimpleNamespace(tags=tags(logits, True))),
    "a dict of lists": lambda logits: {"tags": [tags(logits, True)]},
    "a number": lambda logits: logits.detach().std() * logits.detach().mean(),
    "a Python number": lambda logits: float(logits.detach().std()),
    "complex numbers": lambda logits: torch.complex(logits, logits.cumsum(1)),
}
EXACT: dict[str, Callable[[torch.Tensor], Any]] = {
    "whole numbers": lambda logits: tags(logits, False),
    "lists of lists": lambda logits: tags(logits, False).tolist(),
    "a dataclass": lambda logits: Plain(tags(logits, False)),
    "a mean of tokens": lambda logits: logits.mean(),
    "a sum": lambda logits: float(logits.detach().sum()),
    "what all calls have": lambda logits: (torch.arange(11), "words", None, 3),
    "an object that holds itself": lambda logits: _holding_itself(tags(logits, False)),
}


def _holding_itself(value: torch.Tensor) -> Any:
    found = SimpleNamespace(tags=value)
    found.itself = found
    return found


def _tagged(model: Any) -> tuple[list[Any], list[Any]]:
    """What documents get of the additional field in a packed row, and alone, as far as it is one of tokens."""
    batch = row()
    found = [value for name, value in fields_of(model(**batch)).items() if name.startswith("more")]
    alone = [
        [value for name, value in fields_of(model(input_ids=ids)).items() if name.startswith("more")]
        for ids in batch["input_ids"].split(LENGTHS, 1)
    ]
    return found, [torch.cat([part.reshape(-1) for part in parts]) for parts in zip(*alone, strict=True)]


@pytest.mark.parametrize("kind", LEAKS)
@torch.no_grad()
def test_what_leaks_beside_the_logits_is_refused(kind):
    model = build(LEAKS[kind])
    with pytest.raises(UnsupportedModel, match="more"):
        autopack.enable(model)
    autopack.enable(model, verify="never")
    found, alone = _tagged(model)
    assert any(
        got.numel() != want.numel() or not torch.equal(got.reshape(-1), want)
        for got, want in zip(found, alone, strict=False)
    )


@pytest.mark.parametrize("kind", EXACT)
@torch.no_grad()
def test_what_is_exact_beside_the_logits_is_served(kind):
    model = build(EXACT[kind])
    handle = autopack.enable(model)
    assert handle.verified
    model(**row())
    if kind in ("whole numbers", "lists of lists", "a dataclass"):
        found, alone = _tagged(model)
        assert len(found) == 1
        assert torch.equal(found[0].reshape(-1), alone[0])


@torch.no_grad()
def test_what_nobody_can_attribute_to_documents_is_refused_by_its_name():
    model = build(lambda logits: logits[0, ::2].reshape(-1)[: 3 + logits.shape[1] // 2])
    with pytest.raises(UnsupportedModel, match=r"which part of more .*Leave it out"):
        autopack.enable(model)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["tensor", "list"])
def test_whole_numbers_that_leak_in_long_documents_are_found_in_the_call(kind):
    def more(logits: torch.Tensor) -> Any:
        found = tags(logits, logits.shape[1] > LONG)
        return found if kind == "tensor" else found.tolist()

    model = build(more)
    autopack.enable(model)
    model(**row())
    ids = tiny.tokens(tiny.config("llama"), 1, 3 * 320)
    where = torch.cat([torch.arange(320)] * 3)[None]
    with pytest.raises(LeakDetected, match="more"):
        model(input_ids=ids, position_ids=where)


@torch.no_grad()
def test_a_few_ties_are_no_leak():
    """A tenth of the tokens may have another class: rounding decides between two that are all but equal."""

    def more(logits: torch.Tensor) -> Any:
        found = tags(logits, False)
        if logits.shape[1] > LONG:
            found[:, ::20] += 1
        return found

    model = build(more)
    handle = autopack.enable(model)
    ids = tiny.tokens(tiny.config("llama"), 1, 3 * 320)
    model(input_ids=ids, position_ids=torch.cat([torch.arange(320)] * 3)[None])
    assert handle.envelope.checks > 0
    assert handle.envelope.leaks == 0
