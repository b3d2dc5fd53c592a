"""The report of an audit, as numbers, text, HTML and picture."""

import math

import numpy as np
import pytest

from autopack.auditing.report import LeakReport, ModeResult

NOTHING = np.array([[np.nan, 0.0], [0.0, np.nan]])
LEAKING = np.array([[np.nan, 0.0], [0.7, np.nan]])
EXACT = ModeResult("default", False, error=2e-6, influence=NOTHING, gradient=3e-6, loss=1e-7)
UNMEASURED = ModeResult("two rows", True, error=1e-6, influence=NOTHING)
LEAK = ModeResult("all-ones mask", True, error=0.9, influence=LEAKING, gradient=0.5, loss=0.01)
RAISED = ModeResult("segment ids", False, failure="ValueError: <no> segments")


def _report(*results, enabled=True):
    return LeakReport(
        "TinyModel (tiny)", "sdpa", enabled, "float32", (7, 12), 1e-4, 1e-3, 1e-3, list(results)
    )


@pytest.mark.parametrize(
    "bad",
    [
        LEAK,
        RAISED,
        ModeResult("default", False, error=2e-4, influence=NOTHING),
        ModeResult("default", False, error=1e-6, influence=LEAKING),
        ModeResult("default", False, error=1e-6, influence=NOTHING, gradient=2e-3),
        ModeResult("default", False, error=1e-6, influence=NOTHING, loss=2e-3),
        ModeResult("default", False, error=1e-6, influence=NOTHING, gradient=math.nan),
        ModeResult("default", False, error=1e-6, influence=NOTHING, loss=math.nan),
        ModeResult("default", False, error=1e-6, influence=np.array([[np.nan, np.inf], [np.inf, np.nan]])),
    ],
)  # fmt: skip
def test_one_bad_mode_is_enough(bad):
    report = _report(EXACT, bad, UNMEASURED)
    assert not report.exact
    assert report.worst_result is bad
    assert report.worst_case


def test_an_audit_of_nothing_is_not_exact():
    assert not _report().exact


def test_the_worst_case_is_said_in_words():
    assert _report(EXACT, LEAK).worst_case == (
        "in mode 'all-ones mask, train' logits are off by 9.0e-01 of their standard deviation, and "
        "one document changes another by 7.0e-01"
    )
    assert _report(EXACT, RAISED).worst_case == (
        "in mode 'segment ids, eval' the call raised ValueError: <no> segments"
    )
    only_gradients = ModeResult("default", False, error=1e-6, influence=NOTHING, gradient=0.5)
    assert "gradients are off by 5.0e-01" in _report(only_gradients).worst_case


def test_influence_is_that_of_the_worst_mode_that_ran():
    assert _report(EXACT, LEAK, RAISED).influence is LEAKING
    assert np.isnan(_report(RAISED).influence).all()


def test_text_has_a_line_per_mode_and_its_verdict():
    text = str(_report(EXACT, UNMEASURED, LEAK, RAISED, enabled=False))
    assert text.splitlines()[0] == "TinyModel (tiny), stock, not enabled, sdpa, float32: NOT EXACT"
    lines = {line.split("  ")[0]: line for line in text.splitlines()}
    assert lines["default"].endswith("exact")
    assert lines["two rows"].endswith("exact")
    assert lines["all-ones mask"].endswith("LEAK")
    assert lines["segment ids"].endswith("raised")
    assert "raised: ValueError: <no> segments" in text
    assert str(_report(LEAK)).splitlines()[0].endswith("LEAKS")


def test_plot_draws_one_cell_per_pair_of_documents():
    pytest.importorskip("matplotlib")
    report = _report(LEAK, RAISED)
    figure = report.plot()
    ax = type(figure)().subplots()
    assert report.plot(ax) is ax.figure
    for axes in (ax, figure.axes[0]):
        assert axes.collections[0].get_array().shape == report.influence.shape
