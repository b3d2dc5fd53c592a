"""Trainers of TRL as they are: what rows of their batches begin with is computed once, and nothing
changes.

TRL's trainers have their defaults (gradient checkpointing is one of them), but for bf16, which
rounds away what is compared here, and a learning rate by which parameters move in a few steps.
Prompts have 32 to 48 tokens, completions 3 to 16."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import pytest

import autopack
from compat.programs._words import WORDS, save_model
from tests.integration.sentences import words
from tests.support.trained import QUIET

pytestmark = pytest.mark.usefixtures("nothing_left_behind")
NEAR = 1e-6
PROMPTS, STEPS = 32, 4
_NOT_COMPARED = ("runtime", "per_second", "step_time", "autopack/", "accuracies")
"""Times, our own, and the share of pairs whose chosen answer has the larger reward: both are 0 at
first, but for rounding."""


def pairs():
    draw = random.Random(0)
    return [
        {
            "prompt": f"{words(draw, WORDS, 32, 48)} ",
            "chosen": words(draw, WORDS, 3, 8),
            "rejected": words(draw, WORDS, 3, 8),
        }
        for _ in range(PROMPTS)
    ]


def prompts():
    return [{"prompt": pair["prompt"]} for pair in pairs()]


def answers():
    """One row for each answer, those to one prompt next to each other."""
    return [
        {"prompt": pair["prompt"], "completion": pair[name], "label": name == "chosen"}
        for pair in pairs()
        for name in ("chosen", "rejected")
    ]


def single_answers():
    """One answer to each prompt."""
    return [row for number, row in enumerate(answers()) if number % 4 in (0, 3)]


def even_words(completions, **_):
    """The reward of a text: how many of its words have an even number."""
    known = [[word for word in text.split() if word.startswith("w")] for text in completions]
    return [float(sum(int(word[1:]) % 2 == 0 for word in each)) for each in known]


class Case(NamedTuple):
    """A trainer, its rows, what is not a default of it, and the least and largest share of tokens
    that are shared, by model: of all its calls, so that one kind of call that shares nothing would
    show."""

    kind: str
    rows: Any
    shared: dict[str, tuple[float, float]]
    options: dict[str, Any] = {}  # noqa: RUF012
    lora: bool = False


_HALF = (0.35, 0.5)
"""Two rows of each prompt."""
_MOST = (0.55, 0.8)
"""Eight rows of each prompt."""
_SHORT = {"max_completion_length": 16}
CASES = {
    "GRPO, reference, two iterations": Case(
        "GRPO",
        prompts,
        {"model": _MOST, "ref_model": _MOST},
        {**_SHORT, "beta": 0.1, "num_iterations": 2},
    ),
    "RLOO": Case("RLOO", prompts, {"model": (0.3, 0.5), "ref_model": (0.3, 0.5)}, _SHORT),
    "DPO": Case("DPO", pairs, {"model": _HALF, "ref_model": _HALF}),
    # Its reference is the model without adapters: half of the calls of one model.
    "DPO, LoRA": Case("DPO", pairs, {"model": _HALF}, lora=True),
    # Rows come in their order, and those of the KL term are the same prompts with other answers.
    "KTO": Case("KTO", answers, {"model": _HALF, "ref_model": _HALF}),
    "KTO, one answer to a prompt": Case(
        "KTO", single_answers, {"model": (0, 0), "ref_model": (0, 0)}
    ),
    "reward": Case("Reward", pairs, {"model": _HALF}),
}


class Run(NamedTuple):
    """What a trainer logged, and the handles of its models."""

    logs: list[dict[str, Any]]
    models: dict[str, Any]

    @property
    def shared(self):
        """The share of each model's real tokens that were computed with those of another row."""
        volumes = {
            name: each.tally.training.plus(each.tally.evaluation)
            for name, each in self.models.items()
        }
        return {name: volume.shared / volume.tokens for name, volume in volumes.items()}


def made(folder, case):
    """The trainer of a script that knows nothing of autopack."""
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    model, head = folder / "model", {}
    if case.kind == "Reward":
        head = {"auto": "AutoModelForSequenceClassification", "num_labels": 1}
    if not model.exists():
        save_model(model, "llama", **head)
    more = {"reward_funcs": even_words} if case.rows is prompts else {}
    if case.lora:
        more["peft_config"] = pytest.importorskip("peft").LoraConfig(
            task_type="CAUSAL_LM", init_lora_weights=False
        )
    rows = datasets.Dataset.from_list(case.rows())
    if case.rows is not prompts:
        more["eval_dataset"] = rows.select(range(8))
    arguments = getattr(trl, f"{case.kind}Config")(
        output_dir=str(folder / "output"),
        max_steps=STEPS,
        logging_steps=1,
        learning_rate=1e-3,
        bf16=False,
        **QUIET,
        **case.options,
    )
    return getattr(trl, f"{case.kind}Trainer")(
        model=str(model), args=arguments, train_dataset=rows, **more
    )


def trained(folder, case, **options):
    """Train, and evaluate where that generates nothing: stock, or enabled where options are
    given."""
    trainer = made(folder, case)
    handle = autopack.enable(trainer, **options) if options else None
    trainer.train()
    if trainer.eval_dataset is not None:
        trainer.evaluate()
    autopack.disable(trainer)
    return Run(trainer.state.log_history, {} if handle is None else dict(handle.models))


def numbers(run):
    """Whatever is logged that is a number and no time, by the number of its entry and its name."""
    return {
        (number, name): value
        for number, entry in enumerate(run.logs)
        for name, value in entry.items()
        if isinstance(value, int | float) and not any(part in name for part in _NOT_COMPARED)
    }


def largest_difference(found, expected):
    """Of all logged numbers; relative, where they are larger than 1."""
    wanted, got = numbers(expected), numbers(found)
    assert got.keys() == wanted.keys()
    return max(
        abs(got[key] - value) / scale(expected, *key, value) for key, value in wanted.items()
    )


def scale(run, number, name, value):
    """What a number is compared relative to. KTO's KL is a difference of sums of log-probabilities,
    and rounds as they do."""
    before = name.removesuffix("kl")
    parts = [
        abs(run.logs[number].get(f"{before}logps/{answer}", 0.0))
        for answer in ("chosen", "rejected")
    ]
    return max(1.0, abs(value), *(parts if name in ("kl", "eval_kl") else ()))


@pytest.mark.parametrize("name", CASES)
def test_a_script_of_trl(tmp_path, name):
    case = CASES[name]
    expected, found = trained(tmp_path, case), trained(tmp_path, case, share=True)
    logged = [entry for entry in found.logs if "loss" in entry]
    assert len(logged) == STEPS
    assert largest_difference(found, expected) < NEAR
    assert found.shared.keys() == case.shared.keys()
    for model, (least, most) in case.shared.items():
        assert least <= found.shared[model] <= most, model
        assert not found.models[model].tally.left
        assert found.models[model].tally.padding > 0
    assert all(("autopack/shared" in entry) == (case.shared["model"][1] > 0) for entry in logged)
