"""Changes that transformers might make, made here: an error that names the place, and nothing is changed.

What changes is transformers, by assignments that are taken back. Every place is one that an enabled model stands at, or
whose code it reads; without the change `enable` works, which is asked first.
"""

from __future__ import annotations

import functools
import gc
import inspect
import types
from importlib import import_module

import pytest
import wrapt
from torch import nn

import autopack
from autopack import UnsupportedModel, patching, tiny
from autopack.enabling.attach import examine
from autopack.enabling.prove import renew
from autopack.enabling.sites import needed_sites
from autopack.errors import SiteDrift
from autopack.patching import Site, install, uninstall
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

    def __init__(self, address: str):
        module, _, path = address.partition(":")
        path, _, key = path.removesuffix("]").partition("[")
        self.site = Site(module, path, lambda original, site: original, key or None)
        self.parent, self.attribute, held = wrapt.resolve_path(import_module(module), path)
        self.mapping = held if key else None
        self.value = self.site.present()

    def put(self, monkeypatch: pytest.MonkeyPatch, value: object) -> None:
        if self.mapping is not None:
            monkeypatch.setitem(self.mapping, self.site.key, value)
        else:
            monkeypatch.setattr(self.parent, self.attribute, value)

    def take_away(self, monkeypatch: pytest.MonkeyPatch) -> None:
        if self.mapping is not None:
            monkeypatch.delitem(self.mapping, self.site.key)
        else:
            monkeypatch.delattr(self.parent, self.attribute)


def build(model_type):
    attn_implementation = "eager" if model_type == "mamba2" else "sdpa"
    return tiny.build(model_type, task=TASKS.get(model_type, "causal-lm"), attn_implementation=attn_implementation)


def sites_of(model):
    """The sites that `enable` would install for a model."""
    family = family_for(model)
    enabled = examine(model, family, Options(verify=False), renew)
    return needed_sites(enabled.anatomy, family.sites, enabled.implementations())


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


class Unchanged:
    """The pictures of a model and of its sites, before and after."""

    def __init__(self, model, sites):
        self.model, self.sites = model, sites
        self.before = attributes(model), standing(sites), dict(patching._installed)

    def check(self):
        attributes_before, standing_before, installed_before = self.before
        assert same(attributes(self.model), attributes_before)
        assert same(standing(self.sites), standing_before)
        assert dict(patching._installed) == installed_before
        assert not autopack.is_enabled(self.model)


def with_another_name(function, name):
    """A function of the same code's place whose parameter goes by another name, as upstream would write it."""
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
    f"{MODELS}.gpt2.modeling_gpt2:GPT2Attention._upcast_and_reordered_attn": ("gpt2", "value"),
}
"""Functions that autopack stands at, a type that needs each, and a parameter on which autopack relies."""

CHANGES = {
    "parameter renamed": with_another_name,
    "parameter dropped": without,
    "signature hidden": lambda function, name: _of_upstream(_hides_signature(function), function),
    "module of torch": lambda function, name: nn.Identity(),
    "module of Python": lambda function, name: types.ModuleType(function.__name__),
    "nothing": lambda function, name: None,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize(("address", "case"), FUNCTIONS.items(), ids=[a.split(":")[1] for a in FUNCTIONS])
def test_a_function_of_another_shape_is_named(monkeypatch, address, case, change):
    model_type, parameter = case
    model, sites = control(model_type)
    place = Place(address)
    changed = change(place.value, parameter)
    if changed is None and place.mapping is not None:
        pytest.skip("what a mapping holds no function for is not registered")
    if isinstance(changed, nn.Module) and place.mapping is not None:
        pytest.skip("somebody may register any callable, and is not asked what it takes")
    place.put(monkeypatch, changed)
    unchanged = Unchanged(model, sites)
    with refused("site-drift") as raised:
        autopack.enable(model)
    assert str(place.site) in str(raised.value)
    unchanged.check()


GONE = {
    "transformers.masking_utils:_preprocess_mask_arguments": "llama qwen3_next t5 bert",
    "transformers.loss.loss_utils:fixed_cross_entropy": "llama gpt2 mamba2",
}


@pytest.mark.parametrize(
    ("address", "model_type"), [(address, name) for address, names in GONE.items() for name in names.split()]
)
def test_a_function_that_has_gone_is_named(monkeypatch, address, model_type):
    model, sites = control(model_type)
    place = Place(address)
    place.take_away(monkeypatch)
    unchanged = Unchanged(model, sites)
    with refused("site-drift", match="the installed transformers has none") as raised:
        autopack.enable(model)
    assert str(place.site) in str(raised.value)
    unchanged.check()


def test_an_implementation_that_is_not_registered_any_more_is_refused(monkeypatch):
    model, sites = control("llama")
    Place(f"{ATTENTION}[sdpa]").take_away(monkeypatch)
    unchanged = Unchanged(model, sites)
    with refused("backend-unavailable", match="'sdpa' is not registered with transformers' AttentionInterface"):
        autopack.enable(model)
    unchanged.check()


FORWARDS = {
    "llama.modeling_llama:LlamaForCausalLM": "llama",
    "llama.modeling_llama:LlamaModel": "llama",
    "llama.modeling_llama:LlamaAttention": "llama",
    "gpt2.modeling_gpt2:GPT2Model": "gpt2",
    "mamba2.modeling_mamba2:Mamba2Mixer": "mamba2",
    "qwen3_next.modeling_qwen3_next:Qwen3NextGatedDeltaNet": "qwen3_next",
    "qwen3_next.modeling_qwen3_next:Qwen3NextAttention": "qwen3_next",
    "t5.modeling_t5:T5Stack": "t5",
    "bert.modeling_bert:BertModel": "bert",
}
"""Classes whose forward autopack reads or stands at, and a type of each."""

every_forward = pytest.mark.parametrize(
    ("owner", "model_type"), FORWARDS.items(), ids=[name.split(":")[1] for name in FORWARDS]
)


@pytest.mark.parametrize("found", [nn.Identity(), types.ModuleType("forward")], ids=["of torch", "of Python"])
@every_forward
def test_a_forward_that_has_become_a_module_is_named(monkeypatch, owner, model_type, found):
    model, sites = control(model_type)
    place = Place(f"{MODELS}.{owner}.forward")
    place.put(monkeypatch, found)
    unchanged = Unchanged(model, sites)
    with refused("site-drift") as raised:
        autopack.enable(model)
    assert str(place.site) in str(raised.value)
    unchanged.check()


def _keeps_signature(function):
    return functools.wraps(function)(_hides_signature(function))


def _hides_function(function):
    """Nothing says what is called: it is held by an object."""
    held = types.SimpleNamespace(call=function)
    return _hides_signature(lambda *args, **kwargs: held.call(*args, **kwargs))


DECORATORS = {"wraps": _keeps_signature, "signature hidden": _hides_signature, "function hidden": _hides_function}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("decorate", DECORATORS.values(), ids=DECORATORS)
@every_forward
def test_a_decorated_forward_is_exact_or_refused(monkeypatch, owner, model_type, decorate):
    model, sites = control(model_type)
    place = Place(f"{MODELS}.{owner}.forward")
    place.put(monkeypatch, decorate(place.value))
    unchanged = Unchanged(model, sites)
    try:
        handle = autopack.enable(model)
    except (SiteDrift, UnsupportedModel):
        assert decorate is not _keeps_signature, "a decorator that keeps the signature is harmless"
        unchanged.check()
        return
    assert is_exact(model)
    handle.remove()
    unchanged.check()


MIXERS = [owner for owner in FORWARDS if "Mixer" in owner or "DeltaNet" in owner]


@pytest.mark.parametrize("owner", MIXERS)
def test_a_mixer_is_served_where_its_signature_can_be_found_and_named_where_not(monkeypatch, owner):
    model, _ = control(FORWARDS[owner])
    place = Place(f"{MODELS}.{owner}.forward")
    with monkeypatch.context() as changing:
        place.put(changing, _hides_signature(place.value))
        with autopack.enable(model):
            assert is_exact(model)
    place.put(monkeypatch, _hides_function(place.value))
    with refused("other-code") as raised:
        autopack.enable(model)
    assert str(place.site) in str(raised.value)


@pytest.mark.parametrize("model_type", ["llama", "qwen3_next"])
def test_whichever_site_fails_those_before_it_go_back(model_type):
    _, sites = control(model_type)
    gc.collect()
    uninstall(install([]))  # what models of other tests have left behind goes now
    before, installed = standing(sites), dict(patching._installed)
    gone = Site("transformers.masking_utils", "no_such_function", lambda original, site: original)
    for number in range(len(sites) + 1):
        with refused("site-drift", match="no_such_function"):
            install([*sites[:number], gone, *sites[number:]])
        assert same(standing(sites), before)
        assert dict(patching._installed) == installed
    held = install(sites)
    assert not any(standing(sites)[name] is value for name, value in before.items()), "negative control"
    uninstall(held)
    assert same(standing(sites), before)
