"""Generation gives the same tokens whether a model is enabled or not, whatever its cache and its
padding."""

import copy

import pytest
import torch
import transformers
from transformers import GenerationConfig

import autopack
from autopack import tiny
from autopack.calls import choose
from tests.conftest import FLOAT64, LENGTHS, alone, error, llama, positions, token_ids
from tests.subjects import build
from tests.support.refusals import refused

DECODERS = ["llama", "gpt2", "opt", "mamba", "bloom", "gemma3_text", "bamba", "qwen3_moe", "falcon"]
PAIRS = ["t5", "bart", "fsmt", "led", "longt5", "pegasus_x", "prophetnet", "t5gemma2"]
TASKS = dict.fromkeys(DECODERS, "causal-lm") | dict.fromkeys(PAIRS, "seq2seq")
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
PADDING = {"right": [(0, 5, 8), (1, 7, 8)], "left": [(0, 0, 3), (1, 0, 1)], "none": []}


def _prompts(model, side):
    mask = torch.ones(3, 8, dtype=torch.long)
    for row, first, end in PADDING[side]:
        mask[row, first:end] = 0
    return {
        "input_ids": tiny.tokens(model.config, 3, 8).masked_fill(mask == 0, 0),
        "attention_mask": mask,
    }


def _generated(model, prompts, **options):
    """The tokens, or the error in words: some types have no such cache."""
    if "prompt_lookup_num_tokens" in options:
        prompts = {name: value[2:] for name, value in prompts.items()}
    torch.manual_seed(0)
    try:
        options = {"do_sample": False, **options}
        return model.generate(
            **prompts, max_new_tokens=4, pad_token_id=0, eos_token_id=None, **options
        ).tolist()
    except (ValueError, RuntimeError, AttributeError, TypeError, AssertionError) as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("unpad", [True, False])
@pytest.mark.parametrize("model_type", TASKS)
def test_the_same_tokens(model_type, unpad):
    stock = build(model_type, TASKS[model_type], dtype=torch.float32)
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
        assert _generated(model, prompts, use_cache=False) != _generated(
            stock, prompts, use_cache=False
        )


@pytest.mark.parametrize("model_type", ["llama", "bamba", "qwen3_next", "gpt2", "lfm2"])
@pytest.mark.parametrize("first", [0, 5], ids=["before the first turn", "before the second"])
def test_a_second_turn_with_padding(model_type, first):
    """Positions stand still at the padding, at what the first token of the row has; they declare
    nothing there."""
    stock = tiny.build(model_type).eval()
    model, found = copy.deepcopy(stock), []
    ids, mask = tiny.tokens(stock.config, 2, 9), torch.ones(2, 9, dtype=torch.long)
    mask[1, first : first + 2] = 0
    where = (mask.cumsum(1) - 1).clamp(min=0)
    with autopack.enable(model), torch.no_grad():
        for which in (stock, model):
            turn = which(
                ids[:, :5], attention_mask=mask[:, :5], position_ids=where[:, :5], use_cache=True
            )
            following = {"attention_mask": mask, "position_ids": where[:, 5:], "use_cache": True}
            cache = turn.past_key_values
            found.append(which(ids[:, 5:], past_key_values=cache, **following).logits)
    assert torch.equal(*found)


@pytest.mark.skipif(
    not hasattr(transformers, "ContinuousBatchingConfig"),
    reason="this release has no continuous batching",
)
def test_continuous_batching_and_packed_rows_after_it():
    """Its loop runs in a thread of its own, without `generate`, and asks for another attention
    meanwhile."""
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
    assert [len(tokens) for tokens in expected.values()] == [4, 4, 4]
    assert error(found, alone(llama(), token_ids(), LENGTHS)) < FLOAT64
