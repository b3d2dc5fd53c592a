"""The fuzz: a sample of it, that it finds faults that are planted, and that its cases are what they
say."""

import json
import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autopack import tiny
from autopack.attention import choose
from autopack.attention.document_mask import DocumentMask
from autopack.calls import rows as packed
from autopack.errors import UnsupportedModel
from autopack.layout.packed import PackedLayout
from autopack.watching import influence, schedule
from compat.fuzz import __main__ as fuzz
from compat.fuzz import draw, session
from compat.fuzz.case import FORMS, Arranged, Case, Spec, of_json, width
from compat.fuzz.judge import judge
from compat.fuzz.model import Model

GPT2 = Spec("gpt2", lengths=(6, 4, 9, 1))
LLAMA = Spec(
    "llama",
    changes=(("llama.attention_bias=True", {"attention_bias": True}),),
    lengths=(6, 4, 9, 1),
)
ROWS = ((0, -2, 1, 2), (3, 2, 0, -2))
"""Two rows of several documents, with padding in them."""


def test_a_sample(capsys):
    """Some models of a fixed seed, of several types and tasks; `python -m compat.fuzz` draws as
    many as one wants."""
    assert fuzz.main(["--models", "30", "--seed", "20"]) == 0, capsys.readouterr().out
    said = capsys.readouterr().out
    counts = {
        status: int(n)
        for n, status in re.findall(r"(\d+) (exact|refused|no stock|silent|crash)", said)
    }
    assert sum(counts.values()) > 120
    assert counts["exact"] > 0.5 * sum(counts.values())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("labels", [False, True], ids=["results", "loss"])
def test_every_form_of_call_is_exact(form, labels):
    rows = {"mask": ((0, -3), (2,)), "collator": ((0, 1, 2),)}.get(form, ROWS)
    call = Arranged(
        rows, form, labels=labels, gradients=True, training=True, checkpointing="reentrant"
    )
    assert session.run_case(Case(LLAMA, call)).status == "exact"


SPARSE = ("modernbert.sparse_prediction=True", {"sparse_prediction": True})


@pytest.mark.parametrize(
    ("spec", "call"),
    [
        (
            Spec("modernbert", "masked-lm", changes=(SPARSE,), lengths=(1, 2)),
            Arranged(((0, 1, -5),), labels=True),
        ),
        (Spec("doge", implementation="flex", lengths=(2, 1)), Arranged(((0, 1),))),
    ],
    ids=["logits without padding", "rules that index step by step"],
)
def test_results_of_other_forms_are_told_by_document(spec, call):
    """Of models that stock runs, too: both were counted as faults of autopack."""
    assert session.run_case(Case(spec, call)).status == "exact"


def without_mask(monkeypatch):
    monkeypatch.setattr(DocumentMask, "for_document", lambda *of_document: None)


def with_first_labels(monkeypatch):
    monkeypatch.setattr(packed, "without_boundaries", lambda labels, *rest: labels)


def without_restart(monkeypatch):
    def running_on(layout, first_position=0):
        return (
            torch.arange(first_position, first_position + layout.columns)
            .expand(layout.rows, -1)
            .contiguous()
        )

    monkeypatch.setattr(PackedLayout, "position_ids", running_on)


def raising(monkeypatch, error=KeyError, documents=0):
    eager = choose.BACKENDS["eager"]

    def attend(call):
        if len(call.layout.lengths) >= documents:
            raise error("planted")
        return eager.attend(call)

    monkeypatch.setitem(choose.BACKENDS, "eager", replace(eager, attend=attend))


def without_gradients(monkeypatch):
    eager = choose.BACKENDS["eager"]
    attend = lambda call: (eager.attend(call)[0].detach(), None)  # noqa: E731
    monkeypatch.setitem(choose.BACKENDS, "eager", replace(eager, attend=attend))


def with_other_beginnings(monkeypatch):
    eager = choose.BACKENDS["eager"]
    fault = lambda *of_rows: eager.over_prefixes(*of_rows) * 1.01  # noqa: E731
    monkeypatch.setitem(choose.BACKENDS, "eager", replace(eager, over_prefixes=fault))


def with_alarms(monkeypatch):
    how_far = influence.how_far
    monkeypatch.setattr(
        influence, "how_far", lambda name, one, two: how_far(name, one, two + torch.ones_like(two))
    )
    monkeypatch.setattr(schedule.Runs, "widened", lambda self, worst, *_: worst)


ALIKE = Spec("llama", lengths=(41, 39, 40, 37), alike=18)
FAULTS = {
    "alarms": (replace(LLAMA, checked=True), with_alarms, "positions", "crash", "LeakDetected"),
    "beginnings": (ALIKE, with_other_beginnings, "positions", "silent", "logits of document"),
    "gradients alone": (LLAMA, without_gradients, "positions", "silent", "gradients are off"),
    "no mask": (LLAMA, without_mask, "positions", "silent", "logits of document"),
    "labels at boundaries": (LLAMA, with_first_labels, "positions", "silent", "the loss is"),
    "positions that run on": (GPT2, without_restart, "segments", "silent", "logits of document"),
    "another error": (LLAMA, raising, "cu_seqlens", "crash", "KeyError: 'planted'"),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name, monkeypatch):
    spec, plant, form, status, reason = FAULTS[name]
    options = {
        "labels": True,
        "gradients": True,
        "training": True,
        "checkpointing": "non-reentrant",
    }
    call = Arranged(ROWS, form, mask=form == "positions", **options)
    case = Case(spec, call)
    assert session.run_case(case).status == "exact"
    plant(monkeypatch)
    verdict = session.run_case(case, verify=False)
    assert (verdict.status, reason in verdict.reason) == (status, True), verdict
    assert session.run_case(of_json(case.to_json()), verify=False) == verdict


def test_what_autopack_refuses_is_no_failure(monkeypatch):
    raising(monkeypatch, partial(UnsupportedModel, code="not-exact"))
    assert session.run_case(Case(LLAMA, Arranged(ROWS))).status == "refused"


def test_what_stock_cannot_do_is_counted_apart():
    assert (
        session.run_case(
            Case(Spec("llama", changes=(("", {"hidden_size": 63}),)), Arranged())
        ).status
        == "no stock"
    )
    overlong = Spec("gpt2", changes=(("", {"n_positions": 4}),))
    verdict = session.run_case(Case(overlong, Arranged()))
    assert (verdict.status, "IndexError" in verdict.reason) == ("no stock", True)


@pytest.mark.exhaustive
def test_the_command_makes_a_fault_small_so_that_it_can_be_run_again(monkeypatch, capsys, recorded):
    raising(monkeypatch, documents=12)  # of which no twin has so many
    # hundreds of times
    monkeypatch.setattr(session, "run_case", partial(session.run_case, verify=False))
    monkeypatch.setattr(fuzz, "_CALLS", 2)
    rows = st.lists(st.integers(0, 3), min_size=1, max_size=16).map(lambda row: (tuple(row),))
    monkeypatch.setattr(draw, "specs", lambda types: st.just(LLAMA))
    monkeypatch.setattr(draw, "calls", lambda spec: st.builds(Arranged, rows, labels=st.booleans()))
    assert fuzz.main(["--models", "30", "--record"]) == 1
    said = capsys.readouterr().out
    (line,) = [line for line in said.splitlines() if line.startswith("{")]
    (failure,) = json.loads((recorded / "fuzz.json").read_text())["failures"]
    assert failure["case"] == json.loads(line)
    assert "planted" in failure["reason"]
    small = of_json(line)
    assert (small.before, small.call.labels, small.call.picks) == ((), False, [0] * 12)
    assert fuzz.main(["--case", line]) == 1


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_cases_are_what_they_say(data):
    try:
        spec = data.draw(draw.specs(frozenset(("llama", "bert", "t5"))))
    except tiny.CannotBuild:
        return
    case = Case(spec, data.draw(draw.calls(spec)), (Arranged(),))
    assert of_json(case.to_json()) == case
    widths = {width(row, case.spec.lengths) for row in case.call.rows}
    assert len(widths) == 1
    if case.call.form == "mask":
        assert all(sum(number >= 0 for number in row) == 1 for row in case.call.rows)


def test_what_fails_after_other_calls_alone_is_told_with_them(monkeypatch):
    """A call leaves something behind: the next one of the same model has the labels of documents'
    first tokens."""
    calls = []
    original = packed.without_boundaries

    def forgetful(labels, layout, *rest):
        calls.append(layout)
        return original(labels, layout, *rest) if len(calls) % 3 else labels

    monkeypatch.setattr(packed, "without_boundaries", forgetful)
    model, call = Model(LLAMA), Arranged(((0, 1),), labels=True)
    calls.clear()
    assert [judge(model, call).status for _ in range(3)] == ["exact", "exact", "silent"]
    calls.clear()
    assert session.run_case(Case(LLAMA, call, before=(call, call)), verify=False).status == "silent"


@pytest.mark.parametrize("text", ["{}", "nonsense", '{"spec": {"model": "llama"}, "call": {}}'])
def test_what_is_no_case_is_refused(text, capsys):
    with pytest.raises(SystemExit):
        fuzz.main(["--case", text])
    assert "wanted the JSON of a case" in capsys.readouterr().err
