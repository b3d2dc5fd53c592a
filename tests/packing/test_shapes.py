"""Documents padded to a multiple of columns, and batches that all have one shape."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import autopack
from autopack import PackedBatchSampler, PackingCollator, tiny
from tests.packing.batches import Documents
from tests.support.refusals import refused

TOLERANCE = 1e-5
"""float32, relative to values near 1: other orders of sums leave about 1e-6, and a leak 1e-2 or more."""
LENGTHS = (7, 12, 1, 9, 4, 8)
STRATEGIES = ("best_fit", "sequential", "sorted", "random")


@pytest.mark.parametrize("flash_kwargs", [False, True])
@pytest.mark.parametrize(
    ("model_type", "task"),
    [
        ("llama", "causal-lm"),
        ("gpt2", "causal-lm"),
        ("bloom", "causal-lm"),
        ("mamba", "causal-lm"),
        ("lfm2", "causal-lm"),
        ("qwen2_moe", "causal-lm"),
        ("bert", "masked-lm"),
        ("roberta", "masked-lm"),
        ("fnet", "masked-lm"),
    ],
)
def test_documents_padded_inside_a_row_are_exact(model_type, task, flash_kwargs):
    model = tiny.build(model_type, task=task).eval()
    stock = copy.deepcopy(model)
    masked = task == "masked-lm"
    documents = [tiny.tokens(model.config, 1, n, seed=n)[0] for n in LENGTHS]
    examples = [{"input_ids": d, **({"labels": d} if masked else {})} for d in documents]
    declare = ("attention_mask", *["cu_seq_lens"] * flash_kwargs)
    collate = PackingCollator.for_model(model, align=8, max_length=24, rows=3, declare=declare)
    batch = collate(examples)
    if "cu_seq_lens_q" in batch and not autopack_takes(model, "cu_seq_lens_q"):
        pytest.skip("its forward has no place for cu_seq_lens")
    autopack.enable(model)
    output = model(**batch)
    output.loss.backward()

    logits = output.logits[batch["attention_mask"].bool()].split([len(d) for d in documents])
    total, count = torch.zeros(()), 0
    for document, found in zip(documents, logits, strict=True):
        by_itself = stock(input_ids=document[None]).logits[0]
        torch.testing.assert_close(found, by_itself, rtol=TOLERANCE, atol=TOLERANCE)
        predicted, wanted = (by_itself, document) if masked else (by_itself[:-1], document[1:])
        total = total + torch.nn.functional.cross_entropy(predicted, wanted, reduction="sum")
        count += len(wanted)
    if not getattr(model.config, "output_router_logits", False):
        torch.testing.assert_close(output.loss, total / count, rtol=TOLERANCE, atol=TOLERANCE)
        (total / count).backward()
        for (name, one), other in zip(model.named_parameters(), stock.parameters(), strict=True):
            if one.grad is not None and other.grad is not None:
                worst = float((one.grad - other.grad).abs().max())
                assert worst <= 10 * TOLERANCE * max(1.0, float(other.grad.abs().max())), name


def autopack_takes(model: torch.nn.Module, name: str) -> bool:
    """Whether a forward names an argument, or takes any."""
    import inspect

    parameters = inspect.signature(type(model).forward).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def test_without_the_mask_padding_inside_documents_is_seen():
    """Negative control: what the refusal of `declare=()` is for."""
    model = tiny.build("bert", task="masked-lm").eval()
    stock = copy.deepcopy(model)
    document = tiny.tokens(model.config, 1, 5)[0]
    batch = PackingCollator.for_model(model, align=8, labels="none")([{"input_ids": document}] * 2)
    autopack.enable(model)
    alone = stock(input_ids=document[None]).logits[0]
    torch.testing.assert_close(model(**batch).logits[0, :5], alone, rtol=TOLERANCE, atol=TOLERANCE)
    batch.pop("attention_mask")
    assert float((model(**batch).logits[0, :5] - alone).detach().abs().max()) > 1e-2


def test_a_class_per_document_is_that_of_its_last_token_and_not_of_padding():
    model = tiny.build("llama", task="sequence-classification").eval()
    stock = copy.deepcopy(model)
    documents = [tiny.tokens(model.config, 1, n, seed=n)[0] for n in LENGTHS]
    batch = PackingCollator.for_model(model, align=8, max_length=24)(
        [{"input_ids": d, "label": i % 2} for i, d in enumerate(documents)]
    )
    autopack.enable(model)
    expected = torch.cat([stock(input_ids=d[None]).logits for d in documents])
    torch.testing.assert_close(model(**batch).logits, expected, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("strategy", ["best_fit", "random", "sequential"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_all_batches_of_all_epochs_have_one_shape(strategy, ranks):
    lengths = np.random.default_rng(1).integers(1, 60, 200).tolist()
    documents = Documents(lengths)
    declare = ("attention_mask", "cu_seq_lens")
    collate = PackingCollator(max_length=64, rows=2, max_documents=5, align=4, declare=declare)
    shapes, tokens = set(), 0
    for rank in range(ranks):
        sampler = PackedBatchSampler(
            lengths, 64, rows_per_batch=2, strategy=strategy, max_documents=5, align=4, num_replicas=ranks, rank=rank
        )
        for epoch in range(2):
            sampler.set_epoch(epoch)
            for batch in DataLoader(documents, batch_sampler=sampler, collate_fn=collate):
                named = {n: tuple(v.shape) if isinstance(v, torch.Tensor) else v for n, v in batch.items()}
                named.pop("attention_mask", None)  # not in a batch without padding
                shapes.add(json.dumps(named))
                tokens += int(batch.get("attention_mask", torch.ones_like(batch["input_ids"])).sum())
    assert len(shapes) == 1
    assert tokens == 2 * sum(lengths)


def test_a_batch_of_more_rows_is_refused_with_the_way_out():
    with refused("does-not-fit", match=r"rows=1: 3 documents of 9 tokens take 2 rows of 8.*PackedBatchSampler"):
        PackingCollator(max_length=8, rows=1, align=2)(
            [{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}, {"input_ids": [6, 7, 8, 9]}]
        )


def test_a_packed_row_is_as_long_as_its_padded_documents():
    rows = autopack.pack([{"input_ids": [5] * n} for n in (7, 9, 3)], 24, align=8)
    collate = PackingCollator(max_length=24, align=8)
    assert sorted(len(row["input_ids"]) for row in rows) == [7, 12]  # one row of 19 if nothing were padded
    assert {collate([row])["input_ids"].shape[1] for row in rows} == {8, 24}
    too_long = {"input_ids": [5] * 19, "seq_lengths": [7, 9, 3]}
    with refused("unusable-data", match=r"19 tokens \(32 with each document padded to a multiple of 8\)"):
        collate([too_long])
    cut = PackingCollator(max_length=24, align=8, overflow="truncate")([too_long])
    assert int(cut["attention_mask"].sum()) == 16
    with refused("unusable-data", match="found 3 documents for rows of at most 2; raise max_documents"):
        PackingCollator(max_length=24, max_documents=2)([too_long])


def test_positions_of_documents_own_end_before_the_next_begins():
    own = [{"input_ids": [1, 2, 3], "position_ids": [0, 1, 2]}, {"input_ids": [4, 5], "position_ids": [4, 5]}]
    with refused("unusable-data", match="end at 2, and the next document of the row starts at 4"):
        PackingCollator(align=4)(own)
    own[1]["position_ids"] = [0, 1]
    found = PackingCollator(align=4)(own)
    assert found["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 2, 3]]


def test_a_state_from_before_is_taken_and_one_of_other_padding_is_not():
    one, other = (PackedBatchSampler([3, 4, 5], 16, align=align) for align in (1, 8))
    assert "align" not in one.state_dict()["made_of"]
    with refused("other-data", match="align was 8 and is"):
        one.load_state_dict(other.state_dict())
