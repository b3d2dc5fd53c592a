"""Sites: found, checked, replaced by a plain function, counted, and put back by identity."""

import sys
import types

import pytest
import torch

import autopack
from autopack import patching, tiny
from autopack.patching import Site, abandon, check_intact, install, uninstall
from tests.conftest import FLOAT32, LENGTHS, alone, error, llama, positions, token_ids
from tests.support.refusals import refused


class _Owner:
    def method(self, value):
        return value

    table = {}  # noqa: RUF012


@pytest.fixture
def module():
    """A module like one of transformers: a function, a class, and a mapping of functions."""
    module = types.ModuleType("a_module_to_patch")
    module.function = _function
    module.Heir = type("Heir", (_Owner,), {})
    module.mapping = {"sdpa": _function}
    sys.modules[module.__name__] = module
    before = set(patching._installed)
    yield module
    assert set(patching._installed) == before
    del sys.modules[module.__name__]


def _function(query, key, value=None):
    return "original", query


def _double(original, site):
    def replacement(query, key, value=None):
        return "replaced", original(query, key, value)

    return replacement


def _site(path="function", **options):
    return Site("a_module_to_patch", path, options.pop("adapter", _double), **options)


def test_functions_are_replaced_by_plain_functions_and_put_back(module):
    mapping = module.mapping
    sites = install([_site(parameters=("query", "key")), _site("mapping", key="sdpa")])
    assert module.mapping is mapping
    for function in (module.function, mapping["sdpa"]):
        assert function(1, 2) == ("replaced", ("original", 1))
        # torch.compile traces through wrapt's FunctionWrapper as if it were not there.
        assert type(function) is types.FunctionType
    uninstall(sites)
    assert module.function is _function
    assert mapping == {"sdpa": _function}


@pytest.mark.parametrize(
    ("site", "message"),
    [
        (
            _site("missing"),
            r"a function at a_module_to_patch\.missing; the installed transformers has none",
        ),
        (_site("mapping", key="flash"), r"a_module_to_patch\.mapping\['flash'\]"),
        (Site("no_such_module", "f", _double), r"no_such_module\.f"),
        (_site("mapping"), r"expects a function at a_module_to_patch\.mapping; found dict"),
        (
            _site(parameters=("query", "sinks", "mask")),
            r"lacks sinks, mask: \(query, key, value=None\)",
        ),
    ],
    ids=["attribute", "key", "module", "kind", "parameters"],
)
def test_a_place_that_has_drifted_raises_and_earlier_sites_go_back(module, site, message):
    with refused("site-drift", match=message):
        install([_site("mapping", key="sdpa"), site])
    assert module.mapping["sdpa"] is _function
    assert module.function is _function


class TestNewcomers:
    """Somebody replaces a function after autopack did: autopack says so and does not overwrite the
    newcomer."""

    def test_leaving_keeps_the_newcomer_and_restores_the_rest(self, module):
        sites = install([_site(), _site("mapping", key="sdpa")])
        module.function = newcomer = lambda *a: None
        with refused(
            "site-replaced",
            match=r"somebody replaced a_module_to_patch\.function after autopack did",
        ):
            uninstall(sites)
        assert module.function is newcomer
        assert module.mapping["sdpa"] is _function

    def test_a_second_install_and_a_check_raise(self, module):
        sites = install([_site()])
        ours = module.function
        check_intact(sites)
        module.function = lambda *a: None
        with refused("site-replaced"):
            check_intact(sites)
        with refused("site-replaced"):
            install([_site()])
        module.function = ours
        uninstall(sites)
        assert module.function is _function


def test_packed_calls_of_an_enabled_model_notice_a_newcomer(nothing_left_behind):
    from transformers import AttentionInterface

    model, registered = llama(), AttentionInterface._global_mapping
    with autopack.enable(model):
        ours = registered["sdpa"]
        AttentionInterface.register("sdpa", ours.autopack_original)
        with refused(
            "site-replaced",
            match=r"somebody replaced .*AttentionInterface._global_mapping\['sdpa'\]",
        ):
            model(input_ids=token_ids(), position_ids=positions(LENGTHS))
        model(input_ids=token_ids())  # an unpacked call does not need autopack's function
        registered["sdpa"] = ours


def test_abandoning_restores_at_once_or_when_the_running_call_ends(module):
    sites = install([_site()])
    abandon(sites)
    assert module.function is _function
    sites = install([_site()])

    def collected_in_the_middle(original, site):
        # The collector may run anywhere, here while `install` holds its lock.
        abandon(sites)
        assert module.function is not _function
        return original

    held = install([_site("mapping", key="sdpa", adapter=collected_in_the_middle)])
    assert module.function is _function
    uninstall(held)


def test_an_inherited_method_is_deleted_again_and_not_copied_down(module):
    sites = install(
        [
            _site(
                "Heir.method",
                adapter=lambda original, site: lambda self, value: ("replaced", value),
            )
        ]
    )
    assert module.Heir().method(1) == ("replaced", 1)
    assert _Owner().method(1) == 1
    uninstall(sites)
    assert "method" not in vars(module.Heir)
    assert module.Heir().method(1) == 1


def test_nothing_is_put_back_in_the_middle_of_a_compilation(module):
    held = install([_site("function")])
    replacement = module.function
    with torch._guards.tracing(torch._guards.TracingContext(None)):
        abandon(held)
        assert module.function is replacement
    uninstall(install([_site("mapping", key="sdpa")]))
    assert module.function is _function


@pytest.mark.parametrize("path", ["function", "Heir.method"])
def test_what_others_put_back_after_all_models_left_is_taken_away(module, path):
    """Somebody wraps what autopack put there, and takes the wrapper back when no model is enabled
    any more."""
    site = _site(path, parameters=()) if path == "function" else _site(path, adapter=_thrice)
    original = site.present()
    sites = install([site])
    ours = site.present()
    site._set(lambda *args: ours(*args))
    abandon(sites)
    site._set(ours)
    assert site.present() is ours, "control: nobody holds it, and it stands"
    sites = install([site])
    assert site.present().autopack_original is original
    uninstall(sites)
    assert site.present() is original
    assert "method" not in vars(module.Heir)


def _thrice(original, site):
    def replacement(self, value):
        return 3 * original(self, value)

    return replacement


def test_models_of_two_types_meet_a_function_that_was_set_for_all(monkeypatch):
    """`ALL_ATTENTION_FUNCTIONS[...] = ...` is one place, under whatever module's name a model finds
    it."""
    interface = pytest.importorskip("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS
    if not hasattr(interface, "_local_mapping"):
        pytest.skip("these releases register functions in a plain dict")
    stock = interface["sdpa"]

    def own(*args, **kwargs):
        return stock(*args, **kwargs)

    monkeypatch.setitem(interface._local_mapping, "sdpa", own)
    models = [tiny.build(kind, attn_implementation="sdpa") for kind in ("llama", "qwen3")]
    for model in models:
        autopack.enable(model)
    for model in models:
        logits = model(input_ids=token_ids(), position_ids=positions(LENGTHS)).logits
        assert error(logits, alone(model, token_ids(), LENGTHS)) < FLOAT32
    for model in models:
        autopack.disable(model)
    assert interface["sdpa"] is own
