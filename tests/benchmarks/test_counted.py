"""`python -m benchmarks.counted`: what has to hold of an enabled model holds, and what does not is
found."""

import copy
import json
from importlib.metadata import version

import pytest
import torch

import autopack
from autopack.bench import predicted
from autopack.bench.race import Batch
from autopack.calls import rows
from autopack.inspection import torches
from autopack.packing import HostBatch
from benchmarks import counted
from benchmarks.counted import ARMS, ENABLED, HAND, LENGTHS, RECORD, UNPADDED
from benchmarks.counting import Counting, as_on_cuda, count
from compat.torch_flash import aten_on_cpu

pytestmark = pytest.mark.skipif(torches.varlen_attn is None, reason="this torch has no varlen_attn")
NAME = "llama 1B"


@pytest.fixture(scope="module")
def counts():
    return {NAME: counted.counts_of("llama", "1B")}


def test_an_enabled_llama_starts_and_keeps_what_one_by_hand_does_and_waits_for_nothing(counts):
    assert counted.failures(counts) == []
    of_arms = counts[NAME]
    assert of_arms["padded"]["flops"] > 3 * of_arms[ENABLED]["flops"]
    assert of_arms["padded"]["waits"], "stock looks at its masks"


@pytest.mark.parametrize(
    ("arm", "what", "factor", "said"),
    [
        (ENABLED, "flops", 1.02, "1.020 x the flops by hand"),
        (ENABLED, "operations", 1.2, "x the operations by hand"),
        (ENABLED, "saved", 1.1, "x the saved by hand"),
        ("formula", None, 1.02, "by formula"),
    ],
)
def test_what_does_not_hold_is_found(counts, arm, what, factor, said):
    worse = copy.deepcopy(counts)
    of = worse[NAME]
    of.update(
        {arm: of[arm] * factor} if what is None else {arm: of[arm] | {what: of[arm][what] * factor}}
    )
    assert [said in each for each in counted.failures(worse)].count(True) == 1


def test_no_count_has_risen_above_the_record(counts):
    record = json.loads(RECORD.read_text())
    assert counted.failures(record["counts"]) == []
    if all(record["origin"][name] == version(name) for name in ("torch", "transformers")):
        assert counted.failures(counts, record["counts"]) == []
    fewer = copy.deepcopy(counts)
    fewer[NAME][UNPADDED]["operations"] -= 1
    (risen,) = counted.failures(counts, fewer)
    assert risen.startswith(f"{NAME}, {UNPADDED}: operations ")


def test_the_roofline_has_the_layer_that_was_counted(counts):
    layer = counts[NAME]["layer"]
    assert layer["operations"] == pytest.approx(predicted.LAYER_OPERATIONS, rel=0.1)
    hidden = counted.SIZES["1B"]["hidden_size"]
    assert layer["moved"] / (2 * sum(LENGTHS) * hidden) == pytest.approx(
        predicted.LAYER_VALUES, rel=0.05
    )


def _padded(moved):
    """Count a padded batch on an enabled model, moved to the device by a function."""
    model, batch = counted.build("llama", "1B", 1), Batch.of(LENGTHS, torch.arange(1, 9), 0, "cpu")
    with aten_on_cpu(), as_on_cuda(False), autopack.enable(model, verify=False):
        with Counting(LENGTHS):
            call = dict(moved(batch.padded()))
        return count(model, call, LENGTHS)


def test_a_copy_that_waits_is_counted_and_its_place_named(monkeypatch):
    assert _padded(lambda batch: HostBatch(batch).to("cuda"))[0].waits == 0
    monkeypatch.setattr(rows, "upload", lambda array, device: torch.from_numpy(array).to(device))
    found, counting = _padded(lambda batch: HostBatch(batch).to("cuda"))
    assert found.waits == 2
    assert all(
        each.startswith("copy from memory that is not pinned, autopack/calls/rows.py:")
        for each in counting.waits
    )


def test_a_batch_that_nobody_remembers_would_be_read_from_the_device():
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        _padded(lambda batch: {name: value.to("cuda") for name, value in batch.items()})


def test_operations_and_bytes_are_those_of_a_layer_counted_by_hand():
    layer = torch.nn.Linear(8, 4, bias=False, device="meta", dtype=torch.bfloat16)
    layer.forward = lambda states: type(
        "Output", (), {"loss": (states @ layer.weight.T).relu().sum()}
    )
    with as_on_cuda(False):
        states = torch.zeros(3, 8, dtype=torch.bfloat16, device="cuda")
        assert (states.device.type, states.is_cuda, states.is_meta) == ("cuda", True, False)
        assert not torch.zeros(1).is_cuda
        found, counting = count(layer, {"states": states}, LENGTHS)
    assert found.flops == 2 * (2 * 3 * 8 * 4), "forward, and the gradient of the weight"
    assert counting.operations == {
        "mm": 2,
        "relu": 1,
        "sum": 1,
        "ones_like": 1,
        "threshold_backward": 1,
    }
    assert found.saved == 2 * (3 * 8 + 3 * 4), "the states and what relu gives, and no parameter"
    with Counting(LENGTHS) as sent, as_on_cuda(False):
        torch.arange(5).to("cuda")
        torch.zeros(5).pin_memory().to("cuda", non_blocking=True)
    assert sent.uploaded == 5 * 8
    assert sent.waits.total() == 1


@pytest.mark.parametrize("arm", [arm for arm in ARMS if arm != HAND])
def test_types_of_which_nothing_is_written_by_hand_are_counted_too(arm, counts):
    model = counted.build("modernbert", "1B", 3)
    found, _ = counted.measure(model, arm)
    assert found.operations > 0
    assert bool(found.waits) == (arm == "padded")
