"""Models of somebody else's code, of which ranks share packed rows: some look at one token at a
time, some do not."""

import torch
from torch import nn

from tests.integration.ranks import OwnLayer
from tests.integration.row_parts import model_of


def _with_forward(kind, forward):
    model = model_of(kind)
    base = type(model)
    model.__class__ = type(base.__name__, (base,), {"forward": forward, "original": base.forward})
    return model


def handed_on():
    """A subclass whose forward calls the one that it covers."""
    return _with_forward("llama", lambda self, *args, **kwargs: self.original(*args, **kwargs))


def scaled_loss():
    """A subclass that makes its loss of logits, by transformers' own function."""

    def forward(self, input_ids=None, labels=None, **kwargs):
        given = {name: kwargs.pop(name, None) for name in ("shift_labels", "num_items_in_batch")}
        output = self.original(input_ids=input_ids, **kwargs)
        if labels is not None:
            loss = self.loss_function(
                output.logits, labels, vocab_size=self.config.vocab_size, **given
            )
            output.loss = 2 * loss
        return output

    return _with_forward("llama", forward)


def replaced_layer():
    """A model with a feed-forward layer of somebody's own."""
    model = model_of("llama")
    model.model.layers[0].mlp = OwnLayer(model.config)
    return model


def _from_before(states, positions):
    before = states.roll(1, dims=1) * (positions > 0)[..., None]
    return torch.cat([torch.zeros_like(before[:, :1]), before[:, 1:]], dim=1)


def shifted_tokens(in_evaluation=True):
    """A subclass that mixes each token into the next one of its document, which no rank can at the
    start of its part.

    Packed rows of it are exact on one process.
    """

    def forward(self, input_ids=None, position_ids=None, **kwargs):
        states = self.get_input_embeddings()(input_ids)
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        if self.training or in_evaluation:
            states = states + _from_before(states, position_ids)
        return self.original(inputs_embeds=states, position_ids=position_ids, **kwargs)

    return _with_forward("llama", forward)


def loss_of_a_row():
    """A model with a loss of its first row alone, by no count of tokens of all parts."""
    model = model_of("llama")
    model.loss_function = lambda logits, labels, **_: nn.functional.cross_entropy(
        logits[0], labels[0]
    )
    return model


def other_positions():
    """A subclass that numbers the tokens of what it is called with by itself."""

    def forward(self, input_ids=None, position_ids=None, **kwargs):
        numbers = torch.arange(input_ids.shape[1], device=input_ids.device)[None].expand_as(
            input_ids
        )
        return self.original(input_ids=input_ids, position_ids=numbers, **kwargs)

    return _with_forward("llama", forward)


def hooked(model):
    """The model with a hook on its first layer that does the same."""

    def hook(layer, args, kwargs):
        positions = kwargs.get("position_ids")
        positions = torch.arange(args[0].shape[1])[None] if positions is None else positions
        return (args[0] + _from_before(args[0], positions), *args[1:]), kwargs

    model.model.layers[0].register_forward_pre_hook(hook, with_kwargs=True)
    return model


SERVED = {"handed on": handed_on, "scaled loss": scaled_loss}
REFUSED = {
    "replaced layer": (replaced_layer, "it has no OwnLayer"),
    "tokens of before": (shifted_tokens, "its twin gives something else: logits"),
    "tokens of before, in training": (
        lambda: shifted_tokens(in_evaluation=False),
        "something else: loss",
    ),
    "hook": (lambda: hooked(model_of("llama")), "it has no hook"),
    "own loss": (loss_of_a_row, "its twin gives something else: loss"),
    "own positions": (other_positions, "and other documents"),
}
"""With what the error has to say."""
