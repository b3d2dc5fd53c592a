"""Parts of a model that the user replaces, before or after it is enabled: exact or refused, never
silently wrong."""

from functools import partial

import pytest
import torch
from torch import nn

import autopack
from tests.engine import WHEN, Call, leaks
from tests.subjects import (
    DECODERS,
    ENCODERS,
    alternating,
    build,
    crossed,
    layers_of,
    turned,
)
from tests.unfamiliar import parts
from tests.unfamiliar.parts import (
    HARMLESS,
    MIXING,
    PLACES,
    averaged,
    get,
    place,
    put,
)
from tests.unfamiliar.properties import Property, table

CALL = Call()
WITHOUT_CACHE = Call(given={"use_cache": False}).both
"""For layers that would share one place in the cache."""


def wrap(model, part):
    """Put a part of a model inside a module of the user's."""
    where, kind = part
    holder, name = place(model, where)
    put(holder, name, kind(get(holder, name)))


@pytest.mark.parametrize("kind", [*HARMLESS, *MIXING])
def test_the_modules_of_the_user_do_what_they_say(kind):
    """The control: another document in front changes what the mixing ones give to a token, and no
    other."""
    states = torch.randn(1, 6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    module = kind(nn.Identity())
    moves = not torch.allclose(module(states)[:, 3:], module(states[:, 3:]))
    assert moves == (kind in MIXING)


@pytest.mark.parametrize("model_type", DECODERS)
@pytest.mark.parametrize("where", PLACES)
def test_every_place_is_found(model_type, where):
    """The control: what is put there runs."""
    model, plain = build(model_type), build(model_type)
    wrap(model, (where, parts.Shifts))
    assert (CALL.alone(model).documents[0] - CALL.alone(plain).documents[0]).abs().max() > 1e-3


def equal_layer(model):
    layers_of(model)[0] = layers_of(build(model.config.model_type))[0]


def equal_backbone(model):
    setattr(model, model.base_model_prefix, build(model.config.model_type).base_model)


def fewer_layers(model):
    del layers_of(model)[-1]
    for name in ("num_hidden_layers", "n_layer", "n_layers"):
        if name in vars(model.config):
            setattr(model.config, name, len(layers_of(model)))


def shared_layers(model):
    layers = layers_of(model)
    layers[1] = layers[0]


REARRANGED = (
    equal_layer,
    equal_backbone,
    shared_layers,
    fewer_layers,
)
UNIFORM = tuple(name for name in DECODERS if name not in ("gemma3_text", "bamba"))
"""Types whose layers can take each other's place."""


def mixed(value):
    """Every token gets something of those before it, also of other documents; anything else stays
    as it is."""
    if isinstance(value, tuple):
        return (mixed(value[0]), *value[1:])
    is_states = isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() == 3
    return averaged(value) if is_states else value


def by_partial(module):
    module.forward = partial(
        lambda forward, *args, **kwargs: mixed(forward(*args, **kwargs)), module.forward
    )


def by_hook(module):
    module.register_forward_hook(lambda module, args, output: mixed(output))


def by_pre_hook(module):
    module.register_forward_pre_hook(lambda module, args: tuple(map(mixed, args)))


def by_class(module):
    cls = type(module)
    module.__class__ = type(
        "Mine", (cls,), {"forward": lambda self, *a, **k: mixed(cls.forward(self, *a, **k))}
    )


def put_at(model, way, number):
    """Code that mixes tokens at any module of a model, which may be one that never runs."""
    modules = [module for module in model.modules() if not isinstance(module, nn.ModuleList)]
    way(modules[number % len(modules)])


WAYS = [by_partial, by_hook, by_pre_hook, by_class]
ANYWHERE = alternating(
    alternating(crossed(WAYS, range(0, 63, 7), 9), DECODERS), ["before", "after", "after"]
)


@pytest.mark.parametrize("way", WAYS)
def test_without_a_proof_it_is_silent(way):
    """The control: a layer's feed-forward network, and nobody looks."""
    model = build()
    way(model.model.layers[0].mlp)
    expected = CALL.alone(model)
    with autopack.enable(model, verify=False):
        assert leaks(CALL.packed(model), expected)


MIXED = [(where, kind) for where in PLACES for kind in MIXING]
UNMIXED = [(where, kind) for where in PLACES for kind in HARMLESS]


def rearrange(model, change):
    change(model)


@table([
    Property("a part that mixes tokens", turned(alternating(crossed(MIXED, DECODERS), ["before", "after", "after"])),
             wrap, usual=1),
    Property("a part that mixes no tokens",
             [(t, part, when) for part, t in crossed(UNMIXED, DECODERS[::-1], 1) for when in WHEN], wrap, usual=1),
    Property("a part of an encoder that mixes tokens",
             [(t, ("layer", kind), when) for kind, t, when in alternating(crossed(MIXING, ENCODERS), WHEN)],
             wrap, Call(shifts=False).both, usual=1, make=lambda model_type, _: build(model_type, "masked-lm")),
    Property("code that mixes tokens, in any way and anywhere", [(t, *pair, when) for *pair, t, when in ANYWHERE],
             put_at, usual=2),
    Property("layers that are rearranged", [
        *((t, change, "after") for change, t in crossed(REARRANGED, UNIFORM, 3)),
        *((t, change, "before") for change, t in crossed(REARRANGED, UNIFORM, 1)),
    ], rearrange, WITHOUT_CACHE, usual=2),
])  # fmt: skip
def test_a_replaced_part(subject, case):
    subject.hold(*case)
