"""How long things live: rounds of enable and disable, models that are dropped, forks, threads."""

import contextlib
import gc
import os
import threading
import weakref

import pytest
import torch

import autopack
from autopack import tiny
from tests.conftest import FLOAT64, LENGTHS, OTHER_LENGTHS, alone, error, llama, positions
from tests.support.one_llama import IDS, is_exact, logits
from tests.support.padded import PADDED, batch, mask_of
from tests.support.prefixes import group, padded

ROUNDS = 60


def objects():
    gc.collect()
    return len(gc.get_objects())


def test_rounds_of_enable_and_disable_leave_nothing():
    model = llama(num_hidden_layers=1)

    def rounds():
        for _ in range(ROUNDS):
            with autopack.enable(model):
                pass

    rounds()  # caches fill
    before = objects()
    rounds()
    assert objects() - before < ROUNDS / 4


def test_calls_of_ever_other_layouts_leave_nothing():
    model, columns = llama(num_hidden_layers=1).train(), IDS.shape[1]

    def rounds(first):
        for number in range(ROUNDS):
            rows = columns // (2 + first + number % 3), columns // 7 + number % 5
            logits(model, (*rows, columns - sum(rows))).sum().backward()

    with autopack.enable(model):
        rounds(0)  # caches fill
        before = objects()
        rounds(1)
        assert objects() - before < ROUNDS / 4


def test_an_enabled_model_is_collected_and_lives_as_long_as_its_handle():
    model = llama(num_hidden_layers=1)
    gone, handle = weakref.ref(model), autopack.enable(model)
    logits(model)
    del model
    gc.collect()
    assert gone() is handle.model
    del handle
    gc.collect()
    assert gone() is None


PACKED = {"input_ids": IDS, "labels": IDS}
PADDED_IDS = batch("causal LM", mask_of(PADDED))
SEGMENTS = torch.tensor(
    [[1, 1, 1, 0, 0, 2, 2, 2, 2, 3, 3, 0], [1, 1, 1, 1, 1, 1, 2, 2, 3, 0, 0, 0]]
)
IN_ROWS = {"input_ids": IDS[0, :24].view(2, 12), "labels": IDS[0, :24].view(2, 12)}
CALLS = {
    "packed": ("llama", {}, PACKED | {"position_ids": positions(LENGTHS)}),
    "checked": ("llama", {"check_every": 1}, PACKED | {"position_ids": positions(LENGTHS)}),
    "documents alone": ("reformer", {}, PACKED | {"position_ids": positions(LENGTHS)}),
    "padding in rows": ("llama", {}, IN_ROWS | {"attention_mask": SEGMENTS}),
    "padded": ("llama", {}, PADDED_IDS),
    "padded, with states": ("gpt2", {}, PADDED_IDS | {"output_hidden_states": True}),
    "padded, checked": ("mamba2", {"check_every": 1}, PADDED_IDS),
    "padded, two sides": ("t5", {}, PADDED_IDS),
    "rows that begin alike": ("llama", {"share": True}, padded(group(), labels=True)),
}
"""Calls with a loss, each with a type of model and the options of `enable`."""


@contextlib.contextmanager
def tensors_for_the_collector():
    """Yield a list that gets the shapes of tensors that wait for the garbage collector."""
    found = []
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield found
        gc.collect()
        found += [tuple(each.shape) for each in gc.garbage if isinstance(each, torch.Tensor)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@pytest.mark.parametrize("name", CALLS)
def test_what_a_step_made_is_gone_with_its_output(name):
    """A result in a cycle of references stays until the collector runs, which may be many steps."""
    model_type, options, call = CALLS[name]
    model = tiny.build(model_type, task="seq2seq" if model_type == "t5" else "causal-lm").train()
    with autopack.enable(model, verify=False, **options):
        model(**call).loss.backward()  # caches fill
        with tensors_for_the_collector() as found:
            model(**call).loss.backward()
    assert found == []


def in_child(work):
    """The exit status of a forked process: 0 where what it has to do is true."""
    process = os.fork()
    if process == 0:
        try:
            os._exit(0 if work() else 1)
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
class TestForks:
    def test_a_child_calls_disables_and_enables_and_the_parent_stays_as_it_is(self):
        model = llama(num_hidden_layers=1)
        stock = llama(num_hidden_layers=1)

        def work():
            exact = is_exact(model, stock)
            autopack.disable(model)
            autopack.enable(model)
            return exact and is_exact(model, stock)

        with torch.no_grad(), autopack.enable(model):
            assert in_child(work) == 0
            assert is_exact(model, stock)


def test_models_come_and_go_in_one_thread_while_another_calls_two():
    """One of them enabled, the other one not: what is put at the sites and taken away concerns
    neither."""
    enabled, plain, ended = (
        llama(num_hidden_layers=1),
        llama(num_hidden_layers=1),
        threading.Event(),
    )
    with torch.no_grad():
        expected = alone(plain, IDS, OTHER_LENGTHS), logits(plain)
    wrong = []

    def come_and_go():
        try:
            for implementation in ("eager", "sdpa") * 8:
                with autopack.enable(llama(implementation, num_hidden_layers=1)):
                    pass
        finally:
            ended.set()

    with torch.no_grad(), autopack.enable(enabled):
        thread = threading.Thread(target=come_and_go)
        thread.start()
        while not ended.is_set():
            packed, stock = logits(enabled, OTHER_LENGTHS), logits(plain)
            wrong += [packed] * (error(packed, expected[0]) > FLOAT64) + [stock] * (
                not torch.equal(stock, expected[1])
            )
        thread.join(timeout=600)
    assert wrong == []
