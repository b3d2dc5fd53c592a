"""How results are recorded, and the tables that are made of the records."""

from compat import scenarios, study, tables
from tests.support.matrix import ABOUT, MATRIX, NEW, OLD, cell, result_of


def write_table():
    study.settle({tables.table_path(): tables.markdown(MATRIX, tables.load_results(MATRIX))})


# From cells to what is recorded and shown.


def test_a_result_has_a_line_per_type_and_reasons_once(recorded):
    refusals = [cell(name, "sdpa", "refused", reason="for a reason") for name in ("gpt2", "bert")]
    left = cell("gpt2", "eager", padded="stock reads padding", worst=3e-6)
    result = result_of(NEW, left, *refusals, cell("bert", "eager", "absent", reason="not declared"))
    (number_of_refusal,) = {n for n, said in result["reasons"].items() if said == "for a reason"}
    assert result["cells"]["causal-lm"]["bert"] == ["-", f"refused {number_of_refusal}"]
    assert tables.counts(result) == {"exact": 1, "refused": 2, "absent": 1}
    assert result["worst error"] == 3e-6
    tables.record(NEW, result)
    text = tables.path_of(NEW).read_text()
    assert f'"bert": ["-", "refused {number_of_refusal}"]' in text
    assert tables.load_results(MATRIX) == {"5.0.0": result}


def test_some_cells_are_merged(recorded):
    """Types that were measured replace theirs; reasons that nobody names any more go; scenarios
    stay."""
    first = result_of(NEW, cell("gpt2", "eager", "LEAK", reason="off by 2"), cell("llama", "eager"))
    tables.record(NEW, {**first, "scenarios": {"passed": 3, "skipped": {}, "failed": {}}})
    found = tables.merged(NEW, result_of(NEW, cell("gpt2", "eager")))
    assert found["cells"]["causal-lm"] == {"gpt2": ["exact"], "llama": ["exact"]}
    assert found["reasons"] == {}
    found = tables.merged(NEW, result_of(NEW, cell("llama", "sdpa", "refused", reason="why")))
    assert [words[0] for words in found["cells"]["causal-lm"].values()][1] == "exact"
    assert [tables.status_of(word) for word in found["cells"]["causal-lm"]["llama"]] == [
        "exact",
        "refused",
    ]
    tables.record(NEW, result_of(NEW))
    assert tables.load_results(MATRIX)["5.0.0"]["scenarios"]["passed"] == 3


def test_merged_cells_keep_what_is_left_out(recorded):
    first = [cell("llama", "eager"), cell("t5", "eager", labels="no")]
    tables.record(NEW, tables.compact(NEW, ABOUT, first))
    more = [cell(name, "sdpa") for name in ("llama", "t5")]
    found = tables.merged(NEW, tables.compact(NEW, ABOUT, more))
    said = {(c["type"], c["mode"]): c.get("labels") for c in tables.cells_of(found)}
    assert [name for name, labels in said.items() if labels] == [("t5", "eager")]
    assert said["t5", "eager"] == "no"


def test_what_is_wrong_is_named():
    leaks = [cell(name, "eager", "LEAK", reason="off by 2") for name in ("gpt2", "t5")]
    result = result_of(NEW, *leaks, cell("t5", "sdpa", "crash", reason="KeyError: 1"))
    result["scenarios"] = {"passed": 0, "skipped": {}, "failed": {"demo": "AssertionError"}}
    assert tables.bad(result) == [
        "LEAK: gpt2/causal-lm/eager, t5/causal-lm/eager: off by 2",
        "crash: t5/causal-lm/sdpa: KeyError: 1",
        "scenario demo: AssertionError",
    ]


def test_markdown():
    text = tables.markdown(MATRIX, {"5.0.0": result_of(NEW)})
    assert "| 4.9.0 | not run yet | not run yet |  |  |" in text
    assert "| 5.0.0 | 2 / 0 / 0 / 0 | 2 / 0 / 0 / 0 | 100 % | 0 | 0 | 0 |  |" in text
    refused = {"5.0.0": tables.compact(NEW, {"refused": "too old"}, [])}
    assert "| 5.0.0 | refused | refused |  |" in tables.markdown(MATRIX, refused)


def test_stale_is_what_contradicts(recorded):
    """What is not recorded yet is said; other pins, wrong cells, foreign files and an old page are
    failures."""
    write_table()
    assert tables.stale(MATRIX) == ([], ["4.9.0", "5.0.0"])
    tables.record(NEW, result_of(NEW))
    assert any("README.md is not what" in line for line in tables.stale(MATRIX)[0])
    write_table()
    assert tables.stale(MATRIX) == ([], ["4.9.0"])
    tables.record(OLD, {**result_of(NEW), "transformers": "4.9.0"})
    (recorded / "releases" / "1.0.0.json").write_text("{}")
    tables.record(
        NEW, result_of(NEW, cell("gpt2", "eager", "LEAK", reason="off by 2"), cell("gpt2", "sdpa"))
    )
    write_table()
    wrong, missing = tables.stale(MATRIX)
    assert missing == []
    assert [
        next(w for w in ("other packages", "LEAK", "no listed") if w in line) for line in wrong
    ] == [
        "other packages",
        "LEAK",
        "no listed",
    ]


def test_scenarios_are_told_by_their_outcomes():
    report = """<testsuites><testsuite>
    <testcase name="test_audit[llama/eager]" />
    <testcase name="test_control"><skipped message="exact upstream" /></testcase>
    <testcase name="test_generate"><failure message="AssertionError: 1&#10;more" /></testcase>
    <testcase name="test_demo"><error message="no fixture" /></testcase>
    </testsuite></testsuites>"""
    assert scenarios.by_outcome(report) == {
        "passed": 1,
        "skipped": {"test_control": "exact upstream"},
        "failed": {"test_generate": "AssertionError: 1", "test_demo": "no fixture"},
    }
