"""How long things live: rounds of enable and disable, models that are dropped, forks, threads."""

import gc
import os
import threading
import weakref

import pytest
import torch

import autopack
from tests.conftest import FLOAT64, OTHER_LENGTHS, alone, error, llama
from tests.support.one_llama import IDS, is_exact, logits

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
