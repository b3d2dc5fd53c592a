"""What hooks record of a call is what stock lets them record: proofs and checks leave nothing in it."""

from __future__ import annotations

from collections import Counter, deque
from functools import partial
from typing import Any

import pytest
import torch

import autopack
from autopack import tiny
from tests.support.padded import build
from tests.support.prefixes import padded, tree
from tests.support.refusals import refused

pytestmark = pytest.mark.usefixtures("nothing_left_behind")
COUNT = 0
SHAPES: list[Any] = []


def in_a_list() -> tuple[Any, Any]:
    seen: list[Any] = []
    return (lambda module, args, output: seen.append(1)), lambda: len(seen)


def in_a_dict_of_lists() -> tuple[Any, Any]:
    seen: dict[str, list[Any]] = {"states": []}
    return (lambda module, args, output: seen["states"].append(args)), lambda: len(seen["states"])


def in_a_new_entry() -> tuple[Any, Any]:
    seen: Counter[str] = Counter()

    def hook(module: Any, args: Any, output: Any) -> None:
        seen[type(module).__name__] += 1

    return hook, seen.total


def in_a_variable() -> tuple[Any, Any]:
    count = 0

    def hook(module: Any, args: Any, output: Any) -> None:
        nonlocal count
        count += 1

    return hook, lambda: count


def in_a_global() -> tuple[Any, Any]:
    before = COUNT

    def hook(module: Any, args: Any, output: Any) -> None:
        global COUNT
        COUNT += 1

    return hook, lambda: COUNT - before


def _record(value: Any) -> None:
    SHAPES.append(value)


def by_a_helper() -> tuple[Any, Any]:
    SHAPES.clear()
    return (lambda module, args, output: _record(1)), lambda: len(SHAPES)


class Recorder:
    def __init__(self) -> None:
        self.calls, self.rows = 0, [0]

    def __call__(self, module: Any, args: Any, output: Any) -> None:
        self.calls += 1
        self.rows[0] += 1

    def record(self, module: Any, args: Any, output: Any) -> None:
        self(module, args, output)


def by_an_object() -> tuple[Any, Any]:
    recorder = Recorder()
    return recorder, lambda: max(recorder.calls, recorder.rows[0])


def by_a_method() -> tuple[Any, Any]:
    recorder = Recorder()
    return recorder.record, lambda: max(recorder.calls, recorder.rows[0])


def by_a_partial() -> tuple[Any, Any]:
    seen: list[Any] = []
    return partial(lambda seen, module, args, output: seen.append(1), seen), lambda: len(seen)


def in_a_deque() -> tuple[Any, Any]:
    seen: deque[Any] = deque(maxlen=100)
    return (lambda module, args, output: seen.append(1)), lambda: len(seen)


def as_the_last_output() -> tuple[Any, Any]:
    """An output of transformers is a dict that refuses to be changed."""
    count, last = 0, None

    def hook(module: Any, args: Any, output: Any) -> None:
        nonlocal count, last
        count, last = count + 1, output

    return hook, lambda: count


RECORDERS = (
    in_a_list, in_a_deque, as_the_last_output, in_a_dict_of_lists, in_a_new_entry, in_a_variable, in_a_global,
    by_a_helper, by_an_object, by_a_method, by_a_partial,
)  # fmt: skip
PLACES = {
    "the model": lambda model: model,
    "the backbone": lambda model: model.model,
    "a layer": lambda model: model.model.layers[0],
    "a linear layer": lambda model: model.model.layers[0].mlp.up_proj,
}


def packed(seed: int = 0) -> dict[str, torch.Tensor]:
    ids = tiny.tokens(tiny.config("llama"), 1, 14, seed=seed)
    return {"input_ids": ids, "position_ids": torch.tensor([[*range(5), *range(9)]])}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("recorder", RECORDERS, ids=lambda recorder: recorder.__name__)
def test_a_hook_records_each_call_once(recorder, place):
    model = build("llama")
    with autopack.enable(model):
        hook, count = recorder()
        handle = place(model).register_forward_hook(hook)
        for number, batch in enumerate((padded(tree()), packed(), packed(1)), 1):
            with torch.no_grad():
                model(**batch)
            assert count() == number
        handle.remove()


def test_an_audit_leaves_what_hooks_have_recorded():
    model = build("llama")
    hook, count = in_a_list()
    model.model.layers[0].register_forward_hook(hook)
    autopack.enable(model)
    assert autopack.audit(model).exact
    assert count() == 0
    autopack.disable(model)


def test_a_hook_that_changes_what_passes_is_proven():
    """The control: it mixes tokens, and packed rows are refused."""
    model = build("llama")
    with autopack.enable(model):
        model.model.layers[0].register_forward_hook(lambda module, args, output: output + output.mean(1, keepdim=True))
        with refused("not-exact", "leak-detected"):
            model(**packed())
