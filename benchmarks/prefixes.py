"""Batches whose rows begin alike: stock, without padding alone, with what is common computed once,
and that by hand.

    python -m benchmarks.prefixes                                       about six minutes on two cores
    python -m benchmarks.prefixes --layers 1 --rounds 2                 a first look
    python -m benchmarks.prefixes --json benchmarks/results/prefixes.json

The workloads, each as its trainer or harness computes it:

* `group`: 8 completions of one prompt 5 times as long, a training step on their log-likelihoods
  (GRPO, RLOO); the logits of the completions alone are asked for, as TRL does.
* `pairs`: 4 pairs of answers below prompts as long as an answer, a training step of DPO's loss
  (without a reference).
* `choices`: 4 choices below each of 4 passages 20 times as long, scored without gradients.
* `nothing`: 16 documents that share nothing, a training step: what it costs to look.

The arms: `stock` (sdpa, a right-padded batch), `unpadded` (`enable(model, share=False)`), `enabled`
(the plain `enable(model)`), and for `group` `by hand`: a row that a user could write for this one
workload, with an attention function of its own. All arms have to give the same loss and gradients
before anything is timed. In the 1st, 2nd, 4th, 8th ... padded batch of a training whose loss is
made outside of the model, autopack runs the batch as it came, to see whether padding is read; those
up to the 8th come before the times, and the 16th after them."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from functools import partial
from typing import Any

from autopack.bench.race import Batch
from benchmarks import interleave, workload

GOALS = {
    "group": {"stock": 3.0, "unpadded": 2.5, "by hand": 0.95},
    "pairs": {"stock": 1.25},
    "choices": {"stock": 2.5},
    "nothing": {"unpadded": 0.99},
}
"""How many times as fast as these arms the enabled one is to be."""
_LOOKS = 8
WORKLOADS = ("group", "pairs", "choices", "nothing")
Step = Callable[[Any], Any]


def rows_of(name: str, options: argparse.Namespace) -> tuple[list[Any], list[int]]:
    """The rows of a workload, and for each the number of its last tokens that are scored."""
    import torch

    generator = torch.Generator().manual_seed(options.seed)

    def draw(count: int) -> Any:
        return torch.randint(1, options.vocabulary, (count,), generator=generator)

    def near(count: int) -> int:
        return count * 3 // 4 + int(torch.randint(count // 2 + 1, (1,), generator=generator))

    groups, prompt, count, rest = {
        "group": (1, 640, 8, 128),
        "pairs": (4, 256, 2, 256),
        "choices": (4, 400, 4, 20),
        "nothing": (16, 200, 1, 128),
    }[name]
    rows, scored = [], []
    for _ in range(groups):
        begun = draw(prompt)
        for _ in range(count):
            scored.append(near(rest))
            rows.append(torch.cat([begun, draw(scored[-1])]))
    return rows, scored


def likelihoods(logits: Any, rows: list[Any], scored: list[int], last: int) -> Any:
    """The log-likelihood of the scored tokens of each row, (rows,), by logits of the last columns
    of the batch."""
    import torch

    longest, found = max(map(len, rows)), []
    for row, count, each in zip(rows, scored, logits, strict=True):
        first = len(row) - count - 1 - (longest - last)
        found.append(
            torch.log_softmax(each[first : first + count], -1).gather(1, row[-count:, None]).sum()
        )
    return torch.stack(found)


def work_of(name: str, rows: list[Any], scored: list[int]) -> Step:
    """What a trainer or harness does with a model: its loss, with gradients where it trains, or the
    scores."""
    import torch

    batch, longest = {**Batch(rows).padded(), "use_cache": False}, max(map(len, rows))
    del batch["labels"]
    kept = longest - min(len(row) - count for row, count in zip(rows, scored, strict=True)) + 1
    advantages = torch.linspace(-1, 1, len(rows))

    def scores(model: Any) -> Any:
        more = {"logits_to_keep": kept} if name == "group" else {}
        logits = model(**batch, **more).logits
        return likelihoods(logits, rows, scored, kept if more else longest)

    def run(model: Any) -> Any:
        if name == "choices":
            with torch.no_grad():
                return scores(model).sum()
        found = scores(model)
        if name == "pairs":
            loss = -torch.nn.functional.logsigmoid(0.1 * (found[::2] - found[1::2])).mean()
        else:
            loss = -(found * advantages).mean() / 100
        loss.backward()
        return loss

    return run


def by_hand(rows: list[Any], scored: list[int]) -> Step:
    """The step of `group` as a user could write it: one row of the prompt and all completions."""
    import torch
    from torch.nn import functional as F

    prompt = len(rows[0]) - scored[0]
    row = torch.cat([rows[0][:prompt], *(each[prompt:] for each in rows)])[None]
    positions = torch.cat(
        [torch.arange(prompt), *(torch.arange(prompt, len(each)) for each in rows)]
    )[None]
    lengths, masks = [prompt, *scored], [None]
    masks += [torch.ones(n, prompt + n, dtype=torch.bool).tril(prompt) for n in scored]
    advantages = torch.linspace(-1, 1, len(rows))

    def attend(
        module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **_: Any
    ) -> Any:
        parts = zip(
            masks, *(states.split(lengths, 2) for states in (query, key, value)), strict=True
        )
        found, first = [], None
        for own, q, k, v in parts:
            if first is None:
                first = k, v
                found.append(F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling))
            else:
                k, v = torch.cat([first[0], k], 2), torch.cat([first[1], v], 2)
                found.append(F.scaled_dot_product_attention(q, k, v, attn_mask=own, scale=scaling))
        return torch.cat(found, 2).transpose(1, 2), None

    def run(model: Any) -> Any:
        from transformers import AttentionInterface

        AttentionInterface.register("prefix_by_hand", attend)
        model.config._attn_implementation = "prefix_by_hand"
        states = model.model(
            input_ids=row, position_ids=positions, use_cache=False
        ).last_hidden_state[0]
        last, *rests = states.split(lengths)
        ends = [torch.cat([last[-1:], rest[:-1]]) for rest in rests]
        logits = torch.log_softmax(model.lm_head(torch.cat(ends)), -1).split(scored)
        found = [
            each.gather(1, own[prompt:, None]).sum() for each, own in zip(logits, rows, strict=True)
        ]
        loss = -(torch.stack(found) * advantages).mean() / 100
        loss.backward()
        return loss

    return run


def race_of(options: argparse.Namespace, *, name: str) -> interleave.Race:
    """Return the race of a workload."""
    import autopack

    rows, scored = rows_of(name, options)
    models = {"stock": workload.of_options(options, workload.LONGEST)}
    works = dict.fromkeys(("stock", "unpadded", "enabled"), work_of(name, rows, scored))
    if name == "group":
        works["by hand"] = by_hand(rows, scored)
    models |= {each: copy.deepcopy(models["stock"]) for each in works if each != "stock"}
    autopack.enable(models["unpadded"], share=False)
    autopack.enable(models["enabled"])

    def arm(model: Any, work: Step) -> Any:
        model.zero_grad()
        return work(model).detach(), [each.grad for each in model.parameters()]

    arms = {each: partial(arm, models[each], work) for each, work in works.items()}
    facts = {"padded tokens": len(rows) * max(map(len, rows)), "real tokens": sum(map(len, rows))}
    kept = {each: (model, None) for each, model in models.items()}
    return interleave.Race(
        arms, "enabled", GOALS.get(name, {}), warm=_LOOKS, models=kept, facts=facts
    )


if __name__ == "__main__":
    races = {name: partial(race_of, name=name) for name in WORKLOADS}
    interleave.main("prefixes", __doc__, races, 7, **workload.LLAMA)
