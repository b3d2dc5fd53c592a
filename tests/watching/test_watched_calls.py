"""`check_every`: which calls are counted and checked, beside copies, autocast, compilation,
trainers and threads."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations

import pytest
import torch
import torch._dynamo.testing
from transformers import LlamaForCausalLM

import autopack
from autopack import tiny
from autopack.watching.influence import halves_of
from tests.conftest import token_ids
from tests.support.mixing import shift_boundaries
from tests.support.padded import build
from tests.support.refusals import refused
from tests.support.training_calls import FLOAT32, noisy, padded, row, trained


def test_calls_that_pack_or_unpad_count():
    model = build("llama")
    with autopack.enable(model, check_every=1) as handle:
        model(input_ids=token_ids(), labels=token_ids())
        assert handle.checked.calls == 0
        with torch.no_grad():
            model(**row(0))
        assert handle.checked.trained == 0
        trained(model, row(0), padded(1))
        assert handle.checked.trained == 2
        model.model(**{name: value for name, value in row(2).items() if name != "labels"})
        assert handle.checked.trained == handle.checked.checks - 1 == 3


def test_any_two_documents_have_been_on_different_sides():
    for count in (2, 3, 5, 8, 9):
        turns = 2 * max(1, (count - 1).bit_length())
        for one, other in combinations(range(count), 2):
            assert any(halves_of(count, turn)[0][[one, other]].sum() == 1 for turn in range(turns))


def test_it_says_what_it_did_and_ends_with_the_handle():
    model = build("llama")
    handle = autopack.enable(model, check_every=3)
    trained(model, *(row(step) for step in range(7)))
    # Calls 1, 2, 4, and 3 and 6 of every third; call 5 or 7 may be longer than those before.
    assert (
        f"every 3 training calls; {handle.checked.checks} checks in 7 calls, worst relative error"
        in repr(handle)
    )
    assert 5 <= handle.checked.checks <= 7
    assert f"{handle.checked.checks} checks" in handle._repr_html_()
    autopack.disable(model)
    before = handle.checked.checks
    trained(model, *(padded(step) for step in range(7)))
    assert handle.checked.checks == before
    again = autopack.enable(model, check_every=0)
    assert again.checked is None
    assert "checked:   no call (check_every=0)" in repr(again)
    again.remove()


def test_values(monkeypatch):
    model = build("llama")
    monkeypatch.setenv("AUTOPACK_CHECK_EVERY", "2")  # which `autopack run` alone reads
    with autopack.enable(model) as handle:
        assert handle.checked.every == 0
    for wrong in (-1, True, 1.5, "500"):
        with pytest.raises(
            ValueError, match="check_every must be None or a number of training calls"
        ):
            autopack.enable(model, check_every=wrong)


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))]
)
def test_a_copy_is_watched_by_itself(duplicate):
    model = build("llama")
    handle = autopack.enable(model, check_every=1)
    trained(model, row(0))
    twin = duplicate(model)
    found = twin.__dict__["_autopack_enabled"]
    trained(twin, row(1), row(2))
    assert (handle.checked.checks, found.live.checked.checks) == (1, 3)
    handle.remove()
    autopack.disable(twin)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_under_autocast_rounding_is_that_of_autocast(dtype, monkeypatch):
    model = noisy(build("llama"))
    with autopack.enable(model, check_every=1) as handle:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            trained(model, *(row(step) for step in range(8)))
        assert handle.checked.checks == 8
        assert handle.checked.worst < (0.1 if dtype == torch.bfloat16 else FLOAT32)
        shift_boundaries(monkeypatch)
        with torch.autocast("cpu", dtype=torch.bfloat16), refused("leak-detected") as raised:
            trained(model, *(row(step) for step in range(8)))
        leak = raised.value.report
        # Four roundings of bfloat16 at the largest logit, which is below 4.
        assert 1e-3 < leak.tolerance < 4 * torch.finfo(torch.bfloat16).eps * 4 < leak.error


def test_a_model_that_is_compiled_as_one_graph_stays_one():
    torch._dynamo.reset()
    model = build("llama")
    handle = autopack.enable(model, check_every=2)
    trained(torch.compile(model, backend="eager", fullgraph=True), *[row(0)] * 4)
    assert handle.checked.checks == 3  # calls 1, 2 and 4
    handle.remove()
    torch._dynamo.reset()


def test_what_cannot_be_compared_is_skipped_and_said(monkeypatch):
    model = build("llama")
    monkeypatch.setattr(
        type(model), "forward", lambda self, **_: {"total": self.lm_head.weight.sum()}
    )
    with autopack.enable(model, check_every=1, verify=False) as handle:
        trained_alone = {name: value for name, value in row(0).items() if name != "labels"}
        model(**trained_alone)
        assert handle.checked.checks == 0
        assert "1 skipped: no part of its output can be divided among its documents" in repr(handle)


class Adds(LlamaForCausalLM):
    """Adds a field to its output; a constructor of its own leaves it without a twin."""

    def __init__(self, config, field):
        super().__init__(config)
        self.field = field

    def forward(self, input_ids, **kwargs):
        output = super().forward(input_ids, **kwargs)
        output["added"] = self.field(input_ids)
        return output


DRAWN = torch.Generator()
ADDED = {
    "whole numbers of tokens": (
        lambda ids: torch.randint(1000, ids.shape, generator=DRAWN),
        lambda ids: ids.sum().expand_as(ids),
    ),
    "numbers of nobody": (
        lambda ids: torch.rand(3, generator=DRAWN),
        lambda ids: ids.sum().float().expand(3),
    ),
}
"""Fields that differ from run to run, and fields of this form that mix documents."""


@pytest.mark.parametrize("name", ADDED)
def test_a_field_that_differs_from_run_to_run_is_no_leak(name):
    """Its draws come from a generator that nobody can put back. The others are compared still."""
    drawn, mixed = ADDED[name]
    model = Adds(tiny.config("llama"), drawn)
    with autopack.enable(model) as handle:
        trained(model, *[row(0)] * 4)
        assert handle.checked.checks == 3
        assert not handle.checked.skipped
    model = Adds(tiny.config("llama"), mixed)
    with autopack.enable(model), refused("leak-detected", match="got other added"):
        trained(model, row(0))


def test_threads_that_train_one_model_leave_its_dropout_on():
    """A check switches dropout off; another one that began meanwhile would take that for the
    model's own rate."""
    model = noisy(build("llama"))
    rates = [
        module.attention_dropout
        for module in model.modules()
        if hasattr(module, "attention_dropout")
    ]
    assert any(rates)
    model.train()

    def train(_):
        for step in range(8):
            model(**row(step)).loss.backward()

    with autopack.enable(model, check_every=1) as handle:
        with ThreadPoolExecutor(3) as threads:
            list(threads.map(train, range(3)))
        assert handle.checked.checks == 24
    assert [
        m.attention_dropout for m in model.modules() if hasattr(m, "attention_dropout")
    ] == rates


class WrongInRows(LlamaForCausalLM):
    """Has another loss where positions begin anew, and no twin: its constructor takes more than a
    configuration."""

    def __init__(self, config, wanted):
        super().__init__(config)

    def forward(self, input_ids, position_ids=None, labels=None, **kwargs):
        output = super().forward(input_ids, position_ids=position_ids, labels=labels, **kwargs)
        if labels is not None and position_ids is not None and int((position_ids == 0).sum()) > 1:
            output.loss = output.loss * 1.2
        return output


def test_labels_of_padded_batches_say_nothing_of_those_of_packed_rows():
    """The third call is checked for no other reason."""
    model = WrongInRows(tiny.config("llama"), None).train()
    ids = tiny.tokens(model.config, 1, 12)
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[1, 4:] = 0
    packed = {"input_ids": ids, "position_ids": torch.tensor([[*range(5), *range(7)]])}
    with autopack.enable(model):
        batch = ids.reshape(2, 6)
        for _ in range(3):  # the first two run as they came
            model(input_ids=batch, attention_mask=mask, labels=batch.masked_fill(mask == 0, -100))
        model(**packed)
        with refused("leak-detected"):
            model(**packed, labels=ids)
