"""Which models the recorded runs speak of: published configurations, and nothing that was not measured."""

from __future__ import annotations

import functools

import pytest
import torch
import transformers
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

from autopack import tiny
from autopack.inspection.provenance import Provenance
from autopack.trust import configuration, recorded
from autopack.trust.data import load, nearest, survey_of, surveyed
from tests.trust.published import PUBLISHED

RELEASE = transformers.__version__

pytestmark = pytest.mark.skipif(RELEASE not in surveyed(), reason="another release was recorded")


def published(name: str, **changes):
    cls, fields = PUBLISHED[name]
    config = AutoConfig.for_model(fields["model_type"]).from_dict({**fields, **changes})
    with torch.device("meta"):
        return getattr(transformers, cls)(config)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_are_covered(name):
    assert recorded.why_not_recorded(published(name)) is None


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "flex_attention"])
def test_implementations_that_were_measured(implementation):
    model = tiny.build("llama", attn_implementation=implementation)
    assert recorded.why_not_recorded(model) is None


def test_an_implementation_that_was_not_measured():
    model = tiny.build("llama")
    model.config._attn_implementation = "paged|sdpa"
    assert "attn_implementation='paged|sdpa' has not been measured" in recorded.why_not_recorded(model)
    bloom = tiny.build("bloom")
    bloom.config._attn_implementation = "sdpa"
    assert recorded.why_not_recorded(bloom) is not None


def test_the_number_of_a_release_does_not_matter(monkeypatch):
    model = tiny.build("llama")
    monkeypatch.setattr(recorded.transformers, "__version__", "5.99.1")
    assert recorded.why_not_recorded(model) is None


def test_a_class_that_adds_nothing_is_what_it_derives_from():
    class Chat(LlamaForCausalLM):
        """A name of one's own."""

        remark = "nobody reads this"
        _no_split_modules: list[str] = []  # noqa: RUF012

    model = tiny.build("llama")
    assert recorded.why_not_recorded(Chat(model.config)) is None
    model.__class__ = Chat
    assert recorded.why_not_recorded(model) is None
    model.__class__ = type("LlamaForCausalLM", (LlamaForCausalLM,), {"__module__": "elsewhere.modeling_llama"})
    assert recorded.why_not_recorded(model) is None
    model.config.__class__ = type("Own", (LlamaConfig,), {})
    assert recorded.why_not_recorded(model) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("forward", LlamaForCausalLM.forward),
        ("helper", lambda self: None),
        ("extra", property(lambda self: 1)),
        ("is_causal", False),
        ("loss_type", "ForTokenClassification"),
    ],
)
def test_a_class_that_adds_something_is_not(name, value):
    model = tiny.build("llama")
    model.__class__ = type("Chat", (LlamaForCausalLM,), {name: value, "__module__": __name__})
    assert f"Chat.{name} has not been measured" in recorded.why_not_recorded(model)


def test_a_layer_that_adds_something_is_not_covered_either():
    model = tiny.build("llama")
    kind = type(model.model.layers[0].self_attn)
    model.model.layers[0].self_attn.__class__ = type("Plain", (kind,), {"__module__": __name__})
    assert recorded.why_not_recorded(model) is None
    model.model.layers[0].self_attn.__class__ = type("Own", (kind,), {"__module__": __name__, "forward": kind.forward})
    assert "Own.forward has not been measured" in recorded.why_not_recorded(model)


def test_a_layer_of_another_type_is_not_covered():
    model, other = tiny.build("llama"), tiny.build("qwen2_moe")
    model.model.layers[0].mlp = other.model.layers[0].mlp
    reason = recorded.why_not_recorded(model)
    assert "modeling_qwen2_moe.Qwen2Moe" in reason
    assert "has not been measured in such a model" in reason


def test_a_derived_class_whose_name_chooses_another_loss_is_not_covered():
    model = tiny.build("llama", task="sequence-classification")
    named = type("MyForSequenceClassification", (type(model),), {"__module__": __name__})
    assert recorded.why_not_recorded(named(model.config)) is None
    unnamed = type("Judge", (type(model),), {"__module__": __name__})
    reason = recorded.why_not_recorded(unnamed(model.config))
    assert reason == "the loss of Judge is of the kind 'ForCausalLM', and 'ForSequenceClassification' has been measured"


def test_a_type_and_a_class_that_do_not_belong_together():
    model = tiny.build("llama")
    model.config.model_type = "mistral"
    assert "LlamaForCausalLM has not been measured as a 'mistral' model" in recorded.why_not_recorded(model)
    model.config.model_type = "a type of ones own"
    assert "model type 'a type of ones own' has not been measured" in recorded.why_not_recorded(model)


@pytest.mark.parametrize("name", ["Llama 3.1 8B", "Qwen2.5 7B", "Mistral 7B v0.1", "Gemma 2 9B", "GPT-2", "T5 base"])
def test_every_field_of_behaviour_counts(name):
    """A value that no variant had, in one field after the other."""
    model = published(name)
    known = load(survey_of(RELEASE))["types"][model.config.model_type]["fields"]
    tried = 0
    usual = {field for field in vars(model.config) if configuration.usual(field) and not configuration.is_size(field)}
    # Of padding tokens, any will do.
    for field in sorted((known.keys() | usual) & vars(model.config).keys() - {"pad_token_id"}):
        before = getattr(model.config, field)
        vars(model.config)[field] = "a value that nobody has measured"
        reason = recorded.why_not_recorded(model)
        vars(model.config)[field] = before
        if reason is None:
            # Then the model cannot read it: the record has it because every configuration of the type does.
            assert not recorded.Code(model).can_read(field), field
        else:
            assert reason.startswith(f"{field} of "), reason
            tried += 1
    assert tried >= 3
    assert recorded.why_not_recorded(model) is None


@pytest.mark.parametrize(
    ("name", "changes", "field"),
    [
        ("Llama 3.1 8B", {"rope_parameters": {"rope_type": "own", "rope_theta": 1e4}}, "rope_parameters.rope_type"),
        ("Gemma 2 9B", {"layer_types": ["full_attention", "chunked_attention"] * 2}, "layer_types"),
        ("Gemma 2 9B", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("Mistral 7B v0.1", {"sliding_window": -1}, "sliding_window"),
        ("BERT base", {"chunk_size_feed_forward": -1}, "chunk_size_feed_forward"),
    ],
)  # fmt: skip
def test_values_that_were_not_measured(name, changes, field):
    model = published(name)
    vars(model.config).update(changes)
    assert recorded.why_not_recorded(model).startswith(f"{field} of {model.config.model_type!r} is ")


def test_what_no_code_reads_does_not_count_and_what_some_code_reads_does():
    model = published("Llama 3.1 8B", team_remark="second try", tracking={"project": "mine", "tags": ["a", "b"]})
    assert recorded.why_not_recorded(model) is None
    model.config.sliding_window = 4096  # masks of any model may read it
    assert recorded.why_not_recorded(model).startswith("sliding_window of 'llama' is 2+")


def test_properties_of_a_configuration_read_its_fields():
    class Own(LlamaConfig):
        @property
        def attention_bias(self):
            return bool(self.secret_switch)

    model = tiny.build("llama")
    model.config.secret_switch = True
    assert not recorded.Code(model).can_read("secret_switch")
    for module in model.modules():
        if hasattr(module, "config"):
            module.config.__class__ = Own
    assert recorded.Code(model).can_read("secret_switch")


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("sliding_window", None, {"none"}),
        ("sliding_window", 4096, {"2+"}),
        ("softcap", 30.0, {"+"}),
        ("flag", True, {"true"}),
        ("layer_types", ["a", "b", "b"], {"^a", "a|b", "a>b", "b>b"}),
        ("no_rope_layers", [1, 0], {"^1", "0|1", "1>0"}),
        ("attn_layer_indices", [9, 18], {"[...]"}),
        ("hidden_size", 4096, {"set"}),
        ("first_k_dense_replace", 0, {"0"}),
    ],
)
def test_words(field, value, words):
    config = LlamaConfig()
    setattr(config, field, value)
    assert configuration.describe(config)["llama"][field] == words


def test_neutral_fields_have_no_words():
    config = LlamaConfig(
        attention_dropout=0.5, eos_token_id=[7, 8], rms_norm_eps=0.1, hidden_act="relu", use_cache=False
    )
    assert configuration.describe(config) == configuration.describe(LlamaConfig())


def test_parts_stand_under_their_own_type():
    words = configuration.describe(tiny.config("llava", task="image-text-to-text"))
    assert words["llava"]["text_config"] == {"llama"}
    assert "rope_parameters.rope_type" in words["llama"]


@pytest.mark.parametrize(
    ("release", "first"),
    [
        ("6.0.0", "5.24.0"),
        ("5.23.1", "5.23.0"),
        ("5.22.2", "5.23.0"),
        ("5.1.0", "5.0.0"),
        ("4.57.3", "4.57.6"),
        ("4.44.2", "4.57.6"),
    ],
)
def test_the_nearest_record_is_asked_first(release, first):
    assert nearest(release)[0] == first
    assert sorted(nearest(release)) == sorted(surveyed())


@pytest.mark.exhaustive
@pytest.mark.parametrize("task", [task for task in tiny.TASKS if task != "multimodal-lm"])
def test_no_type_of_transformers_runs_code_of_somebody_elses(task):
    """What a constructor puts on a module is its own, by whatever way it gets there."""
    found = {}
    for model_type in tiny.types_for(task):
        try:
            model = tiny.build(model_type, task=task)
        except (tiny.CannotBuild, ImportError):
            continue
        found[model_type] = Provenance(model).foreign
    assert found
    assert {name: foreign for name, foreign in found.items() if foreign} == {}


def test_a_function_that_a_method_of_the_constructor_puts_there_is_its_own():
    """FNet's transform is put on its modules by a method, and torch gives it a longer name."""
    model = tiny.build("fnet", task="masked-lm")
    assert Provenance(model).foreign == []
    model.fnet.encoder.layer[0].fourier.self.fourier_transform = functools.partial(torch.fft.rfft, dim=1)
    assert "fourier_transform" in Provenance(model).foreign[0]
