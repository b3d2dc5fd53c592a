"""Whole numbers, lists, objects and single numbers in an output are compared as floating-point
tensors are.

Each model here is exact in its logits, and returns something beside them that is not: `enable`
refuses its packed rows, and `verify=False` shows what would have gone wrong. What is exact is
served."""

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
from tests.support.conditional import row
from tests.support.padded import batch as padded_batch
from tests.support.padded import mask_of
from tests.support.refusals import refused

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


def tags(logits, mixes):
    """The likeliest tag of each token, (rows, columns), which may depend on what was likely before:
    a small CRF."""
    scores = logits[..., :5]
    if mixes:
        scores = scores + 0.5 * scores.cumsum(1)
    return scores.argmax(-1)


def build(more):
    class Users(LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            return Output(logits=output.logits, loss=output.loss, more=more(output.logits))

    stock = tiny.build("llama")
    model = Users._from_config(stock.config)
    model.load_state_dict(stock.state_dict())
    return model.eval()


LEAKS = {
    "whole numbers": lambda logits: tags(logits, True),
    "lists of lists": lambda logits: tags(logits, True).tolist(),
    "numpy": lambda logits: tags(logits, True).numpy(),
    "a dataclass": lambda logits: Plain(tags(logits, True)),
    "an object": lambda logits: SimpleNamespace(inner=SimpleNamespace(tags=tags(logits, True))),
    "a number": lambda logits: logits.detach().std() * logits.detach().mean(),
    "a Python number": lambda logits: float(logits.detach().std()),
    "complex numbers": lambda logits: torch.complex(logits, logits.cumsum(1)),
}
EXACT = {
    "whole numbers": lambda logits: tags(logits, False),
    "lists of lists": lambda logits: tags(logits, False).tolist(),
    "a dataclass": lambda logits: Plain(tags(logits, False)),
    "a mean of tokens": lambda logits: logits.mean(),
    "a sum": lambda logits: float(logits.detach().sum()),
    "what all calls have": lambda logits: (torch.arange(11), "words", None, 3),
    "an object that holds itself": lambda logits: _holding_itself(tags(logits, False)),
}


def _holding_itself(value):
    found = SimpleNamespace(tags=value)
    found.itself = found
    return found


def _tagged(model):
    """What documents get of the additional field in a packed row, and alone, as far as it is one of
    tokens."""

    def more(**given):
        return [
            value.reshape(-1)
            for name, value in fields_of(model(**given)).items()
            if name.startswith("more")
        ]

    batch = row(*LENGTHS)
    alone = [more(input_ids=ids) for ids in batch["input_ids"].split(LENGTHS, 1)]
    return more(**batch), [torch.cat(parts) for parts in zip(*alone, strict=True)]


@pytest.mark.parametrize("kind", LEAKS)
@torch.no_grad()
def test_what_leaks_beside_the_logits_is_refused(kind):
    model = build(LEAKS[kind])
    with refused("not-exact", match="more"):
        autopack.enable(model)
    autopack.enable(model, verify=False)
    found, alone = _tagged(model)
    assert not all(map(torch.equal, found, alone))


@pytest.mark.parametrize("kind", EXACT)
@torch.no_grad()
def test_what_is_exact_beside_the_logits_is_served(kind):
    model = build(EXACT[kind])
    handle = autopack.enable(model)
    assert handle.verified
    model(**row(*LENGTHS))
    if kind in ("whole numbers", "lists of lists", "a dataclass"):
        found, alone = _tagged(model)
        assert len(found) == 1
        assert torch.equal(found[0], alone[0])


def unattributable(logits):
    """A tensor that is neither of tokens nor of documents."""
    return logits[0, ::2].reshape(-1)[: 3 + logits.shape[1] // 2]


class Own(LlamaForCausalLM):
    """Returns a field that nobody can attribute, in the form that it is made with."""

    form = Output

    def forward(self, *args, return_dict=True, **kwargs):
        output = super().forward(*args, **kwargs)
        fields = {"logits": output.logits, "more": unattributable(output.logits)}
        if output.loss is not None:
            fields["loss"] = output.loss
        return self.form(**fields) if return_dict else tuple(fields.values())


def own(form=Output):
    kind = type("Formed", (Own,), {"form": staticmethod(form)})
    return kind._from_config(tiny.config("llama")).eval()


@torch.no_grad()
@pytest.mark.parametrize("verify", [True, "strict"])
@pytest.mark.parametrize("form", [Output, dict, SimpleNamespace])
def test_what_nobody_can_attribute_is_none_in_packed_calls_and_all_else_is_exact(
    form, verify, caplog
):
    model, batch = own(form), row(*LENGTHS)
    alone = torch.cat(
        [_named(model(input_ids=ids))["logits"][0] for ids in batch["input_ids"].split(LENGTHS, 1)]
    )
    handle = autopack.enable(model, verify=verify)
    assert handle.enabled.proof.leaves_out == ("more",)
    assert (
        "Formed return None for more, which autopack cannot split by document. Run" in caplog.text
    )
    for given in (batch, batch | {"labels": batch["input_ids"]}):
        output = _named(model(**given))
        assert output.get("more") is None
        # rounding of float32
        torch.testing.assert_close(output["logits"][0], alone, rtol=0, atol=1e-5)
    # Calls that pack nothing have it, and padded batches, which a forward of one's own gets as they
    # came.
    padded = {**padded_batch("backbone", mask_of((9, 4))), "use_cache": False}
    for given in ({"input_ids": batch["input_ids"]}, padded):
        assert _named(model(**given))["more"] is not None
    with refused("output-unknown", match="packed calls leave more out .*return_dict=True"):
        model(**batch, return_dict=False)
    assert len([line for line in caplog.messages if "None for more" in line]) == 1
    autopack.disable(model)
    assert _named(model(**batch))["more"] is not None


def _named(output):
    return dict(output) if isinstance(output, dict) else dict(vars(output))


@torch.no_grad()
def test_an_audit_does_not_pass_over_it_where_nothing_was_proven():
    model = own()
    autopack.enable(model, verify=False)
    assert "nobody can tell which part of more" in str(autopack.audit(model, modes=("default",)))


@torch.no_grad()
@pytest.mark.parametrize("kind", ["tensor", "list"])
def test_whole_numbers_that_leak_in_long_documents_are_found_in_the_call(kind):
    def more(logits):
        found = tags(logits, logits.shape[1] > LONG)
        return found if kind == "tensor" else found.tolist()

    model = build(more)
    autopack.enable(model)
    model(**row(*LENGTHS))
    with refused("leak-detected", match="more"):
        model(**row(320, 320, 320))


@torch.no_grad()
def test_a_few_ties_are_no_leak():
    """A tenth of the tokens may have another class: rounding decides between two that are all but
    equal."""

    def more(logits):
        found = tags(logits, False)
        if logits.shape[1] > LONG:
            found[:, ::20] += 1
        return found

    model = build(more)
    handle = autopack.enable(model)
    model(**row(320, 320, 320))
    assert handle.checked.checks > 0
    assert handle.checked.leaks == 0
