"""Assertions fail with the report; the pytest plugin serves a project of its own."""

import os
import re
import sys
from pathlib import Path

import pytest

import autopack
from autopack import testing, tiny
from compat.museum.data import _trainer
from tests.support.processes import ROOT, python

MODEL = '''
"""A model of the project's own: a causal average over tokens, which knows documents by their positions, or does not."""

import pytest
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput


class OurConfig(PretrainedConfig):
    model_type = "ours"
    vocab_size, hidden_size, num_hidden_layers, num_attention_heads = 40, 8, 1, 1

    def __init__(self, apart=True, **more):
        super().__init__(**more)
        self.apart = apart


class Average(nn.Module):
    def __init__(self, apart):
        super().__init__()
        self.apart = apart

    def forward(self, states, position_ids):
        count = states.shape[1]
        kept = torch.ones(count, count, dtype=bool).tril()
        if self.apart:
            steps = torch.diff(position_ids, dim=1, prepend=position_ids[:, :1]) != 1
            document = steps.cumsum(1)
            kept = kept & (document[:, :, None] == document[:, None, :])
        weights = kept.to(states) * torch.ones(len(states), 1, 1).to(states)
        return weights @ states / weights.sum(-1, keepdim=True)


class OurModel(PreTrainedModel):
    config_class = OurConfig

    def __init__(self, config):
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.average = Average(config.apart)
        self.head = nn.Linear(config.hidden_size, config.vocab_size)
        self.post_init()

    def get_input_embeddings(self):
        return self.embedding

    def forward(self, input_ids, position_ids=None, labels=None):
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1])[None].expand_as(input_ids)
        logits = self.head(self.average(self.embedding(input_ids), position_ids))
        loss = None
        if labels is not None:
            loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutput(loss=loss, logits=logits)


def made(apart):
    torch.manual_seed(0)
    return OurModel(OurConfig(apart=apart))
'''
TESTS = """
import pytest
from ours import made

MODES = ("default", "two rows")


def test_it_keeps_documents_apart(packing_exact):
    packing_exact(made(True), modes=MODES)


def test_it_does_not(packing_exact):
    packing_exact(made(False), modes=MODES)
"""
HANDED = """
import pytest
from ours import made


@pytest.fixture
def model():
    return made({apart})


def test_its_size(model):
    assert model.head.out_features == 40
"""


def pytest_in(folder, *options, status, **texts):
    """Run pytest in a project with these files, where the plugin is installed as pyproject.toml has
    it."""
    (folder / "pytest.ini").write_text("[pytest]\n")  # no other file above the folder is read
    for name, text in {"ours": MODEL, **texts}.items():
        (folder / f"{name}.py").write_text(text)
    told = re.search(
        r"\[project.entry-points.pytest11\]\n(.*\n)", (ROOT / "pyproject.toml").read_text()
    )[1]
    installed = folder / "site" / "autopack_here-0.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: autopack-here\nVersion: 0\n")
    (installed / "entry_points.txt").write_text("[pytest11]\n" + told.replace('"', ""))
    path = os.pathsep.join(map(str, (ROOT, folder / "site")))
    options = ("-q", "-p", "no:cacheprovider", *options)
    return python("-m", "pytest", *options, folder=folder, status=status, PYTHONPATH=path)


def test_a_project_of_its_own_sees_what_leaks_and_where(tmp_path):
    said = pytest_in(tmp_path, status=1, test_ours=TESTS).stdout
    assert "1 failed, 1 passed" in said
    assert "it begins in average, of the class Average" in said
    assert re.search(r"default +eval .*LEAK", said)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("apart", "options", "status"),
    [(True, ["--pack-audit"], 0), (False, ["--pack-audit"], 1), (False, [], 0)],
)
def test_models_of_fixtures_are_audited_if_asked_for(tmp_path, apart, options, status):
    said = pytest_in(tmp_path, *options, status=status, test_ours=HANDED.format(apart=apart)).stdout
    assert ("it begins in average, of the class Average" in said) == bool(status)


def test_an_exact_model_passes_enabled_or_not():
    model = tiny.build("llama", attn_implementation="eager")
    testing.assert_packing_exact(model, modes=("use_cache=False",))
    with pytest.raises(AssertionError, match=r"LEAKS[^$]*it begins in model.layers.0.self_attn"):
        testing.assert_packing_exact(model, modes=("default",))
    with autopack.enable(model):
        testing.assert_packing_exact(model, modes=("default",))


def test_a_step_says_what_is_wrong_with_it():
    testing.assert_step_exact(_trainer.trainer())
    with pytest.raises(
        AssertionError, match=r"come as one with others: document \d+ of \d+ tokens and document"
    ):
        testing.assert_step_exact(_trainer.trainer(collator=unpositioned))


def unpositioned(features):
    batch = _trainer.packed(features)
    return {"input_ids": batch["input_ids"], "labels": batch["labels"]}


def test_the_plugin_imports_neither_torch_nor_transformers():
    code = "import sys, autopack.testing.plugin; print({'torch', 'transformers'} & {*sys.modules})"
    assert python("-c", code).stdout.strip() == "set()"
    assert Path(sys.modules["autopack.testing"].__file__).name == "__init__.py"
