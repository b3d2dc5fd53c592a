"""Cells of the matrix are what the default call of `enable` gives, and say what is left out."""

import pytest
from transformers import LlamaForCausalLM

import autopack
from autopack import tiny
from compat import cells
from compat.words import cell_of, status_of, word_of
from tests.subjects import rebuilt


def of_class(cls):
    return rebuilt(tiny.build("llama"), cls)


class Mixing(LlamaForCausalLM):
    """Adds to every token what stands before it in the row."""

    def forward(self, input_ids, **kwargs):
        embedded = self.model.embed_tokens(input_ids)
        return super().forward(inputs_embeds=embedded + embedded.roll(1, 1), **kwargs)


class Failing(LlamaForCausalLM):
    """Cannot run a single document."""

    def forward(self, input_ids, **kwargs):
        raise RuntimeError("it never ran")


class Deaf(LlamaForCausalLM):
    """Has a loss that reads no label."""

    def forward(self, input_ids, labels=None, **kwargs):
        output = super().forward(input_ids, **kwargs)
        output.loss = None if labels is None else output.logits.sum() * 0 + 1
        return output


class Wanting(LlamaForCausalLM):
    """Is not made of a configuration alone, so it has no twin."""

    def __init__(self, config, wanted):
        super().__init__(config)


def with_a_hook():
    model = of_class(LlamaForCausalLM)
    model.model.layers[0].register_forward_hook(lambda module, args, output: None)
    return model


def test_the_call_has_no_options(monkeypatch):
    """One call, `autopack.enable(model)`: what is recorded is what users get."""
    asked = []
    enable = autopack.enable

    def noted(*args, **options):
        asked.append((len(args), options))
        return enable(*args, **options)

    monkeypatch.setattr(autopack, "enable", noted)
    assert cells.measured("causal-lm", "llama", "eager")["status"] == "exact"
    assert asked == [(1, {})]


@pytest.mark.parametrize(
    ("make", "status", "name", "said"),
    [
        (lambda: of_class(LlamaForCausalLM), "exact", None, None),
        (lambda: of_class(Mixing), "refused", "reason", "of their standard deviation"),
        (lambda: of_class(Failing), "upstream error", "reason", "RuntimeError: it never ran"),
        (with_a_hook, "exact", "padded", "sees the padded form"),
        (lambda: of_class(Deaf), "exact", "labels", "no labels were found"),
        (lambda: Wanting(tiny.config("llama"), 3), "exact", "twin", "its calls are checked"),
    ],
)
def test_what_became_of_a_model_and_what_is_left_out(make, status, name, said):
    found = cells.enabled_and_audited(make())
    assert found["status"] == status
    assert {"padded", "labels", "reason", "twin"} & found.keys() == {name} - {None}
    assert name is None or said in found[name]


# A word says all of a cell but the sizes of errors and the time.


@pytest.mark.parametrize(
    ("cell", "word"),
    [
        ({"status": "exact"}, "exact"),
        ({"status": "exact", "labels": "why"}, "exact labels="),
        ({"status": "exact", "padded": "so", "labels": "why"}, "exact padded="),
        ({"status": "refused", "reason": "a law"}, "refused "),
        ({"status": "LEAK", "reason": "off by 2"}, "LEAK "),
        ({"status": "upstream error", "reason": "stock raises"}, "upstream error "),
        ({"status": "absent"}, "-"),
    ],
)
def test_and_back(cell, word):
    reasons = {}
    found = word_of(cell, reasons)
    assert found.startswith(word)
    assert cell_of(found, reasons) == cell
    assert status_of(found) == cell["status"]


def test_a_typing_error_is_no_word():
    with pytest.raises(ValueError, match=r"'exact!' is no word"):
        status_of("exact!")
