"""`watch` on exact models of many kinds: every call is checked, and none of them alarms."""

import random

import pytest
import torch

import autopack
from autopack import tiny
from tests.encoder_decoder.pairs import Pairs
from tests.encoder_decoder.test_recordings import texts_of, with_recordings
from tests.support.padded import batch, build, mask_of
from tests.support.trained import with_lora
from tests.support.training_calls import (
    FLOAT32,
    lengths_of,
    padded,
    row,
    segments,
    trained,
    with_and_without_noise,
)

TYPES = (
    "llama",
    "gpt2",
    "gemma3_text",
    "qwen2_moe",
    "mixtral",
    "mamba",
    "bamba",
    "rwkv",
    "bloom",
    "bert",
    "deberta-v2",
)
"""Rotary and learned positions, windows, experts, recurrences, distance biases, encoders."""


@pytest.mark.sampled(4)
@with_and_without_noise
@pytest.mark.parametrize("model_type", TYPES)
def test_an_exact_model_never_alarms(model_type, noise):
    implementation = "sdpa" if model_type in ("llama", "gpt2", "mixtral", "bert") else "eager"
    model = build(
        model_type,
        "masked LM" if model_type in ("bert", "deberta-v2") else "causal LM",
        implementation,
    )
    noise(model)
    handle = autopack.enable(model, check_every=1)
    made = [(segments, padded)[step % 2](step) for step in range(50)]
    trained(model, *made)
    # Some models are not run without padding, and there is nothing to check then.
    expected = 25 + handle.tally.batches
    assert handle.checked.checks == expected > 0
    assert handle.checked.worst < FLOAT32
    assert not handle.checked.skipped
    handle.remove()


@pytest.mark.sampled(2)
@with_and_without_noise
@pytest.mark.parametrize("model_type", ["t5", "bart"])
def test_an_exact_encoder_decoder_never_alarms(model_type, noise):
    model = tiny.build(model_type, task="seq2seq").train()
    noise(model)
    handle = autopack.enable(model, check_every=1)
    forms = ("one_row", "two_rows", "padded")
    trained(model, *(getattr(Pairs.draw(seed=step), forms[step % 3])() for step in range(30)))
    assert handle.checked.checks == 30
    assert handle.checked.worst < FLOAT32
    handle.remove()


def of_heads(task, step):
    """Packed rows for a head: with a label for each document, or for each token."""
    found = segments(step)
    if task == "sequence classification":
        found["labels"] = torch.arange(4) % 3
    elif task == "question answering":
        del found["labels"]
        found |= {
            "start_positions": torch.zeros(4, dtype=torch.long),
            "end_positions": torch.tensor(lengths_of(step)) - 1,
        }
    else:
        found["labels"] = found["labels"].where(found["labels"] < 0, found["labels"] % 3)
    return found


@with_and_without_noise
@pytest.mark.parametrize(
    "task", ["sequence classification", "question answering", "token classification"]
)
def test_heads_are_checked(task, noise):
    model = build("bert", task=task)
    noise(model)
    with autopack.enable(model, check_every=1) as handle:
        trained(model, *(of_heads(task, step) for step in range(6)))
        assert handle.checked.checks == 6
        trained(model, *(batch(task, mask_of(lengths_of(step)), seed=step) for step in range(6)))
        # those stay padded
        assert handle.checked.checks == 6 + (0 if task == "question answering" else 6)
        assert handle.checked.worst < FLOAT32


@with_and_without_noise
def test_recordings_go_with_their_documents(noise):
    model, name, recordings = with_recordings()
    model.train()
    noise(model)
    texts = Pairs.draw()
    given = {name: torch.cat(recordings)}
    with autopack.enable(model, check_every=1, verify=False) as handle:
        trained(model, *[given | texts_of(texts.one_row())] * 5)
        trained(model, *[given | texts_of(texts.padded())] * 5)
        assert handle.checked.checks == 10
        assert handle.checked.worst < FLOAT32


class Jumpy(torch.nn.Module):
    """A layer that draws numbers of its own in training, at a rate that nobody can see."""

    def forward(self, states):
        return states * random.random()


def drawing(model):
    model.model.norm = torch.nn.Sequential(model.model.norm, Jumpy())
    return model


@with_and_without_noise
@pytest.mark.parametrize(
    "around", [drawing, lambda model: with_lora(model, lora_dropout=0.3).train()]
)
def test_an_exact_model_never_alarms_whatever_is_around_it(around, noise):
    model = around(noise(build("llama")))
    with autopack.enable(model, check_every=1, verify=around is not drawing) as handle:
        trained(model, *((row, padded)[step % 2](step) for step in range(8)))
        assert (handle.checked.checks, handle.checked.leaks) == (8, 0)
        assert not handle.checked.skipped
        assert handle.checked.worst < FLOAT32
