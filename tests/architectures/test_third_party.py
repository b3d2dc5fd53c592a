"""A family from elsewhere: a model with attention and positions of its own, served by what is public alone."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

import autopack
from autopack import registry
from tests.conftest import FLOAT64, LEAK, alone, error, positions
from tests.support.refusals import refused

ROWS = ((5, 1, 9, 5), (2, 14, 4))
SEGMENTS = torch.tensor([[1] * 5 + [2] + [3] * 9 + [4] * 5, [1] * 2 + [2] * 14 + [3] * 4])


class ToyConfig(PretrainedConfig):
    model_type = "toy"


class ToyPositions(nn.Embedding):
    """Learned positions of columns: nothing can be passed to them."""

    def forward(self, hidden):
        return self.weight[: hidden.shape[1]]


class ToyAttention(nn.Linear):
    """Causal attention with a bias by distance, in code of its own."""

    def forward(self, hidden):
        query, key, value = super().forward(hidden).chunk(3, -1)
        column = torch.arange(hidden.shape[1])
        distance = column[:, None] - column
        scores = (query @ key.transpose(1, 2) - distance).masked_fill(distance < 0, float("-inf"))
        return scores.softmax(-1) @ value


class ToyForCausalLM(PreTrainedModel):
    config_class = ToyConfig

    def __init__(self, config):
        super().__init__(config)
        self.tokens, self.positions = nn.Embedding(64, 16), ToyPositions(128, 16)
        self.attention, self.head = ToyAttention(16, 48), nn.Linear(16, 64)

    def get_input_embeddings(self):
        return self.tokens

    def forward(self, input_ids, attention_mask=None, use_cache=None):
        hidden = self.tokens(input_ids)
        hidden = hidden + self.positions(hidden)
        return CausalLMOutput(logits=self.head(hidden + self.attention(hidden)))


MODULE = """
from autopack.registry import Family
from autopack.mixers import ALONE, RESTARTING

FAMILY = Family(
    name="toys",
    model_types=frozenset({"toy"}),
    how="the model's own attention, documents alone; positions restart",
    mixers={"ToyAttention": ALONE, "ToyPositions": RESTARTING},
    attends=False,
    positions=False,
)
"""
"""All that a package of one's own has to hold."""


@pytest.fixture
def toy():
    torch.manual_seed(0)
    return ToyForCausalLM(ToyConfig()).double().eval()


@pytest.fixture
def distributions(tmp_path, monkeypatch):
    """Makes distributions with an entry point each, as an installer leaves them on sys.path."""

    def install(name, module, value):
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[autopack.families]\n{name} = {value}\n")
        (tmp_path / f"{value.partition(':')[0]}.py").write_text(module)

    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    registry._from_entry_points.cache_clear()  # what was installed is looked for once per process
    yield install
    registry._from_entry_points.cache_clear()
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and str(tmp_path) in sys.modules[name].__file__:
            del sys.modules[name]


def check(model):
    """Exact in all call modes, with gradients, after an audit on enable; what stock gives leaks."""
    ids = torch.randint(0, 64, (2, 20), generator=torch.Generator().manual_seed(1))
    expected = alone(model, ids, *ROWS)
    assert error(model(input_ids=ids).logits, expected) > LEAK
    with autopack.enable(model) as handle:
        assert "by a twin of " in str(handle)
        assert error(model(input_ids=ids, attention_mask=SEGMENTS).logits, expected) < FLOAT64
        assert error(model(input_ids=ids, position_ids=positions(*ROWS)).logits, expected) < FLOAT64
        report = autopack.audit(model)
        assert report.exact, str(report)
    assert not autopack.is_enabled(model)


def test_registered_by_a_call(toy, monkeypatch):
    monkeypatch.setattr(registry, "_registered", [])
    with refused("cannot-be-packed", match="no place to keep documents apart"):
        autopack.enable(toy)
    names: dict[str, autopack.registry.Family] = {}
    exec(MODULE, names)
    autopack.registry.register(names["FAMILY"])
    assert len(MODULE.strip().splitlines()) < 30
    check(toy)


def test_registered_by_an_entry_point(toy, distributions):
    distributions("toy-families", MODULE, "toy_families:FAMILY")
    assert "toys" in [family.name for family in autopack.registry.families()]
    check(toy)


def test_a_way_too_little_is_found_by_the_audit(toy, monkeypatch):
    """Without its positions the family leaks, and enable says so instead of training on it."""
    monkeypatch.setattr(registry, "_registered", [])
    names: dict[str, autopack.registry.Family] = {}
    exec(MODULE.replace(', "ToyPositions": RESTARTING', ""), names)
    autopack.registry.register(names["FAMILY"])
    with refused("not-exact"):
        autopack.enable(toy)


@pytest.mark.parametrize(("module", "reason"), [
    ("FAMILY = 3", "is a int; wanted an autopack.registry.Family"),
    ("import no_such_module", "cannot be loaded: ModuleNotFoundError"),
])  # fmt: skip
def test_an_entry_point_that_gives_no_family_is_named(distributions, module, reason):
    distributions("broken-families", module, "broken_families:FAMILY")
    with refused("broken-installation", match=f"'broken-families'.*{reason}"):
        autopack.registry.families()


def test_what_is_registered_by_a_call_is_a_family():
    with pytest.raises(TypeError, match=r"takes an autopack\.registry\.Family; found str"):
        autopack.registry.register("toy")
