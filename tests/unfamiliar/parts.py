"""Parts of models found in any type by what they are, and modules of a user's to put in their
place."""

import torch
from torch import nn

from tests.subjects import layers_of

_MIXERS = ("self_attn", "attn", "attention", "self_attention", "mixer", "mamba")


def mixer_name(layer):
    """Name of the part of a layer that mixes tokens."""
    return next(name for name in _MIXERS if hasattr(layer, name))


def norm_name(layer):
    """Name of the first norm of a layer."""
    return next(
        name for name, part in layer.named_children() if "norm" in type(part).__name__.lower()
    )


def feed_forward_name(layer):
    """Name of the last part of a layer that has parameters and is no norm: of its feed-forward
    network, mostly."""
    parts = dict(layer.named_children()).items()
    return [
        n
        for n, part in parts
        if "norm" not in type(part).__name__.lower() and len(list(part.parameters()))
    ][-1]


def place(model, where):
    """The holder of a part of a model, and the name (or number) that it has there."""
    layers = layers_of(model)
    if where == "layer":
        return layers, 0
    if where == "mixer":
        return layers[0], mixer_name(layers[0])
    if where == "norm":
        return layers[0], norm_name(layers[0])
    if where == "feed-forward":
        return layers[0], feed_forward_name(layers[0])
    part = model.get_input_embeddings() if where == "embedding" else model.get_output_embeddings()
    for holder in model.modules():
        for name, child in holder.named_children():
            if child is part:
                return holder, name
    raise AssertionError(f"{type(model).__name__} holds no {where}")


def get(holder, name):
    return holder[name] if isinstance(name, int) else getattr(holder, name)


def put(holder, name, part):
    if isinstance(name, int):
        holder[name] = part
    else:
        setattr(holder, name, part)


def as_they_are(states):
    return states


def scaled(states):
    """Token by token."""
    return torch.tanh(states) + 0.5 * states


def shifted(states):
    """A convolution over two tokens."""
    return states + nn.functional.pad(states, (0, 0, 1, 0))[..., :-1, :]


def averaged(states):
    """A mean over all tokens so far."""
    return states + states.cumsum(-2) / torch.arange(1, states.shape[-2] + 1)[:, None]


def centred(states):
    """A statistic over all tokens of the batch, as of BatchNorm in training."""
    return states - states.mean((0, 1))


def attended(states):
    """Attention of the user's own, which no interface knows of."""
    return states + nn.functional.scaled_dot_product_attention(
        states, states, states, is_causal=True
    )


def by_column(states):
    """A position of the column, not of the document."""
    return states * (1 + 0.1 * torch.arange(states.shape[-2], dtype=states.dtype)[:, None])


def changed(change, output):
    """What a part gives, with its states changed; it may be a tuple, and OPT flattens its rows."""
    if isinstance(output, tuple):
        return (change(output[0]), *output[1:])
    return change(output) if output.dim() > 2 else change(output[None])[0]


class Wrapped(nn.Module):
    """A part of a model inside a module of the user's, which does something with the states that it
    gives."""

    change = staticmethod(as_they_are)

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            # models ask layers and embeddings for attributes
            return getattr(super().__getattr__("inner"), name)

    def forward(self, *args, **kwargs):
        return changed(type(self).change, self.inner(*args, **kwargs))


def wrapping(change):
    return type(
        f"Wrapped_{change.__name__}",
        (Wrapped,),
        {"change": staticmethod(change), "__module__": __name__},
    )


Shifts, Centres, Attends = wrapping(shifted), wrapping(centred), wrapping(attended)
HARMLESS = (Wrapped, wrapping(scaled))
MIXING = (Shifts, wrapping(averaged), Centres, Attends, wrapping(by_column))
PLACES = ("mixer", "feed-forward", "norm", "layer", "embedding", "head")
