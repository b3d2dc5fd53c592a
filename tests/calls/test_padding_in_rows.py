"""Padding inside packed rows is not computed, and nothing of the documents changes for it."""

import pytest
import torch

import autopack
from autopack import tiny
from tests.engine import Call, Result, check, counted, ids, leaks
from tests.support.refusals import refused

LENGTHS = (5, 7, 4, 3)
PLACES = ((0, 0), (0, 5), (1, 0), (1, 6))
"""The row and the first column of each document: padding is between them and behind."""
COLUMNS = 20
TYPES = ("llama", "opt", "gemma3_text", "mixtral", "mamba2", "qwen3_next", "bert")


def built(model_type):
    task = "masked-lm" if model_type == "bert" else "causal-lm"
    model = tiny.build(model_type, task=task).double()
    if hasattr(model.config, "_experts_implementation"):
        model.set_experts_implementation("eager")  # torch's grouped products know no float64
    return model


def rows(model):
    """Two packed rows with padding; labels at documents alone."""
    first = autopack.registry.first_position(model.config)
    found = tiny.tokens(model.config, 2, COLUMNS)
    mask, positions = torch.zeros_like(found), torch.full_like(found, first)
    for (row, begin), part in zip(PLACES, ids(lengths=LENGTHS)[0].split(LENGTHS), strict=True):
        place = row, slice(begin, begin + len(part))
        found[place], mask[place], positions[place] = part, 1, counted([len(part)], first)[0]
    labels = found.masked_fill(
        (mask == 0) | ((positions == first) & (model.config.model_type != "bert")), -100
    )
    return {"input_ids": found, "attention_mask": mask, "position_ids": positions, "labels": labels}


def packed(model):
    output = model(**rows(model))
    places = zip(PLACES, LENGTHS, strict=True)
    parts = [output.logits[row, begin : begin + length] for (row, begin), length in places]
    return Result.of(model, parts, output.loss)


def columns_that_ran(model, batch):
    """The number of tokens that the model embeds."""
    seen = []
    hook = model.get_input_embeddings().register_forward_hook(
        lambda _, args, output: seen.append(output.shape[:2])
    )
    model(**batch)
    hook.remove()
    return tuple(seen[-1])


@pytest.mark.parametrize("model_type", TYPES)
def test_documents_are_those_alone(model_type):
    model = built(model_type)
    expected = Call(lengths=LENGTHS, shifts=model_type != "bert").alone(model)
    if model_type != "gemma3_text":  # whose padding sees nothing in stock, and is no number
        assert leaks(packed(model), expected), "the control: stock mixes them"
    with autopack.enable(model, check_every=0):
        check(packed(model), expected)
        assert columns_that_ran(model, rows(model)) == (1, sum(LENGTHS))


@pytest.mark.parametrize(
    "kept", ["unpad=False", "no labels", "little padding", "bounds of fixed number"]
)
def test_it_stays(kept):
    """Where it was asked for, where a loss outside may read it, where it is little, and in fixed
    shapes."""
    model = built("llama").train()
    batch = rows(model)
    if kept == "no labels":
        del batch["labels"]
    elif kept == "little padding":
        batch = {name: value[:1, :13] for name, value in batch.items()}
    elif kept == "bounds of fixed number":
        ends = torch.tensor([0, 5, 12, 20, 24, 26, 29, 40, 40], dtype=torch.int32)
        batch |= {f"cu_seq_lens_{each}": ends for each in "qk"} | {
            f"max_length_{each}": 13 for each in "qk"
        }
    with autopack.enable(model, unpad=kept != "unpad=False", check_every=0):
        assert columns_that_ran(model, batch) == batch["input_ids"].shape


def test_it_is_counted_and_no_gradient_may_reach_it():
    model = built("llama").train()
    batch = rows(model)
    with autopack.enable(model, check_every=0) as handle:
        output = model(**batch)
        assert handle.tally.training.columns == sum(LENGTHS)
        with refused("unpad-refused"):
            (output.loss + output.logits.square().mean()).backward()
        assert columns_that_ran(model, batch) == (2, COLUMNS)
