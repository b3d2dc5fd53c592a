"""Subclasses of whole models: thin ones of any signature are exact; those that do more are exact or
refused."""

import torch

from tests.conftest import spans
from tests.engine import IGNORED, LENGTHS, WHEN, Call
from tests.subjects import DECODERS, crossed, layers_of, rebuilt, subclass, turned
from tests.unfamiliar.parts import averaged, changed, shifted
from tests.unfamiliar.properties import Property, table

CALL = Call()


def passes_all_on(self, *args, **kwargs):
    return super(type(self), self).forward(*args, **kwargs)


def names_some(self, input_ids=None, attention_mask=None, labels=None, **kwargs):
    own = super(type(self), self)
    return own.forward(input_ids=input_ids, attention_mask=attention_mask, labels=labels, **kwargs)


def takes_more(self, input_ids=None, *, temperature=1.0, **kwargs):
    output = super(type(self), self).forward(input_ids, **kwargs)
    output.logits = output.logits / temperature
    return output


def renames_all(self, tokens, where=None, mask=None, targets=None):
    given = {"position_ids": where, "attention_mask": mask, "labels": targets}
    given = {name: value for name, value in given.items() if value is not None}
    return super(type(self), self).forward(input_ids=tokens, **given)


def takes_a_batch(self, batch):
    return super(type(self), self).forward(**batch)


def gives_a_tuple(self, *args, **kwargs):
    return super(type(self), self).forward(*args, **kwargs).to_tuple()


def logged(forward):
    """A decorator of the user's that tells nothing of what it decorates."""

    def inner(*args, **kwargs):
        return forward(*args, **kwargs)

    return inner


RENAMED = {
    "input_ids": "tokens",
    "position_ids": "where",
    "attention_mask": "mask",
    "labels": "targets",
}
THIN = {
    "passes all on": (passes_all_on, CALL),
    "names some": (names_some, CALL),
    "takes more": (takes_more, CALL),
    "renames all": (renames_all, Call(names=RENAMED)),
    "gives a tuple": (gives_a_tuple, CALL),
    "decorated": (logged(passes_all_on), CALL),
}


def thin(model, *_):
    subclass(model, passes_all_on)


def of_thin(model, name):
    subclass(model, THIN[name][0])


def built_by_its_own_constructor(model):
    """The name of its class decides transformers' `loss_type`, and nothing else."""
    return rebuilt(
        model, type("Chat", (type(model),), {"forward": passes_all_on, "__module__": "users_code"})
    )


NAMES = ["LlamaForCausalLM", "LlamaModel", "LlamaForMaskedLM", "LlamaForSequenceClassification"]
MODULES = ["users_code", "transformers.models.llama.modeling_llama"]


def adds_the_mean(self, input_ids=None, labels=None, **kwargs):
    output = super(type(self), self).forward(input_ids=input_ids, labels=labels, **kwargs)
    output.logits = averaged(output.logits)
    return output


def claims_to_be_of_transformers(model):
    """Its attention sees no mask: only running it tells that documents meet."""
    base = type(model)
    subclass(
        model,
        adds_the_mean,
        base.__name__,
        __module__=base.__module__,
        __qualname__=base.__qualname__,
    )


class Batched(Call):
    """What is declared lies in a dictionary that no entry can read; the backbone further in is
    given it openly."""

    def run(self, model, arguments):
        return model(batch=arguments)


BEGIN = 7
"""The token that begins a document in the user's data; the tests put it there."""


def makes_positions(self, input_ids=None, **kwargs):
    columns = torch.arange(input_ids.shape[1])
    first = torch.where(input_ids == BEGIN, columns, 0).cummax(1).values
    return super(type(self), self).forward(input_ids, position_ids=columns - first, **kwargs)


def makes_positions_and_mixes(model):
    subclass(model, makes_positions)
    layers_of(model)[0].register_forward_hook(lambda module, args, output: changed(shifted, output))


class FromTokens(Call):
    """Calls that declare nothing, and so are no control of each other: documents begin at a token
    of the user's."""

    def run(self, model, arguments):
        arguments = {**arguments, "input_ids": arguments["input_ids"].clone()}
        columns = [a for a, _ in spans(LENGTHS)] if self.is_row(arguments["input_ids"]) else [0]
        arguments["input_ids"][:, columns] = BEGIN
        if "labels" in arguments:
            arguments["labels"] = arguments["input_ids"].where(
                arguments["labels"] != IGNORED, IGNORED
            )
        return super().run(model, arguments)

    @property
    def row(self):
        return ((self.undeclared, self.alone),)


def adds_the_previous(self, *args, **kwargs):
    output = super(type(self), self).forward(*args, **kwargs)
    output["last_hidden_state"] = shifted(output.last_hidden_state)
    return output


def thin_backbone(model):
    backbone = model.base_model
    cls = type(
        "Backbone", (type(backbone),), {"forward": passes_all_on, "__module__": "users_code"}
    )
    setattr(model, model.base_model_prefix, rebuilt(backbone, cls))


def backbone_that_mixes(model):
    subclass(model.base_model, adds_the_previous, type(model.base_model).__name__)


FORMS = crossed(["llama", "gpt2", "bloom", "mamba"], ["segments", "cu_seq_lens"], 1)
WITH_POSITIONS = ["llama", "gemma3_text", "qwen2_moe", "gpt2", "gpt_neox", "opt", "falcon", "phi"]


@table([
    Property("thin, on packed rows", turned(crossed(list(THIN), DECODERS)), of_thin,
             lambda _, name: THIN[name][1].row, WHEN, usual=1),
    Property("thin, on padded batches", turned(crossed(list(THIN), DECODERS[::-1], 1)), of_thin,
             lambda _, name: THIN[name][1].batch, WHEN, usual=2),
    Property("thin, by every form of declaration", FORMS, thin, lambda _, form: Call(form=form).row, WHEN, usual=1),
    Property("thin, after it is enabled", [(t, "after") for t in DECODERS], thin, CALL.row, WHEN),
    Property("built by its own constructor", DECODERS, built_by_its_own_constructor, exact=WHEN),
    Property("of any name", [("llama", *pair) for pair in crossed(NAMES, MODULES, 1)],
             lambda model, name, module: subclass(model, passes_all_on, name, __module__=module), exact=WHEN),
    Property("claims to be of transformers", DECODERS[:8], claims_to_be_of_transformers),
    Property("a batch as one argument", DECODERS, lambda model: subclass(model, takes_a_batch), Batched().both),
    Property("a forward that makes its own positions", WITH_POSITIONS,
             lambda model: subclass(model, makes_positions), FromTokens().both, usual=2),
    Property("a forward that makes its own positions, above a layer that mixes tokens", ["llama"],
             makes_positions_and_mixes, FromTokens().both),
    Property("a thin backbone", crossed(DECODERS, WHEN, 1), thin_backbone, exact=("before",), usual=2),
    Property("a backbone that mixes tokens", crossed(DECODERS, WHEN, 1), backbone_that_mixes),
])  # fmt: skip
def test_a_subclass(subject, case):
    subject.hold(*case)
