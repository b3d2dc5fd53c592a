"""An architecture costs one family: a toy, known by what one new file in autopack/architectures
says of it, or a package from elsewhere by a call; docs/families.md has toys of other mixers."""

import shutil
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import CausalLMOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import eager_attention_forward

import autopack
from autopack import architectures, registry, tiny
from tests.engine import Call, must_be_exact
from tests.support.refusals import refused

WARMING = '''
"""Toys whose queries grow with the column of a row, and whose first position is 2."""

import torch

from autopack.family import Family, Numbering, Tiny


def _warmth_of_position(module, layout, query, key, value, options):
    column = torch.arange(layout.columns)[None]
    ratio = module.warmth(column - layout.start_columns) / module.warmth(column)
    return query * ratio[:, None, :, None], key, value, options


FAMILY = Family(
    name="warming",
    model_types=frozenset({"warming"}),
    how="attention site, document by document; warmth restarts",
    adjustments={"WarmingAttention": _warmth_of_position},
    numbering={"warming": Numbering(start=2)},
    tiny=Tiny(configs={"warming": {"columns_per_degree": 3}}),
)
'''


class WarmingConfig(PretrainedConfig):
    model_type = "warming"
    vocab_size: int = 32000
    hidden_size: int = 1024
    num_attention_heads: int = 16
    max_position_embeddings: int = 2048
    columns_per_degree: int = 1000


class WarmingAttention(nn.Module):
    is_causal = True

    def __init__(self, config):
        super().__init__()
        self.config, self.scaling, self.num_key_value_groups = config, 0.5, 1
        self.into, self.out = (
            nn.Linear(config.hidden_size, n * config.hidden_size) for n in (3, 1)
        )

    def warmth(self, column):
        return 1 + torch.log1p(column.double() / self.config.columns_per_degree)

    def forward(self, hidden, attention_mask, **options):
        heads = (*hidden.shape[:2], 3, self.config.num_attention_heads, -1)
        query, key, value = self.into(hidden).view(heads).permute(2, 0, 3, 1, 4)
        query = query * self.warmth(torch.arange(hidden.shape[1]))[:, None]
        attend = eager_attention_forward
        if self.config._attn_implementation != "eager":
            attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        mixed, _ = attend(
            self, query, key, value, attention_mask, scaling=self.scaling, dropout=0.0, **options
        )
        return self.out(mixed.reshape(hidden.shape))


class WarmingForCausalLM(PreTrainedModel):
    config_class = WarmingConfig
    _supports_sdpa = True

    def __init__(self, config):
        super().__init__(config)
        self.tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.attention, self.head = (
            WarmingAttention(config),
            nn.Linear(config.hidden_size, config.vocab_size),
        )
        self.post_init()

    def get_input_embeddings(self):
        return self.tokens

    def forward(self, input_ids, attention_mask=None, position_ids=None, use_cache=None, **options):
        if position_ids is None:
            position_ids = torch.arange(2, 2 + input_ids.shape[1])[None]
        hidden = self.tokens(input_ids) + self.positions(position_ids)
        mask = create_causal_mask(
            self.config, hidden, attention_mask, past_key_values=None, position_ids=position_ids
        )
        return CausalLMOutput(logits=self.head(hidden + self.attention(hidden, mask, **options)))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A copy of autopack/architectures in its place, with one more file, of a type that
    transformers knows."""
    copy = tmp_path / "architectures"
    shutil.copytree(
        Path(architectures.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__")
    )
    monkeypatch.setattr(architectures, "__path__", [str(copy)])
    (copy / "warming.py").write_text(WARMING)
    AutoConfig.register("warming", WarmingConfig)
    AutoModelForCausalLM.register(WarmingConfig, WarmingForCausalLM)
    registry._own.cache_clear()
    yield copy
    registry._own.cache_clear()
    sys.modules.pop("autopack.architectures.warming", None)
    transformers.CONFIG_MAPPING._extra_content.pop("warming")
    transformers.MODEL_FOR_CAUSAL_LM_MAPPING._extra_content.pop(WarmingConfig)


def test_it_is_built_tiny_by_the_facts_of_its_file(folder):
    assert "warming" in tiny.types_for("causal-lm")
    config = tiny.build("warming").config
    assert (config.hidden_size, config.vocab_size, config.columns_per_degree) == (64, 128, 3)
    start = tiny.first_position(config)
    assert start == autopack.PackingCollator.for_model(config).first_position == 2


def is_exact():
    """Exact in all call modes, after an audit on enable; what stock gives leaks."""
    make = partial(tiny.build, "warming", dtype=torch.float64)
    must_be_exact(make, Call(labels=None, form="position_ids").row)
    with autopack.enable(make()) as handle:
        assert "on a tiny copy of " in str(handle)
        report = autopack.audit(handle.model)
        assert report.exact, str(report)


def test_packed_equals_alone_and_without_autopack_it_leaks(folder):
    is_exact()


def test_without_its_file_it_is_refused_until_a_call_registers_it(folder, monkeypatch):
    monkeypatch.setattr(registry, "_registered", [])
    (folder / "warming.py").unlink()
    registry._own.cache_clear()
    with pytest.raises(autopack.UnsupportedModel):
        autopack.enable(tiny.build("warming"))
    exec(WARMING, names := {})
    autopack.registry.register(names["FAMILY"])
    is_exact()


def test_a_way_too_little_is_found_by_the_audit(folder):
    """Without its adjustment the family leaks, and enable says so instead of training on it."""
    lacking = WARMING.replace('adjustments={"WarmingAttention": _warmth_of_position},', "")
    (folder / "warming.py").write_text(lacking)
    with refused("not-exact"):
        autopack.enable(tiny.build("warming"))


def test_what_is_registered_by_a_call_is_a_family():
    with pytest.raises(TypeError, match=r"takes an autopack\.registry\.Family; found str"):
        autopack.registry.register("toy")
