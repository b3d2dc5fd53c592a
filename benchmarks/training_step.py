"""One training step on a packed row or on a padded batch: stock, hand-written per-document attention, autopack.

    python -m benchmarks.training_step                                  T = 8192, ten minutes on two cores
    python -m benchmarks.training_step --padded 16                      a padded batch of 16 documents, five minutes
    python -m benchmarks.training_step --tokens 2048 --rounds 3         a first look
    python -m benchmarks.training_step --tokens 2048 --mean 32          many short documents
    python -m benchmarks.training_step --json benchmarks/results/training_step.json

The arms, on the same Llama, with the same documents, labels and optimizer. Of a packed row:

* `stock`: sdpa, restarting `position_ids`, no mask: the one call that transformers 5.23 gets right on this model, by a
  dense mask over the whole row.
* `by hand`: an attention function of this file that loops over the documents. What autopack is held against.
* `autopack`: `autopack.enable(model)` and a plain call.

Of a padded batch: `stock`, `autopack`, and `packed row`, the row that `PackingCollator` makes of the documents, on the
enabled model, for comparison. Before anything is timed, all arms must give the same loss and the same gradients. The
race, peak memory and what is said of ratios are those of `autopack bench`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from autopack.bench.contest import PADDED, ROW, Arm, Batch, Contest, calls_of
from autopack.bench.race import mebibytes
from autopack.bench.subjects import Lengths, draw
from benchmarks import interleave, workload

BY_HAND = "by_hand"
OF_ROW = (Arm("stock", ROW, False), Arm("by hand", ROW, False, BY_HAND), Arm("autopack", ROW, True))
OF_BATCH = (Arm("stock", PADDED, False), Arm("autopack", PADDED, True), Arm("packed row", ROW, True))


def by_hand(
    module: Any, query: Any, key: Any, value: Any, mask: Any, *, documents: list[int], scaling: float, **_: Any
) -> Any:
    """Attend per document as one would write it for this model alone."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    parts = zip(*(states.split(documents, dim=2) for states in (query, key, value)), strict=True)
    outputs = [scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling) for q, k, v in parts]
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


def calls(arm: Arm, model: Any, batches: Sequence[Batch]) -> list[dict[str, Any]]:
    """Return the calls of an arm; attention by hand is told of the documents."""
    told = [{"documents": batch.lengths} if arm.implementation else {} for batch in batches]
    return [{**call, **more} for call, more in zip(calls_of(arm, model, batches), told, strict=True)]


@contextmanager
def in_state(model: Any, arm: Arm) -> Iterator[None]:
    """Put a model into the state of an arm."""
    import autopack

    model.set_attn_implementation(arm.implementation or "sdpa")
    if not arm.enabled:
        yield
        return
    with autopack.enable(model, verify=False):
        yield


def gradients(contest: Contest, arm: Arm) -> tuple[Any, list[Any]]:
    """Return the loss of an arm's first call, and the parameters with its gradients."""
    contest.model.zero_grad()
    with contest.state(arm):
        loss = contest.model(**contest.calls[arm.name][0]).loss
        loss.backward()
    return loss.detach(), list(contest.model.parameters())


def main() -> None:
    import torch
    from transformers import AttentionInterface, AttentionMaskInterface

    parser = workload.parser(__doc__, rounds=8)
    parser.add_argument("--tokens", type=int, default=8192, help="of the row")
    parser.add_argument("--padded", type=int, metavar="DOCUMENTS", help="a padded batch of so many, and no packed row")
    parser.add_argument("--mean", type=float, default=workload.FLAN_LIKE.mean, help="tokens of a document")
    options = parser.parse_args()
    where = interleave.begin(options)
    AttentionInterface.register(BY_HAND, by_hand)
    AttentionMaskInterface.register(BY_HAND, lambda *_, **__: None)
    lengths, longest = Lengths(options.mean, workload.FLAN_LIKE.sigma), workload.LONGEST
    documents = workload.filling(options.tokens, lengths, options.seed)
    if options.padded:
        documents = draw(lengths, options.padded, longest, options.seed, shortest=workload.SHORTEST).tolist()
    model = workload.of_options(options, max(longest, options.tokens))
    model.config.use_cache = False
    arms = OF_BATCH if options.padded else OF_ROW
    batch = Batch.of(documents, torch.arange(1, options.vocabulary), options.seed, "cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-9)
    contest = Contest(model, arms, [batch], partial(in_state, model), optimizer, calls=calls)
    losses, error = workload.check({arm.name: partial(gradients, contest, arm) for arm in arms})
    for outcome in contest.outcomes:
        with contest.state(outcome.arm):
            contest.measure_peak(outcome)
    contest.race(options.rounds, report=lambda number, _: print(f"round {number} of {options.rounds}", flush=True))
    found: dict[str, Any] = {"documents": documents, "losses": losses, "largest gradient error": error}
    found["arms"] = {outcome.arm.name: outcome.as_dict(contest.outcomes[0]) for outcome in contest.outcomes}
    padded = len(documents) * max(documents)
    lines = [
        f"One training step, Llama, {options.layers} layers x {options.hidden}, {options.heads} heads, "
        f"vocabulary {options.vocabulary}, fp32, AdamW",
        f"{sum(documents)} tokens in {len(documents)} documents of {min(documents)} to {max(documents)}"
        + (f"; padded {padded} tokens, {padded / sum(documents):.2f} for a real one" if options.padded else ""),
        f"{options.rounds} interleaved rounds; losses agree within {workload.LOSS_TOLERANCE:.0e}, gradients within "
        f"{error:.0e}",
        "",
        f"{'arm':<12}{'real tokens/s':>24}{'speed of stock':>20}{'peak MiB':>11}",
    ]
    for outcome in contest.outcomes:
        ratio = outcome.over(contest.outcomes[0])
        said = f"{outcome.speed!s:>24}{ratio!s:>20}{mebibytes(outcome.peak_bytes):>11}"
        lines.append(f"{outcome.arm.name:<12}{outcome.failed or said}")
    goal = "stock at 8192 tokens at least 3.0, and at least 0.97 of by hand"
    if options.padded:
        goal = "stock at least 0.9 of padded tokens for a real one"
    lines += ["", f"Goals: speed of {goal}; in no more memory."]
    interleave.write(options.json, interleave.result_of("training_step", options, where, **found), lines)


if __name__ == "__main__":
    main()
