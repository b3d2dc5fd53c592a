"""Generation gives the same tokens whether a model is enabled or not, whatever its cache and its padding."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

import autopack
from autopack import tiny
from autopack.calls import choose
from tests.conftest import FLOAT64, LENGTHS, alone, llama, positions, token_ids
from tests.support.refusals import refused

TYPES = {
    **dict.fromkeys(
        ["llama", "gpt2", "opt", "mamba", "bloom", "gemma3_text", "bamba", "qwen3_moe", "falcon"], "causal-lm"
    ),
    **dict.fromkeys(["t5", "bart"], "seq2seq"),
}
WAYS = {
    "dynamic cache": {},
    "no cache": {"use_cache": False},
    "static cache": {"cache_implementation": "static"},
    "beams": {"num_beams": 2},
    "beams without a cache": {"num_beams": 2, "use_cache": False},
    "sampling": {"do_sample": True},
    "chunks": {"prefill_chunk_size": 3},
    "lookup": {"prompt_lookup_num_tokens": 2},
}
if torch.cuda.is_available():
    WAYS["offloaded cache"] = {"cache_implementation": "offloaded"}
PADDING = {"right": [(0, 5, 8), (1, 7, 8)], "left": [(0, 0, 3), (1, 0, 1)], "none": []}


def _prompts(model, side):
    mask = torch.ones(3, 8, dtype=torch.long)
    for row, first, end in PADDING[side]:
        mask[row, first:end] = 0
    return {"input_ids": tiny.tokens(model.config, 3, 8).masked_fill(mask == 0, 0), "attention_mask": mask}


def _generated(model, prompts, **options):
    """The tokens, or the error in words: some types have no such cache."""
    if "prompt_lookup_num_tokens" in options:
        prompts = {name: value[2:] for name, value in prompts.items()}
    torch.manual_seed(0)
    try:
        options = {"do_sample": False, **options}
        return model.generate(**prompts, max_new_tokens=4, pad_token_id=0, eos_token_id=None, **options).tolist()
    except (ValueError, NotImplementedError, AttributeError, TypeError) as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.sampled(6)
@pytest.mark.parametrize("unpad", [True, False])
@pytest.mark.parametrize("model_type", TYPES)
def test_the_same_tokens(model_type, unpad):
    try:
        stock = tiny.build(model_type, task=TYPES[model_type], attn_implementation="sdpa")
    except ValueError:
        stock = tiny.build(model_type, task=TYPES[model_type])
    model, some = copy.deepcopy(stock), 0
    for side in PADDING if unpad else ("right",):
        prompts = _prompts(stock, side)
        for options in WAYS.values():
            expected = _generated(stock, prompts, **options)
            with autopack.enable(model, unpad=unpad):
                assert _generated(model, prompts, **options) == expected, (side, options)
            some += isinstance(expected, list)
    assert some >= 4


def test_positions_of_generation_would_be_taken_for_documents(monkeypatch):
    stock, model = llama(), llama()
    prompts = _prompts(stock, "right")
    monkeypatch.setattr(choose, "generates", lambda model: False)
    with autopack.enable(model):
        with refused("cache-given"):
            model.generate(**prompts, max_new_tokens=2, cache_implementation="static")
        assert _generated(model, prompts, use_cache=False) != _generated(stock, prompts, use_cache=False)


def test_a_continued_forward_with_a_mask_longer_than_its_tokens():
    stock, model = llama(), llama()
    prompts, found = _prompts(stock, "left"), []
    with autopack.enable(model):
        for which in (stock, model):
            cache = which(**prompts, use_cache=True).past_key_values
            mask = torch.cat([prompts["attention_mask"], torch.ones(3, 2, dtype=torch.long)], 1)
            following = mask.cumsum(1)[:, -2:] - 1
            ids = token_ids(3, 2)
            arguments = {"attention_mask": mask, "position_ids": following, "past_key_values": cache}
            found.append(which(input_ids=ids, **arguments).logits)
    assert torch.equal(*found)


@pytest.mark.parametrize("model_type", ["llama", "mamba2", "bamba", "qwen3_next", "gpt2", "lfm2"])
def test_a_second_turn_with_padding_before_it(model_type):
    """Positions stand still at the padding, at what the first token of the row has; they declare nothing there."""
    stock = tiny.build(model_type).eval()
    model, found = copy.deepcopy(stock), []
    ids, mask = tiny.tokens(stock.config, 2, 9), torch.ones(2, 9, dtype=torch.long)
    mask[1, 5:7] = 0
    where = (mask.cumsum(1) - 1).clamp(min=0)
    with autopack.enable(model), torch.no_grad():
        for which in (stock, model):
            first = which(ids[:, :5], attention_mask=mask[:, :5], position_ids=where[:, :5], use_cache=True)
            cache = {name: first[name] for name in ("past_key_values", "cache_params") if name in first}
            second = {"attention_mask": mask, "position_ids": where[:, 5:], "use_cache": True, **cache}
            if model_type in ("mamba2",):
                second["attention_mask"] = mask[:, 5:]
            found.append(which(ids[:, 5:], **second).logits)
    assert torch.equal(*found)


@pytest.mark.parametrize("model_type", ["mamba", "mamba2", "llama"])
def test_evaluation_without_labels_returns_the_cache_that_it_returned(model_type):
    stock = tiny.build(model_type).eval()
    model, prompts = copy.deepcopy(stock), _prompts(stock, "right")
    with autopack.enable(model):
        assert {*model(**prompts)} == {*stock(**prompts)}


class Judge(LogitsProcessor):
    """Asks an enabled model about packed rows at every token that another model generates."""

    def __init__(self, model):
        self.model = model
        self.found = []

    def __call__(self, input_ids, scores):
        ids = token_ids()
        self.found.append(self.model(input_ids=ids, position_ids=positions(LENGTHS)).logits)
        return scores


def test_packed_rows_of_another_model_inside_generation_are_packed_rows():
    writer, model = llama(seed=1), llama()
    judge = Judge(model)
    with autopack.enable(writer), autopack.enable(model):
        writer.generate(**_prompts(writer, "left"), max_new_tokens=2, logits_processor=LogitsProcessorList([judge]))
    expected = alone(llama(), token_ids(), LENGTHS)
    assert all(float((found - expected).abs().max()) < FLOAT64 for found in judge.found)
    assert len(judge.found) == 2


@pytest.mark.skipif(
    not hasattr(transformers, "ContinuousBatchingConfig"), reason="this release has no continuous batching"
)
def test_continuous_batching_and_packed_rows_after_it():
    """Its loop runs in a thread of its own, without `generate`, and asks for another attention meanwhile."""
    asked = GenerationConfig(max_new_tokens=4, do_sample=False, pad_token_id=0, eos_token_id=-1)
    # Without a limit its cache takes most of the machine's memory.
    cache = transformers.ContinuousBatchingConfig(
        use_cuda_graph=False, num_blocks=16, page_size=32, max_batch_tokens=64
    )
    prompts = [token_ids(1, length)[0].tolist() for length in (5, 9, 3)]
    stock = llama()
    model = copy.deepcopy(stock)

    def generated(which):
        found = which.generate_batch(prompts, asked, continuous_batching_config=cache)
        return {name: answer.generated_tokens for name, answer in found.items()}

    expected = generated(stock)
    with autopack.enable(model):
        assert generated(model) == expected
        found = model(input_ids=token_ids(), position_ids=positions(LENGTHS)).logits
    assert len(expected) == 3
    assert all(len(tokens) == 4 for tokens in expected.values())
    assert float((found - alone(llama(), token_ids(), LENGTHS)).detach().abs().max()) < FLOAT64
