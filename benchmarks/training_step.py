"""One training step on a packed row or on a padded batch: stock, hand-written per-document
attention, autopack.

    python -m benchmarks.training_step                                  T = 8192, fifteen minutes on two cores
    python -m benchmarks.training_step --tokens 2048 --rounds 3         a first look
    python -m benchmarks.training_step --only "padded batch" --json benchmarks/results/unpadding.json

The arms, on copies of the same Llama, with the same documents, labels and optimizer. Of a packed
row:

* `stock`: sdpa, restarting `position_ids`, no mask: the one call that transformers 5.23 gets right
  on this model, by a dense mask over the whole row.
* `by hand`: an attention function of this file that loops over the documents. What autopack is held
  against.
* `autopack`: `autopack.enable(model)` and a plain call.

Of a padded batch: `stock`, `autopack`, and `packed row`, the row that `PackingCollator` makes of
the documents, on the enabled model, for comparison."""

from __future__ import annotations

import argparse
import copy
from functools import partial
from typing import Any

from autopack.bench.race import Batch
from autopack.bench.subjects import draw
from benchmarks import interleave, workload

BY_HAND = "by_hand"


def by_hand(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    mask: Any,
    *,
    documents: list[int],
    scaling: float,
    **_: Any,
) -> Any:
    """Attend per document as one would write it for this model alone."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    parts = zip(*(states.split(documents, dim=2) for states in (query, key, value)), strict=True)
    outputs = [
        scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling) for q, k, v in parts
    ]
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


def race_of(options: argparse.Namespace, *, padded: bool) -> interleave.Race:
    """Return the race on a packed row, or on a padded batch."""
    import torch
    from transformers import AttentionInterface, AttentionMaskInterface

    import autopack

    longest = workload.LONGEST
    if padded:
        drawn = draw(
            workload.FLAN_LIKE, options.documents, longest, options.seed, shortest=workload.SHORTEST
        )
        documents = drawn.tolist()
    else:
        documents = workload.filling(options.tokens, workload.FLAN_LIKE, options.seed)
    stock = workload.of_options(options, max(longest, options.tokens))
    stock.config.use_cache = False
    batch = Batch.of(documents, torch.arange(1, options.vocabulary), options.seed, "cpu")
    row, enabled = dict(batch.row(autopack.PackingCollator())), copy.deepcopy(stock)
    autopack.enable(enabled)
    columns, real = len(documents) * max(documents), sum(documents)
    if padded:
        calls = {
            "stock": (stock, batch.padded()),
            "autopack": (enabled, batch.padded()),
            "packed row": (enabled, row),
        }
        goals = {"stock": round(0.9 * columns / real, 2)}
    else:
        hand = copy.deepcopy(stock)
        AttentionInterface.register(BY_HAND, partial(by_hand, documents=documents))
        AttentionMaskInterface.register(BY_HAND, lambda *_, **__: None)
        hand.set_attn_implementation(BY_HAND)
        calls = {"stock": (stock, row), "by hand": (hand, row), "autopack": (enabled, row)}
        goals = {"stock": 3.0, "by hand": 0.97}
    models = {
        name: (model, torch.optim.AdamW(model.parameters(), lr=1e-9))
        for name, (model, _) in calls.items()
    }
    steps = {name: workload.step(*call, models[name][1]) for name, call in calls.items()}
    facts = {
        "documents": len(documents),
        "real tokens": real,
        **({"padded tokens": columns} if padded else {}),
    }
    return interleave.Race(steps, "autopack", goals, models=models, facts=facts)


if __name__ == "__main__":
    races = {
        "packed row": partial(race_of, padded=False),
        "padded batch": partial(race_of, padded=True),
    }
    interleave.main("training_step", __doc__, races, 8, tokens=8192, documents=16, **workload.LLAMA)
