"""`enable` of several models at once: all of them, or none."""

import pytest

import autopack
from autopack import tiny
from tests.conftest import attributes, llama, same
from tests.enabling.test_wrapping import Holder, trainer
from tests.support.refusals import refused

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


@pytest.mark.parametrize("kind", [list, tuple])
def test_one_handle_removes_them_all(kind):
    models = kind([llama(), Holder(inside=tiny.build("gpt2"))])
    handle = autopack.enable(models, unpad=False)
    assert [each.model for each in handle.models.values()] == [
        models[0],
        models[1].layers["inside"],
    ]
    assert not any(each.enabled.options.unpad for each in handle.models.values())
    assert autopack.is_enabled(models)
    said = (
        "autopack: 2 models\n  [0]: enabled, exact, no call yet\n    model:     "
        "LlamaForCausalLM (llama)\n"
    )
    assert repr(handle).startswith(said)
    handle.remove()
    assert not any(map(autopack.is_enabled, models))


def test_a_dict_names_them_by_keys_that_stay_what_they_are():
    models = {1: llama(), "1": llama()}
    with autopack.enable(models) as handle:
        assert {name: each.model for name, each in handle.models.items()} == models
        assert "\n  1: enabled, exact" in repr(handle)
        assert handle._repr_html_().count("LlamaForCausalLM") == 2
        autopack.disable({"any": models["1"]})
        assert [autopack.is_enabled(model) for model in models.values()] == [True, False]
        assert not autopack.is_enabled(models)
    assert not autopack.is_enabled(models[1])


def test_one_model_twice_is_one():
    model = llama()
    with autopack.enable([model, model]) as handle:
        assert len({each.enabled for each in handle.models.values()}) == 1
    assert not autopack.is_enabled(model)


@pytest.mark.parametrize("unfit", [lambda: tiny.build("falcon", alibi=True), object, list])
def test_where_one_cannot_be_enabled_none_is(unfit, tmp_path):
    policy, other = trainer(tmp_path), llama()
    before, callbacks = (
        [attributes(policy.model), attributes(other)],
        list(policy.callback_handler.callbacks),
    )
    with pytest.raises(autopack.UnsupportedModel):
        autopack.enable([policy, other, unfit()])
    assert all(map(same, [attributes(policy.model), attributes(other)], before))
    assert policy.callback_handler.callbacks == callbacks


def test_what_was_enabled_before_stays_so(tmp_path):
    policy, model = trainer(tmp_path), llama()
    with autopack.enable([policy, [model]], check_every=2) as handle:
        assert list(handle.models) == ["[0].model", "[1].[0]"]
        for options in ({"unpad": False}, {"check_every": 3}):
            with pytest.raises(ValueError, match=r"call autopack.disable\(model\)"):
                autopack.enable([llama(), policy, model], **options)
        with refused("which-model"):
            autopack.enable([policy, model, object()])
        assert autopack.is_enabled([policy, model])
        assert type(policy.callback_handler.callbacks[0]).__name__ == "PackingLogs"
        assert autopack.enable([model]).enabled is handle.models["[1].[0]"].enabled


@pytest.mark.parametrize(
    ("models", "said"),
    [
        ([], "found an empty list"),
        ({}, "found an empty dict"),
        (
            (model for model in ()),
            "found a generator, which does not keep them in an order. Pass list",
        ),
        ({llama}, "found a set"),
        ({"one": llama}.values(), "found a dict_values"),
        (["org/model"], "'org/model', which is to be loaded first"),
        (type(llama()), "LlamaForCausalLM'>, which is to be loaded first"),
    ],
)
def test_what_is_no_collection_of_models_is_refused_and_says_why(models, said):
    for call in (autopack.enable, autopack.is_enabled, autopack.disable):
        with refused("which-model", match=said):
            call(models)
