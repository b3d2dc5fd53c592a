"""What an enabled forward reads on the host: nothing where the collator's values are remembered, or
else one copy.

Tensors on the meta device have no values, so a model there that reads any raises; nothing is faked.
"""

import copy

import numpy as np
import pytest
import torch
from accelerate.utils import send_to_device
from torch.utils.data import DataLoader

import autopack
from autopack import tiny
from autopack.layout import host
from autopack.layout.host import note_padding, noted_padding, recall, remember
from autopack.packing import HostBatch
from tests.conftest import token_ids
from tests.support.padded import batch, mask_of
from tests.support.refusals import refused

LENGTHS = (7, 3, 9)


def examples():
    return [
        {"input_ids": row.tolist(), "labels": row.tolist()}
        for row in token_ids(1, sum(LENGTHS))[0].split(LENGTHS)
    ]


def padded():
    return HostBatch(batch("causal LM", mask_of(LENGTHS)))


def pair():
    whole = padded()
    halves = {
        "decoder_input_ids": whole["input_ids"],
        "decoder_attention_mask": whole["attention_mask"],
    }
    return HostBatch({**whole, **halves})


def packed_pair():
    ids = token_ids(1, sum(LENGTHS))
    segments = torch.tensor([[1, 2, 3]]).repeat_interleave(torch.tensor(LENGTHS), dim=1)
    return HostBatch(
        input_ids=ids, attention_mask=segments, labels=ids, decoder_attention_mask=segments
    )


def collated(model):
    return autopack.PackingCollator.for_model(model, labels="given")(examples())


def classes(model):
    documents = [{"input_ids": each["input_ids"], "labels": 1} for each in examples()]
    return autopack.PackingCollator.for_model(model)(documents)


def of_classes(rows):
    return HostBatch({**rows, "labels": torch.ones(len(LENGTHS), dtype=torch.long)})


CALLS = {
    **{name: (name, "causal-lm", collated) for name in ("llama", "bart")},
    "llama, padded": ("llama", "causal-lm", lambda _: padded()),
    "t5, padded": ("t5", "seq2seq", lambda _: padded()),
    "bart, tokens on both sides": ("bart", "seq2seq", lambda _: pair()),
    "t5, packed": ("t5", "seq2seq", lambda _: packed_pair()),
    **{
        f"{name}, classes": (name, "sequence-classification", classes) for name in ("llama", "bert")
    },
    "llama, classes, padded": ("llama", "sequence-classification", lambda _: of_classes(padded())),
}


@pytest.mark.parametrize("name", CALLS)
def test_nothing_is_read_where_the_collators_values_are_remembered(name):
    model_type, task, collate = CALLS[name]
    # Kernels of mixtures know of bfloat16 alone on the meta device.
    model = tiny.build(model_type, task=task, dtype=torch.bfloat16)
    batch = collate(model)
    with autopack.enable(model, verify=False):
        model.to("meta")
        model(**batch.to("meta")).loss.backward()
        with pytest.raises((NotImplementedError, RuntimeError), match="meta tensor"):
            # moved one by one, nobody knows what they hold
            model(**{n: v.to("meta") for n, v in batch.items()})


class OnGpu(torch.Tensor):
    """The CPU stands for a GPU: it can be told to stop too, and does it at once."""

    device = torch.device("cuda")


def on_gpu():
    """A tensor there, and what is known of it."""
    tensor = torch.arange(4).clone().as_subclass(OnGpu)
    return tensor, host._Known(host._version_of(tensor), torch.arange(4), torch.arange(4))


def positions_of_four():
    return HostBatch(position_ids=torch.arange(4)[None])


class TestHostBatch:
    def test_what_is_remembered_is_what_was_moved(self):
        more = {"parts": [torch.ones(1)], "nested": {"pair": (torch.ones(1), 2)}}
        batch = HostBatch(
            position_ids=torch.arange(4)[None], weights=torch.ones(2), name="one", **more
        )
        moved = batch.to("meta")
        assert type(moved) is HostBatch
        assert [moved["weights"].is_meta, moved["parts"][0].is_meta, moved["name"]] == [
            True,
            True,
            "one",
        ]
        assert moved["nested"]["pair"][0].is_meta
        assert moved["nested"]["pair"][1] == 2
        known = recall(moved)
        assert list(known) == ["position_ids"]
        assert torch.equal(known["position_ids"], batch["position_ids"])

    def test_what_was_written_to_afterwards_is_not_known(self):
        tensor = HostBatch(one=torch.arange(4)).to("meta")["one"]  # where nothing can be compared
        assert list(recall({"one": tensor})) == ["one"]
        tensor.add_(1)
        assert recall({"one": tensor}) == {}

    def test_of_a_tensor_that_counts_no_writes_nothing_is_known(self):
        with torch.inference_mode():
            tensor = HostBatch(one=torch.arange(4)).to("meta")["one"]
            note_padding(tensor, np.array([True, False, True, True]))
        assert recall({"one": tensor}) == {}
        assert noted_padding(tensor) is None

    def test_a_tensor_that_got_other_data_is_not_known(self):
        """Which counts no version up."""
        tensor, known = on_gpu()
        tensor.data = torch.zeros(4, dtype=torch.long)
        assert not known.is_still(tensor), "and no device was told to stop"

    @pytest.mark.parametrize(
        "write",
        [
            lambda tensor: tensor.data.fill_(7),
            lambda tensor: tensor.numpy().fill(7),
            lambda tensor: torch.utils.dlpack.from_dlpack(tensor).fill_(7),
        ],
    )
    def test_what_counts_no_version_up_is_seen(self, write):
        """As a broadcast to the tensors of another rank does."""
        tensor = torch.arange(4).clone()
        remember(tensor, tensor)
        version = tensor._version
        write(tensor)
        assert tensor._version == version
        assert recall({"one": tensor}) == {}

    def test_a_device_that_can_be_told_to_stop_is(self):
        tensor, known = on_gpu()
        assert known.is_still(tensor)
        tensor.data.fill_(7)
        with pytest.raises(RuntimeError, match="written to after it was moved to this device"):
            known.is_still(tensor)

    def test_what_is_written_on_the_host_afterwards_changes_nothing(self):
        batch = positions_of_four()
        moved = batch.to("meta")
        batch["position_ids"].zero_()
        assert recall(moved)["position_ids"].tolist() == [[0, 1, 2, 3]]

    @pytest.mark.parametrize(
        "change", [lambda t: t[:, :2], lambda t: t + 0, torch.clone, lambda t: t.view(2, 2)]
    )
    def test_what_is_computed_from_it_is_not_known(self, change):
        moved = positions_of_four().to("meta")
        assert recall({"position_ids": change(moved["position_ids"])}) == {}

    def test_a_tensor_is_forgotten_with_its_last_reference(self):
        before = len(host._known)
        moved = positions_of_four().to("meta")
        assert len(host._known) == before + 1
        del moved
        assert len(host._known) == before

    def test_what_accelerate_moves_is_known(self):
        moved = send_to_device(autopack.PackingCollator()(examples()), torch.device("meta"))
        assert "position_ids" in recall(moved)
        # as a Trainer does after it
        rebuilt = type(moved)({name: value.to("meta") for name, value in moved.items()})
        assert "position_ids" in recall(rebuilt)

    @pytest.mark.parametrize("workers", [0, 1])
    def test_what_comes_out_of_a_data_loader_can_be_moved(self, workers):
        loader = DataLoader(
            examples(), batch_size=3, collate_fn=autopack.PackingCollator(), num_workers=workers
        )
        (batch,) = loader
        assert type(batch) is HostBatch
        assert "position_ids" in recall(batch.to("meta"))


def test_a_declaration_that_is_remembered_is_held_to_the_same_rules():
    model = tiny.build("llama")
    with autopack.enable(model, verify=False):
        ids = token_ids(1, 4)
        batch = HostBatch(input_ids=ids, position_ids=torch.tensor([[0, 1, -1, 0]]))
        model.to("meta")
        with refused("declaration-invalid", match="must not be negative"):
            model(**batch.to("meta"))
        with refused("declaration-invalid", match="must lie on the device"):
            model(input_ids=ids.to("meta"), position_ids=torch.tensor([[0, 1, 0, 1]]))


def test_padding_that_was_noted_is_forgotten_where_the_tokens_are_written_to():
    """As lm-eval's HFLM has it noted, which pads without a mask."""
    stock, lengths = tiny.build("llama"), torch.tensor(LENGTHS)[:, None]
    model, ids = copy.deepcopy(stock), token_ids(3, 9)
    real = torch.arange(9) < lengths
    with autopack.enable(model) as handle, torch.no_grad():
        note_padding(ids, real.numpy())
        torch.testing.assert_close(
            model(input_ids=ids).logits[real], stock(input_ids=ids).logits[real]
        )
        assert handle.tally.padding == int((~real).sum())
        ids[1, 5] += 1
        torch.testing.assert_close(model(input_ids=ids).logits, stock(input_ids=ids).logits)
        assert handle.tally.batches == 1
