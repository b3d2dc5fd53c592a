"""Changes that transformers might make, made here: an error that names the place, and nothing is
changed.

What changes is transformers, by assignments that are taken back. Every place is one that an enabled
model stands at, or whose code it reads; without the change `enable` works, which is asked first.
"""

import contextlib
import functools
import inspect
import types
from importlib import import_module

import pytest
import wrapt
from torch import nn

import autopack
from autopack import patching, tiny
from autopack.enabling.attach import examine, needed_sites
from autopack.enabling.prove import renew
from autopack.errors import SiteDrift
from autopack.patching import Site
from autopack.registry import family_for
from autopack.runtime.model import Options
from tests.conftest import attributes, same
from tests.support.refusals import refused

TASKS = {"t5": "seq2seq", "bert": "masked-lm"}
MODELS = "transformers.models"
ATTENTION = "transformers.modeling_utils:AttentionInterface._global_mapping"
MASK = "transformers.masking_utils:AttentionMaskInterface._global_mapping"


class Place:
    """Where something of transformers is held: `module:path`, or `module:path[key]`."""

    def __init__(self, address):
        module, _, path = address.partition(":")
        path, _, key = path.removesuffix("]").partition("[")
        self.site = Site(module, path, lambda original, site: original, key or None)
        self.value = self.site.present()
        parent, attribute, held = wrapt.resolve_path(import_module(module), path)
        self.where = ("item", held, key) if key else ("attr", parent, attribute)

    def put(self, monkeypatch, value):
        kind, *where = self.where
        getattr(monkeypatch, f"set{kind}")(*where, value)

    def take_away(self, monkeypatch):
        kind, *where = self.where
        getattr(monkeypatch, f"del{kind}")(*where)


def build(model_type):
    attn_implementation = "eager" if model_type == "mamba2" else "sdpa"
    return tiny.build(
        model_type, task=TASKS.get(model_type, "causal-lm"), attn_implementation=attn_implementation
    )


def sites_of(model):
    """The sites that `enable` would install for a model."""
    family = family_for(model)
    enabled = examine(model, family, Options(verify=False), renew)
    return needed_sites(enabled.anatomy, enabled.implementations())


def standing(sites):
    """What stands at each site, by its name; the class `SiteDrift` where there is nothing."""
    found = {}
    for site in sites:
        try:
            found[str(site)] = site.present()
        except SiteDrift:
            found[str(site)] = SiteDrift
    return found


def is_exact(model):
    return autopack.audit(model, modes=("default", "two rows"), gradients=False).exact


@functools.cache
def works(model_type):
    """Whether a model of a type can be enabled and is exact while nothing has changed."""
    model = build(model_type)
    sites = {*map(str, sites_of(model))}
    with autopack.enable(model, verify=False):
        return sites <= {*map(str, patching._installed)} and is_exact(model)


def control(model_type):
    """A model of a type that can be enabled, and the sites that it would have."""
    assert works(model_type)
    model = build(model_type)
    return model, sites_of(model)


@contextlib.contextmanager
def unchanged(model, sites):
    """Want a model, its sites and what is installed to be as they were."""

    def pictures():
        return attributes(model), standing(sites), dict(patching._installed)

    before = pictures()
    yield
    assert all(map(same, pictures(), before))
    assert not autopack.is_enabled(model)


def with_another_name(function, name):
    """A function of the same code's place whose parameter goes by another name, as upstream would
    write it."""
    parameters = [
        parameter.replace(name=f"{name}_2") if parameter.name == name else parameter
        for parameter in inspect.signature(function).parameters.values()
    ]

    def changed(*args, **kwargs):
        kwargs = {name if key == f"{name}_2" else key: value for key, value in kwargs.items()}
        return function(*args, **kwargs)

    changed.__module__ = function.__module__
    changed.__signature__ = inspect.Signature(parameters)
    return changed


def without(function, name):
    """A function of the same code's place without one of its parameters."""
    changed = with_another_name(function, name)
    kept = [p for p in changed.__signature__.parameters.values() if p.name != f"{name}_2"]
    changed.__signature__ = inspect.Signature(kept)
    return changed


def _hides_signature(function):
    def hiding(*args, **kwargs):
        return function(*args, **kwargs)

    return hiding


def _of_upstream(changed, function):
    changed.__module__ = function.__module__
    return changed


FUNCTIONS = {
    "transformers.masking_utils:_preprocess_mask_arguments": ("llama", "position_ids"),
    "transformers.loss.loss_utils:fixed_cross_entropy": ("gpt2", "target"),
    f"{MASK}[sdpa]": ("qwen3_next", "kv_length"),
    f"{ATTENTION}[sdpa]": ("bert", "attention_mask"),
    f"{MODELS}.llama.modeling_llama:eager_attention_forward": ("llama", "query"),
    f"{MODELS}.t5.modeling_t5:eager_attention_forward": ("t5", "attention_mask"),
}
"""Functions that autopack stands at, a type that needs each, and a parameter on which autopack
relies."""
FORWARDS = {
    f"{MODELS}.llama.modeling_llama:LlamaForCausalLM.forward": "llama",
    f"{MODELS}.llama.modeling_llama:LlamaModel.forward": "llama",
    f"{MODELS}.llama.modeling_llama:LlamaAttention.forward": "llama",
    f"{MODELS}.gpt2.modeling_gpt2:GPT2Model.forward": "gpt2",
    f"{MODELS}.mamba2.modeling_mamba2:Mamba2Mixer.forward": "mamba2",
    f"{MODELS}.qwen3_next.modeling_qwen3_next:Qwen3NextGatedDeltaNet.forward": "qwen3_next",
    f"{MODELS}.qwen3_next.modeling_qwen3_next:Qwen3NextAttention.forward": "qwen3_next",
    f"{MODELS}.t5.modeling_t5:T5Stack.forward": "t5",
    f"{MODELS}.bert.modeling_bert:BertModel.forward": "bert",
}
"""Forwards that autopack reads or stands at, and a type of each."""
GONE = {
    "transformers.masking_utils:_preprocess_mask_arguments": "llama qwen3_next t5 bert",
    "transformers.loss.loss_utils:fixed_cross_entropy": "llama gpt2 mamba2",
}
MODULES = {
    "module of torch": lambda function, name: nn.Identity(),
    "module of Python": lambda function, name: types.ModuleType(function.__name__),
}
OTHER_SHAPES = {
    "parameter renamed": with_another_name,
    "parameter dropped": without,
    "signature hidden": lambda function, name: _of_upstream(_hides_signature(function), function),
}
CHANGES = {**OTHER_SHAPES, **MODULES, "nothing": lambda function, name: None}
# Somebody may register any callable, and is not asked what it takes; what holds no function is not
# registered.
REGISTERED = {**OTHER_SHAPES, "module of Python": MODULES["module of Python"]}
DRIFTS = [
    *(
        (address, of, parameter, change)
        for address, (of, parameter) in FUNCTIONS.items()
        for change in (REGISTERED if address.endswith("]") else CHANGES)
    ),
    *((address, of, "", change) for address, of in FORWARDS.items() for change in MODULES),
    *(
        (address, of, "", "gone")
        for address, types_of_it in GONE.items()
        for of in types_of_it.split()
    ),
]


@pytest.mark.parametrize(
    ("address", "model_type", "parameter", "change"),
    DRIFTS,
    ids=[f"{a.split(':')[1]}-{t}-{c}" for a, t, _, c in DRIFTS],
)
def test_what_is_of_another_shape_or_gone_is_named(
    monkeypatch, address, model_type, parameter, change
):
    model, sites = control(model_type)
    place = Place(address)
    if change == "gone":
        place.take_away(monkeypatch)
    else:
        place.put(monkeypatch, CHANGES[change](place.value, parameter))
    said = "the installed transformers has none" if change == "gone" else None
    with unchanged(model, sites), refused("site-drift", match=said) as raised:
        autopack.enable(model)
    assert str(place.site) in str(raised.value)


def test_an_implementation_that_is_not_registered_any_more_is_refused(monkeypatch):
    model, sites = control("llama")
    Place(f"{ATTENTION}[sdpa]").take_away(monkeypatch)
    said = "'sdpa' is not registered with transformers' AttentionInterface"
    with unchanged(model, sites), refused("backend-unavailable", match=said):
        autopack.enable(model)
