"""Unmodified trainers and harnesses whose rows begin alike: the same losses and rewards, with shared tokens counted.

Models are in float64, so that losses agree to more digits than are asked for.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import autopack
from tests.integration.test_real_text import arguments, build, texts, tokenizer  # noqa: F401  fixtures

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
transformers = pytest.importorskip("transformers")
DIGITS = 1e-6
STEPS = 4


@pytest.fixture(scope="module")
def pairs(texts):  # noqa: F811
    """Prompts of some fifty tokens and two answers of uneven length to each."""
    rows = zip(texts[:32], texts[40:72], texts[80:112], strict=True)
    found = [{"prompt": one + other, "chosen": other[:50], "rejected": third[:30]} for one, other, third in rows]
    return datasets.Dataset.from_list(found)


def _model(tokenizer: Any, head: str = "AutoModelForCausalLM", **config: Any) -> Any:  # noqa: F811
    return build(tokenizer, head, **config).double()


def _logged(trainer: Any) -> list[dict[str, float]]:
    """What a trainer logs of each step that is not a time or autopack's."""
    trainer.train()
    wanted = ("loss", "reward", "kl", "logps", "logits", "grad_norm", "objective")
    return [
        {name: value for name, value in entry.items() if any(word in name for word in wanted)}
        for entry in trainer.state.log_history
        if "loss" in entry
    ]


def _compare(make: Any, share: str = "auto") -> Any:
    """Train stock and enabled; all that is logged agrees. Returns the handle."""
    stock, enabled = make(), make()
    wanted = _logged(stock)
    enabled = make()
    handle = autopack.enable(enabled, share=share)
    found = _logged(enabled)
    assert len(found) == len(wanted) == STEPS
    for one, other in zip(found, wanted, strict=True):
        assert one == pytest.approx(other, rel=DIGITS, abs=1e-7)
    return handle


def _shared(handle: Any, name: str = "model") -> int:
    tally = handle.handles[name].tally
    return tally.training.shared + tally.evaluation.shared


def _settings(directory: Any, **more: Any) -> dict[str, Any]:
    return arguments(directory, max_steps=STEPS, bf16=False, **more)


@pytest.mark.parametrize("share", ["auto", pytest.param("never", marks=pytest.mark.exhaustive)])
def test_grpo(pairs, tokenizer, tmp_path, share):  # noqa: F811
    """The passes over completions of one prompt."""

    def make():
        transformers.set_seed(0)
        config = trl.GRPOConfig(**_settings(tmp_path), num_generations=4, max_completion_length=12, temperature=1.0)
        trainer = trl.GRPOTrainer(
            model=_model(tokenizer),
            reward_funcs=lambda completions, **_: [float(len(text)) for text in completions],
            args=config,
            train_dataset=pairs.remove_columns(["chosen", "rejected"]),
            processing_class=tokenizer,
        )
        transformers.set_seed(0)  # completions are drawn alike
        return trainer

    handle = _compare(make, share)
    assert (_shared(handle) > 100) == (share == "auto")


@pytest.mark.parametrize("share", ["auto", pytest.param("never", marks=pytest.mark.exhaustive)])
def test_dpo(pairs, tokenizer, tmp_path, share):  # noqa: F811
    def make():
        return trl.DPOTrainer(
            model=_model(tokenizer),
            ref_model=_model(tokenizer),
            args=trl.DPOConfig(**_settings(tmp_path)),
            train_dataset=pairs,
            processing_class=tokenizer,
        )

    handle = _compare(make, share)
    for name in ("model", "ref_model"):
        assert (_shared(handle, name) > 100) == (share == "auto")


@pytest.mark.exhaustive
def test_rloo(pairs, tokenizer, tmp_path):  # noqa: F811
    def make():
        transformers.set_seed(0)
        trainer = trl.RLOOTrainer(
            model=_model(tokenizer),
            reward_funcs=lambda completions, **_: [float(len(text)) for text in completions],
            args=trl.RLOOConfig(**_settings(tmp_path), num_generations=4, max_completion_length=12, beta=0.0),
            train_dataset=pairs.remove_columns(["chosen", "rejected"]),
            processing_class=tokenizer,
        )
        transformers.set_seed(0)
        return trainer

    assert _shared(_compare(make)) > 100


@pytest.mark.exhaustive
def test_reward(pairs, tokenizer, tmp_path):  # noqa: F811
    data = pairs.map(lambda e: {"chosen": e["prompt"] + e["chosen"], "rejected": e["prompt"] + e["rejected"]})

    def make():
        return trl.RewardTrainer(
            model=_model(tokenizer, "AutoModelForSequenceClassification", num_labels=1),
            args=trl.RewardConfig(**_settings(tmp_path)),
            train_dataset=data.remove_columns("prompt"),
            processing_class=tokenizer,
        )

    assert _shared(_compare(make)) > 100


def test_choices_of_lm_eval(tokenizer, texts):  # noqa: F811
    """Likelihoods of the choices below a passage are those of stock."""
    harness = pytest.importorskip("lm_eval.models.huggingface")
    from lm_eval.api.instance import Instance

    requests = [
        Instance("loglikelihood", {}, (text, f" {choice}"), number, ("task", 0, 1))
        for text in texts[:6]
        for number, choice in enumerate(["a dog", "a cat and a mouse", "no", "all of these"])
    ]
    model = _model(tokenizer).eval()
    scored = harness.HFLM(pretrained=model, tokenizer=tokenizer, batch_size=8, backend="causal", max_length=512)
    wanted = scored.loglikelihood(requests, disable_tqdm=True)
    handle = autopack.enable(scored)
    found = scored.loglikelihood(requests, disable_tqdm=True)
    autopack.disable(scored)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in wanted]
    assert [score for score, _ in found] == pytest.approx([score for score, _ in wanted], rel=DIGITS)
    assert handle.tally.evaluation.shared > 100
    assert torch.is_grad_enabled()
