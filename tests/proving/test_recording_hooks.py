"""What hooks record of a call is what stock lets them record: proofs and checks leave nothing in
it."""

from collections import Counter, deque
from functools import partial

import pytest
import torch

import autopack
from autopack import tiny
from tests.engine import WHEN, counted
from tests.subjects import alternating, crossed
from tests.support.padded import build
from tests.support.prefixes import padded, tree

pytestmark = pytest.mark.usefixtures("nothing_left_behind")
COUNT = 0
SHAPES = []


def appending(seen):
    return (lambda module, args, output: seen.append(1)), lambda: len(seen)


def in_a_deque():
    return appending(deque(maxlen=100))


def in_a_new_entry():
    seen = Counter()

    def hook(module, args, output):
        seen[type(module).__name__] += 1

    return hook, seen.total


def in_a_variable():
    count = 0

    def hook(module, args, output):
        nonlocal count
        count += 1

    return hook, lambda: count


def in_a_global():
    before = COUNT

    def hook(module, args, output):
        global COUNT
        COUNT += 1

    return hook, lambda: COUNT - before


def _record(value):
    SHAPES.append(value)


def by_a_helper():
    SHAPES.clear()
    return (lambda module, args, output: _record(1)), lambda: len(SHAPES)


class Recorder:
    def __init__(self):
        self.calls, self.rows = 0, [0]

    def __call__(self, module, args, output):
        self.calls += 1
        self.rows[0] += 1

    def record(self, *given):
        self(*given)

    def count(self):
        return max(self.calls, self.rows[0])


def by_a_method():
    recorder = Recorder()
    return recorder.record, recorder.count


def by_a_partial():
    seen = []
    return partial(lambda seen, module, args, output: seen.append(1), seen), lambda: len(seen)


def as_the_last_output():
    """An output of transformers is a dict that refuses to be changed."""
    count, last = 0, None

    def hook(module, args, output):
        nonlocal count, last
        count, last = count + 1, output

    return hook, lambda: count


RECORDERS = (
    in_a_deque, as_the_last_output, in_a_new_entry, in_a_variable, in_a_global,
    by_a_helper, by_a_method, by_a_partial,
)  # fmt: skip
PLACES = {
    "the model": lambda model: model,
    "the backbone": lambda model: model.model,
    "a layer": lambda model: model.model.layers[0],
    "a linear layer": lambda model: model.model.layers[0].mlp.up_proj,
}


def packed(seed=0):
    ids = tiny.tokens(tiny.config("llama"), 1, 14, seed=seed)
    return {"input_ids": ids, "position_ids": counted((5, 9))}


CASES = alternating(crossed(RECORDERS, [*PLACES]), WHEN)


@pytest.mark.parametrize(
    ("recorder", "place", "when"), CASES, ids=lambda value: getattr(value, "__name__", value)
)
def test_a_hook_records_each_call_once(recorder, place, when):
    model = build("llama")
    hook, count = recorder()
    if when == "before":
        PLACES[place](model).register_forward_hook(hook)
    with autopack.enable(model):
        if when == "after":
            PLACES[place](model).register_forward_hook(hook)
        for number, batch in enumerate((padded(tree()), packed(), packed(1)), 1):
            with torch.no_grad():
                model(**batch)
            assert count() == number


def test_an_audit_leaves_what_hooks_have_recorded():
    model = build("llama")
    hook, count = in_a_variable()
    model.model.layers[0].register_forward_hook(hook)
    autopack.enable(model)
    assert autopack.audit(model).exact
    assert count() == 0
    autopack.disable(model)
