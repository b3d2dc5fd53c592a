"""The survey of configurations: what it tries, how it tells leaks from refusals, and that what it recorded is whole."""

from __future__ import annotations

import dataclasses
import re
from itertools import pairwise

import pytest
import transformers

from autopack import registry, tiny
from autopack.architectures import recurrent
from autopack.trust import configuration
from autopack.trust.data import content_of, load, survey_of, surveyed
from compat import survey, survey_results
from compat.exactness import json_by_lines
from compat.variants import variants, walk

SAMPLE = ["llama", "gemma2", "inkling_text", "gpt2", "bert", "modernbert", "mamba2", "reformer", "llama4_text", "qwen3"]


def all_variants(model_type: str):
    task = "causal-lm" if model_type in tiny.types_for("causal-lm") else "masked-lm"
    whole = tiny.config(model_type, task=task)
    return task, list(variants(tiny.build(model_type, task=task), whole))


def audited(model_type: str, implementation: str = "eager", **overrides) -> dict:
    return survey._audited(model_type, "causal-lm", implementation, overrides, {})


@pytest.mark.parametrize("model_type", SAMPLE)
def test_a_variant_changes_the_field_that_it_names(model_type):
    task, found = all_variants(model_type)
    present = tiny.config(model_type, task=task)
    built = 0
    for variant in found:
        try:
            changed = tiny.config(model_type, task=task, **variant.overrides())
        except tiny.CannotBuild:
            continue  # as the survey counts it: the class refuses the value
        built += 1
        if variant.field not in ("num_labels", "head_dim"):
            assert str(changed) != str(present), variant.name
    assert built >= 6
    assert len({variant.name for variant in found}) == len(found)


@pytest.mark.parametrize(
    ("model_type", "names"),
    [
        ("llama", ["attention_bias=True", "rope_parameters=yarn", "rope_parameters=dynamic, max_position_embeddings=8",
                   "max_position_embeddings=16", "pad_token_id=None"]),
        ("gemma2", ["attn_logit_softcapping=None", "layer_types=['full_attention', 'full_attention']",
                    "sliding_window=1", "query_pre_attn_scalar=None"]),
        ("inkling_text", ["log_scaling_n_floor=None", "shared_expert_sink=False"]),
        ("gpt2", ["reorder_and_upcast_attn=True"]),
        ("reformer", ["lsh_attn_chunk_length=3", "hash_seed=None", "attn_layers=['lsh', 'lsh'], num_hidden_layers=2"]),
    ],
)  # fmt: skip
def test_what_is_tried(model_type, names):
    found = {variant.name for variant in all_variants(model_type)[1]}
    missing = {f"{model_type}.{name}" for name in names} - found
    assert not missing - {"gemma2.query_pre_attn_scalar=None"}


@pytest.mark.parametrize("count", [2, 3, 4])
def test_a_walk_goes_from_every_kind_to_every_kind(count):
    kinds = list("abcd"[:count])
    found = walk(kinds)
    assert {(a, b) for a in kinds for b in kinds} == set(pairwise(found))
    assert found[0] == "a"
    assert len(found) <= count**2 + count


def test_statuses():
    assert audited("llama", attention_bias=True) == {"status": "exact"}
    found = audited("big_bird", attention_type="block_sparse")
    assert found["status"] == "refused"
    assert found["reason"].startswith("what its block-sparse attention gives a document depends on the calls before")
    found = audited("bert", chunk_size_feed_forward=4)
    assert found["status"] == "upstream error"
    assert "multiple of the chunk size" in found["reason"]
    assert audited("llama", hidden_size=63)["status"] == "not built"


def test_a_leak_and_a_crash_are_found(monkeypatch):
    """Without what keeps them exact, in the very variants that have shown them."""
    careless = dataclasses.replace(recurrent.SHORT_CONVOLUTION, adjustments={})
    monkeypatch.setattr(registry, "_registered", [careless])
    assert audited("inkling_text", log_scaling_n_floor=4)["status"] == "LEAK"
    assert audited("inkling_text", log_scaling_n_floor=None)["status"] == "exact"
    known = registry.look_up(tiny.build("gpt2"))[0]
    monkeypatch.setattr(registry, "_registered", [dataclasses.replace(known, sites=())])
    assert audited("gpt2", reorder_and_upcast_attn=True)["status"] == "crash"


def test_only_exact_variants_are_recorded():
    words: configuration.Words = {}
    survey._audited("bert", "masked-lm", "eager", {"chunk_size_feed_forward": 4}, words)
    assert words == {}
    survey._audited("bert", "masked-lm", "eager", {"chunk_size_feed_forward": 1}, words)
    assert words["bert"]["chunk_size_feed_forward"] == {"1"}


def test_a_run_goes_on_where_it_was_stopped(tmp_path, monkeypatch):
    log = tmp_path / "log.jsonl"
    few = [variant for variant in all_variants("gpt2")[1] if variant.field == "scale_attn_weights"]
    monkeypatch.setattr(survey, "variants", lambda model, whole: iter(few))
    first = survey.run(["causal-lm"], ["gpt2"], log)
    assert {variant["name"]: variant["status"] for variant in first[0]["variants"]} == {
        "gpt2.published=GPT-2": "exact",
        "gpt2.published=GPT-2 XL": "exact",
        "gpt2.scale_attn_weights=False": "exact",
    }
    monkeypatch.setattr(survey, "survey", lambda *args: pytest.fail("it was run again"))
    assert survey.run(["causal-lm"], ["gpt2"], log) == first == survey.entries(log)
    found = survey_results.recorded(first)["types"]["gpt2"]
    assert found["classes"] == ["gpt2.modeling_gpt2.GPT2LMHeadModel"]
    assert found["implementations"] == ["eager", "sdpa"]
    assert found["fields"]["scale_attn_weights"] == ["false", "true"]
    assert "| gpt2 | 4 | 0 | 0 | 0 |  |" in survey_results.page(survey_results.rows(first))


def test_a_field_is_changed_again_where_another_class_reads_it():
    flipped = {"bert.is_decoder": {"BertLayer"}}
    model = tiny.build("bert", task="masked-lm")
    whole = tiny.config("bert", task="masked-lm")
    again = {v.field for v in survey._left(variants(model, whole), model, flipped, {})}
    assert "is_decoder" in again
    now: dict[str, list[str]] = {}
    assert list(survey._left(variants(model, whole), model, {}, now))
    seen = {name: set(readers) for name, readers in now.items()}
    assert not list(survey._left(variants(model, whole), model, seen, {}))


@pytest.mark.parametrize("release", surveyed())
def test_what_is_shipped_is_whole(release):
    data = load(survey_of(release))
    assert data["with"]["transformers"] == release == load(content_of(release))["with"]["transformers"]
    assert survey_of(release).read_text() == json_by_lines(data, depth=4) + "\n"
    for name, entry in data["types"].items():
        assert set(entry) == {"classes", "implementations", "fields"}, name
        assert not any(configuration.is_neutral(field, True) for field in entry["fields"]), name
    page = survey_results.table_of(release).read_text()
    lines = survey_results.rows_of_page(page)
    if release == transformers.__version__:
        assert survey_results.page(lines) == page
        assert [name for name, row in lines.items() if row.failing] == []
    for name, row in lines.items():  # what leaks where it is trusted is not covered
        classes = {cls.rpartition(".")[2] for cls in data["types"].get(name, {"classes": []})["classes"]}
        assert not classes & set(re.findall(r"\w+", re.sub(r"\(.*?\)", "", row.said))), name
    assert {name for name, entry in data["types"].items() if entry["classes"]} <= lines.keys()


def test_types_are_merged_into_what_is_recorded():
    def entry(model_type: str, cls: str, words: dict, surveyed: str = "") -> dict:
        found = {
            "type": surveyed or model_type,
            "config": model_type,
            "task": "causal-lm",
            "class": cls,
            "status": "exact",
        }
        return {**found, "implementations": ["eager"], "variants": [], "flipped": {}, "words": words}

    first = [entry("a", "A", {"a": {"flag": ["true"]}, "part": {"flag": ["true"]}}), entry("b", "B", {})]
    first.append(entry("text of a", "WithHead", {}))
    second = [entry("a", "C", {"a": {"flag": ["false"]}, "part": {"flag": ["false"]}})]
    second.append(entry("text of a", "Body", {}, surveyed="a"))
    found = survey_results.merged(survey_results.recorded(first), survey_results.recorded(second), {"a"})["types"]
    assert found["a"] == {"classes": ["C"], "implementations": ["eager"], "fields": {"flag": ["false"]}}
    assert found["part"]["fields"] == {"flag": ["false", "true"]}
    assert found["b"]["classes"] == ["B"]
    assert found["text of a"]["classes"] == ["Body", "WithHead"], "a part, and not what its own survey has found"


def test_what_is_not_exact_has_a_line():
    variants = [{"name": "a.x=1", "status": "LEAK", "reason": "off by 2 | 3"}, {"name": "a.y=1", "status": "refused"}]
    variants[1]["reason"] = "for a reason"
    done = [{"type": "a", "status": "exact", "class": "A", "config": "a", "variants": variants}]
    lines = survey_results.rows(done)
    assert lines["a"] == (1, 1, 0, 1, "x=1 (LEAK: off by 2 / 3); y=1 (for a reason)")
    assert survey_results.rows_of_page(survey_results.page(lines)) == lines
    assert "1 classes and variants exact, 1 refused, 0 no stock, 1 leaking or crashing." in survey_results.page(lines)


def test_types_are_recorded_whole(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["survey", "--types", "llama", "--task", "causal-lm", "--record"])
    with pytest.raises(SystemExit):
        survey.main()
    assert "run all of their tasks" in capsys.readouterr().err
