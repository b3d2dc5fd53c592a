"""Whatever ends a call, `enable` or `disable` in the middle: what comes after is right, and nothing
stays behind."""

import itertools
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch

import autopack
from autopack import AutopackError, patching, tiny
from autopack.layout.packed import PackedLayout
from autopack.mixers.operations import keeping_documents_apart
from autopack.runtime.scope import Scope, current, in_force
from tests.conftest import (
    FLOAT32,
    LEAK,
    LENGTHS,
    OTHER_LENGTHS,
    alone,
    attributes,
    error,
    installed_functions,
    positions,
    same,
    token_ids,
)
from tests.subjects import WithoutTwin, layers_of
from tests.support.one_llama import IDS, logits

_CODE = str(Path(autopack.__file__).parent) + "/"
_EVENTS = ("call", "c_call", "c_return")
"""Events at which Python looks for signals: a function begins, or one written in C ends."""


class Interrupter:
    """Counter of the events in autopack's code, which raises an interrupt at one of them."""

    def __init__(self, at=None):
        self.at = at
        self.events = 0
        self.place = ""
        """File, line, function and event of the interrupt."""
        self.interrupted = False
        """True if the interrupt ended the function: Python swallows errors while it ends a
        generator."""

    def run(self, function):
        """Run a function up to the interrupt, or to its end if there is none."""
        before = sys.getprofile()
        sys.setprofile(self._count)
        try:
            function()
        except KeyboardInterrupt:
            if not self.place:
                raise
            self.interrupted = True
        finally:
            sys.setprofile(before)

    def _count(self, frame, event, argument):
        """Count an event, and raise `KeyboardInterrupt` if its number is `at`."""
        if event not in _EVENTS or not frame.f_code.co_filename.startswith(_CODE):
            return
        self.events += 1
        if self.events == self.at:
            sys.setprofile(None)
            self.place = (
                f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name} {event}"
            )
            raise KeyboardInterrupt


def events_of(function):
    """Return the number of events at which a function can be interrupted."""
    counter = Interrupter()
    counter.run(function)
    return counter.events


def spread(events, points, offset=0):
    """Return the numbers of `points` events, spread evenly over all of them."""
    return sorted({1 + (offset + index * events // points) % events for index in range(points)})


# Python swallows what is raised while it ends a generator.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
TWO = token_ids(rows=2)
MASK = torch.ones_like(TWO)
MASK[1, 25:] = 0
LABELS = TWO.masked_fill(MASK == 0, -100)


def build(model_type="llama"):
    return tiny.build(model_type).double()


def train(model):
    """Two training steps, packed and padded, without a step of an optimizer."""
    model.train()
    for arguments in (
        {"input_ids": IDS, "position_ids": positions(LENGTHS), "labels": IDS},
        {"input_ids": TWO, "attention_mask": MASK, "labels": LABELS},
    ):
        model(**arguments).loss.backward()
    model.zero_grad(set_to_none=True)
    model.eval()


class Expected:
    """What stock gives, which an enabled model is held to."""

    def __init__(self, model_type="llama"):
        self.stock = build(model_type)
        with torch.no_grad():
            self.packed = alone(self.stock, IDS, OTHER_LENGTHS)
            self.plain = self.stock(input_ids=IDS, use_cache=False).logits
            self.padded = self.stock(input_ids=TWO, attention_mask=MASK, use_cache=False).logits[
                MASK.bool()
            ]

    @torch.no_grad()
    def of(self, model):
        """The largest error of three kinds of calls."""
        model.eval()
        found = model(input_ids=TWO, attention_mask=MASK).logits[MASK.bool()]
        packed = logits(model, OTHER_LENGTHS)
        plain = model(input_ids=IDS, use_cache=False).logits
        return max(error(found, self.padded), error(packed, self.packed), error(plain, self.plain))


def pictures(model):
    model.eval().zero_grad(set_to_none=True)
    return attributes(model), installed_functions(), dict(patching._installed)


def as_before(model, before):
    return (
        all(map(same, pictures(model), before))
        and torch.is_grad_enabled()
        and torch.is_autocast_cache_enabled()
    )


def test_what_an_interrupt_leaves_of_a_mixer_s_call_is_not_of_the_next_one():
    """It may come within the very lines that put things back."""
    expected, model = Expected("mamba"), build("mamba")
    with autopack.enable(model) as handle:
        with in_force(Scope(handle.enabled)):
            interrupted = keeping_documents_apart(PackedLayout.from_lengths([[7, 8]]))
            interrupted.__enter__()
            assert current().mixing is not None
        assert expected.of(model) <= FLOAT32
        train(model)


class TestAtAnyPoint:
    """A KeyboardInterrupt, which passes by every `except Exception`, torch's own among them."""

    @pytest.mark.parametrize(("model_type", "watch"), [("llama", 0), ("llama", 1), ("mamba", 0)])
    def test_of_a_training_step(self, model_type, watch):
        expected, model = Expected(model_type), build(model_type)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        before = pictures(model)
        with autopack.enable(model, check_every=watch):
            train(model)
            for at in spread(events_of(lambda: train(model)), 25):
                Interrupter(at).run(lambda: train(model))
                assert expected.of(model) <= FLOAT32
        assert as_before(model, before)

    @pytest.mark.parametrize(("has_twin", "points"), [(True, 20), (False, 6)])
    def test_of_enabling(self, has_twin, points):
        expected, model = Expected(), build()
        if not has_twin:
            model.__class__ = WithoutTwin
        before = pictures(model)
        events = events_of(lambda: autopack.enable(model))
        autopack.disable(model)
        for at in spread(events, points):
            interrupter = Interrupter(at)
            interrupter.run(lambda: autopack.enable(model))
            assert not interrupter.interrupted or not autopack.is_enabled(model)
            autopack.disable(model)
            assert as_before(model, before), interrupter.place
        with autopack.enable(model):
            assert expected.of(model) <= FLOAT32

    @pytest.mark.parametrize("model_type", ["llama", "mamba"])
    def test_of_disabling(self, model_type):
        """What is half disabled is plain, exact, or refuses; disabling it again ends it, and so
        does enabling it."""
        expected, model = Expected(model_type), build(model_type)
        before = pictures(model)
        autopack.enable(model)
        events = events_of(lambda: autopack.disable(model))
        for at in spread(events, 30):
            for again in (autopack.disable, autopack.enable):
                autopack.enable(model)
                interrupter = Interrupter(at)
                interrupter.run(lambda: autopack.disable(model))
                with suppress(AutopackError):
                    plain = model(input_ids=IDS, use_cache=False).logits
                    assert error(plain, expected.plain) <= FLOAT32, interrupter.place
                again(model)
                if again is autopack.enable:
                    assert autopack.is_enabled(model)
                    assert expected.of(model) <= FLOAT32, interrupter.place
                    autopack.disable(model)
                assert as_before(model, before), interrupter.place

    @pytest.mark.parametrize("model_type", ["llama", "mamba"])
    def test_of_looking_at_a_model_again(self, model_type):
        """A layer was replaced; the call that finds out is interrupted, and a padded batch comes
        next."""
        expected, model = Expected(model_type), build(model_type)
        with autopack.enable(model):
            train(model)
            replace_a_layer(model, model_type)
            for at in spread(events_of(lambda: train(model)), 12):
                replace_a_layer(model, model_type)
                interrupter = Interrupter(at)
                interrupter.run(lambda: train(model))
                assert expected.of(model) <= FLOAT32, interrupter.place

    def test_without_the_handle_a_half_disabled_model_would_leak(self):
        """The control: marks and hooks are gone, and what stands at the sites is inert."""
        expected, model = Expected(), build()
        autopack.enable(model)
        Interrupter(events_of_all_but_the_last(model)).run(lambda: autopack.disable(model))
        found = model(
            input_ids=IDS,
            position_ids=positions(OTHER_LENGTHS),
            attention_mask=torch.ones_like(IDS),
        ).logits
        assert error(found, expected.packed) > LEAK
        assert not autopack.is_enabled(model)
        autopack.disable(model)


def events_of_all_but_the_last(model):
    events = events_of(lambda: autopack.disable(model))
    autopack.enable(model)
    return events - 1


def replace_a_layer(model, model_type):
    layers_of(model)[1] = layers_of(build(model_type))[1].train(model.training)


class Planted(Exception):
    """Somebody's own."""


KINDS = [KeyboardInterrupt, RuntimeError, torch.OutOfMemoryError, MemoryError, Planted]


@contextmanager
def raising(module, kind, where):
    """Somebody's hook that raises: before a module, after it, or in its backward pass."""

    def stop(*_):
        raise kind("planted")

    register = {
        "before": module.register_forward_pre_hook,
        "after": module.register_forward_hook,
        "backward": module.register_full_backward_hook,
    }
    hook = register[where](stop)
    yield
    hook.remove()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
class TestRaisedBySomebody:
    """From inside a layer, a loss, a mask function, an audit, a check of the sentinel."""

    @pytest.mark.parametrize("where", ["before", "after", "backward"])
    @pytest.mark.parametrize("reentrant", [None, False, True])
    def test_a_hook_on_a_layer(self, kind, where, reentrant):
        expected, model = Expected(), build()
        if reentrant is not None:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        with raising(model.model.layers[1].mlp, kind, where):
            pass  # torch keeps a note of hooks that were there
        before = pictures(model)
        with autopack.enable(model, verify=False):
            with raising(model.model.layers[1].mlp, kind, where), pytest.raises(kind):
                train(model)
            assert expected.of(model) <= FLOAT32
            train(model)
        model.eval()
        assert as_before(model, before)

    def test_a_check_of_the_sentinel(self, kind):
        """The second run of the layer in a step is that of the document alone."""
        expected, model, calls = Expected(), build(), itertools.count(1)

        def stop(*_):
            if next(calls) == 2:
                raise kind("planted")

        before = pictures(model)
        with autopack.enable(model, verify=False, check_every=1) as handle:
            hook = model.model.layers[1].mlp.register_forward_pre_hook(stop)
            model.train()
            with suppress(KeyboardInterrupt):
                model(input_ids=IDS, position_ids=positions(LENGTHS))
            hook.remove()
            assert next(calls) > 2
            assert expected.of(model) <= FLOAT32
            train(model)
            assert handle.checked.checks >= 1
            assert handle.checked.leaks == 0
        assert as_before(model, before)
