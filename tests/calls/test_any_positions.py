"""Documents that seq_idx declares, with positions that do not count on by one in them: each has
exactly its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import pytest
import torch

import autopack
from autopack import tiny
from tests.conftest import LENGTHS, llama, token_ids
from tests.engine import Call, must_be_exact, numbered
from tests.support.refusals import refused

IDS = token_ids()
SEQ_IDX = numbered(LENGTHS)
FORMS = {
    "reversed": lambda n: torch.arange(n).flip(0),
    "strided": lambda n: torch.arange(n) * 3,
    "shuffled": lambda n: torch.randperm(n, generator=torch.Generator().manual_seed(n)),
}
POSITIONS = {name: torch.cat([make(n) for n in LENGTHS])[None] for name, make in FORMS.items()}
POSITIONS["reversed throughout"] = torch.arange(sum(LENGTHS)).flip(0)[None]
TYPES = [
    "llama",
    "gpt2",
    "gpt_neox",
    "gptj",
    "opt",
    "bamba",
    "mistral",
    "gemma3_text",
    "roberta",
    "qwen2",
]
CASES = [(kind, "reversed") for kind in TYPES] + [("llama", name) for name in POSITIONS]


@dataclass(frozen=True)
class Positioned(Call):
    """Documents have these positions; without a mask stock would cut them where positions do not
    count on."""

    form: str = "seq_idx"
    lengths: Sequence[int] = LENGTHS
    where: torch.Tensor = POSITIONS["strided"]

    def run(self, model, arguments):
        ids = arguments["input_ids"]
        of_length = {
            part.shape[1]: part for part in (self.where, *self.where.split(self.lengths, 1))
        }
        given = {"position_ids": of_length[ids.shape[1]], "use_cache": False}
        if "seq_idx" not in arguments:
            given["attention_mask"] = torch.ones_like(ids)
        return super().run(model, arguments | given)


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_documents_have_the_positions_that_they_are_given(kind, name):
    call = Positioned(where=POSITIONS[name] + 2 * (kind == "roberta"))
    must_be_exact(kind, call.row, check_every=1)


def test_a_row_of_one_document_is_one_document():
    call = Positioned(lengths=(sum(LENGTHS),), where=POSITIONS["reversed throughout"])
    must_be_exact("llama", ((call.packed, call.alone),))


@pytest.mark.parametrize("scaling", ["dynamic", "longrope"])
def test_frequencies_are_those_of_the_largest_position_of_each_document(scaling):
    half = 8
    factors = {"short_factor": [1.0] * half, "long_factor": [float(n + 2) for n in range(half)]}
    rope = {
        "rope_type": scaling,
        "factor": 4.0,
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 24,
    }
    rope |= factors if scaling == "longrope" else {}
    changed = {"rope_scaling": rope, "max_position_embeddings": 24 if scaling == "dynamic" else 96}
    must_be_exact(partial(llama, **changed), Positioned().row, verify=False)


def test_models_that_read_positions_otherwise_refuse_them():
    call = {"input_ids": IDS, "position_ids": POSITIONS["reversed"], "seq_idx": SEQ_IDX}
    head = tiny.build("llama", task="sequence-classification", dtype=torch.float64)
    for model in (head, tiny.build("llama4_text", dtype=torch.float64)):
        with autopack.enable(model), refused("documents-unclear"):
            model(**call)
