"""Forward passes and training steps of all arms, interleaved on one model, at one size."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from autopack.bench import subjects
from autopack.bench.race import Arm, Batch, Contest, Outcome
from benchmarks import workload
from benchmarks.gpu.arms import ARMS, FLASH, GROUPED, REGROUPED, backend_of, by_document, calls, on
from benchmarks.gpu.job import Job, LeftOut

DTYPE = torch.bfloat16
FACTOR = 2
"""Another kernel or another shape of matrices rounds otherwise, and so differs from float32 by
another amount."""
FLOOR = 2**-7
"""One rounding of a bfloat16 of order 1: where alone happens to be lucky, packed need not be."""
WITHOUT_REFERENCE = 0.1
"""How far an arm may be from documents alone in bfloat16 where there is no float32: rounding adds
up over the layers. The control, documents that see each other, is measured beside it."""


@dataclass(frozen=True)
class Size:
    """A model of a size of `autopack bench`, and its batches; with a `prompt` of so many tokens
    before all documents of a batch.

    Its weights are in bfloat16, or with `autocast` in float32 and its calls under autocast to
    bfloat16. One that is `lean` has layers that are recomputed, an optimizer that keeps nothing,
    and no copy in float32 to be held against."""

    llama: str
    documents: int
    batches: int = 4
    rounds: int = 10
    lean: bool = False
    autocast: bool = False
    model_type: str = "llama"
    task: str = "causal-lm"
    prompt: int = 0

    @property
    def arms(self) -> tuple[Arm, ...]:
        """What is compared: of other types, and behind prompts, what needs no attention function by
        name."""
        if self.model_type != "llama" or self.prompt:
            return tuple(
                arm
                for arm in ARMS
                if arm.implementation is None and arm.name != "stock packed sdpa"
            )
        return ARMS

    @property
    def dtype(self) -> torch.dtype:
        """That of the weights."""
        return torch.float32 if self.autocast else DTYPE

    @property
    def optimizer(self) -> str:
        """The optimizer of training steps."""
        return "SGD, one tensor at a time" if self.lean else "AdamW, fused"


SIZES = {
    f"{name}{way}": replace(size, autocast=bool(way))
    for name, size in {
        "0.1B": Size("130M", documents=16),
        "1B": Size("1B", documents=8, rounds=6),
        "7B": Size("7B", documents=8, rounds=5, lean=True),
    }.items()
    for way in ("", ", autocast")
}
SIZES |= {
    "groups of 8, 1B": Size("1B", documents=8, rounds=6, prompt=1024),
    "modernbert": Size("130M", documents=32, model_type="modernbert", task="masked-lm"),
    "mamba2": Size("370M", documents=8, model_type="mamba2"),
    "qwen3_next": Size("130M", documents=8, model_type="qwen3_next", lean=True),
}
SMALL = {
    "groups of 8, 1B": Size("small", documents=8, batches=2, rounds=1, prompt=70),
    "modernbert": Size(
        "small", documents=3, batches=2, rounds=1, model_type="modernbert", task="masked-lm"
    ),
    "mamba2": Size("small", documents=3, batches=2, rounds=1, model_type="mamba2"),
    "0.1B": Size("small", documents=3, batches=2, rounds=2),
    "0.1B, autocast": Size("small", documents=3, batches=2, rounds=1, autocast=True),
    "7B": Size("small", documents=2, batches=2, rounds=1, lean=True),
}
SMALL_LONGEST = 40
NO_MEMORY = "out of memory"


def measure_size(job: Job, name: str) -> None:
    """Check that the arms of a size compute the same, then time them: forward, and training
    steps."""
    size = (SMALL if job.small else SIZES).get(name)
    if size is None:
        raise LeftOut("not among the tiny sizes")
    free = job.machine.free()
    count = sum(parameter.numel() for parameter in build(size, "meta", job.seed).parameters())
    dtype = "float32 under autocast to bfloat16" if size.autocast else "bfloat16"
    job.record(size=asdict(size), parameters=count, dtype=dtype, **{"free, GiB": free})
    each = size.dtype.itemsize
    states = 0 if size.lean else 2 * each  # of the optimizer, two for a weight
    needed = {
        "forward": count * each / 2**30 * 1.1 + 4,
        "step": count * (2 * each + states) / 2**30 * 1.1 + 8,
    }
    if free is not None and free < needed["forward"]:
        raise LeftOut(f"needs {needed['forward']:.0f} GiB of memory, and {free:.0f} are free")
    model = build(size, job.machine.device, job.seed)
    lengths = draw(size, job)
    batches = [
        batch_of(size, each, job.seed + i, job.machine.device) for i, each in enumerate(lengths)
    ]
    lengths = [batch.lengths for batch in batches]
    padded = sum(len(batch) * max(batch) for batch in lengths)
    job.record(lengths=lengths, **{"real tokens": sum(map(sum, lengths)), "padded tokens": padded})
    lowering = torch.autocast(model.device.type, dtype=DTYPE, enabled=size.autocast)
    with job.machine.flash() as kernels, lowering:
        job.record(flash=kernels, checked=check(job, size, model, batches[0]))
        for kind in ("forward", "step"):
            if free is not None and free < needed[kind]:
                job.record(
                    **{
                        kind: {
                            "left out": (
                                f"needs {needed[kind]:.0f} GiB of memory, and {free:.0f} are free"
                            )
                        }
                    }
                )
                continue
            # what forward leaves of the time is for the steps, which take three times as long
            until = time.monotonic() + job.left() * (0.3 if kind == "forward" else 1)
            race(job, size, model, batches, kind, until)


def build(size: Size, device: str, seed: int) -> Any:
    """Return a random model, made where it is to be and in its own precision: nothing of it is ever
    held twice."""
    attention = "sdpa" if size.model_type == "llama" else None  # which some types do not have
    form: dict[str, Any] = {"attn": attention, "dtype": size.dtype, "device": device, "seed": seed}
    model = subjects.build(
        size.model_type, size.llama, size.task, workload.LONGEST + size.prompt, **form
    )
    model.config.use_cache = False
    return model


def tokens_of(size: Size) -> torch.Tensor:
    """Return the tokens that documents are drawn of."""
    return torch.arange(1, subjects.SIZES[size.llama]["vocab_size"])


def batch_of(size: Size, lengths: Sequence[int], seed: int, device: str) -> Batch:
    """Return documents of these lengths behind the prompt of all, if the size has one."""
    prompt, *documents = Batch.of([size.prompt, *lengths], tokens_of(size), seed, device).documents
    return Batch([torch.cat([prompt, each]) for each in documents])


def draw(size: Size, job: Job) -> list[list[int]]:
    """Return the lengths of the documents of every batch, as FLAN's."""
    longest, scale = (
        (SMALL_LONGEST, workload.LONGEST // SMALL_LONGEST) if job.small else (workload.LONGEST, 1)
    )
    count, shortest = size.documents * size.batches, 3 if job.small else workload.SHORTEST
    drawn = subjects.draw(workload.FLAN_LIKE, count, longest, job.seed, scale, shortest).tolist()
    return [drawn[first : first + size.documents] for first in range(0, count, size.documents)]


@torch.no_grad()
def check(job: Job, size: Size, model: Any, batch: Batch) -> dict[str, Any]:
    """Return how far each arm is off for the documents of a batch, and by what it is judged."""
    model.eval()
    with on(model, ARMS[0]):  # by SDPA, as documents alone attend
        alone = [model(input_ids=ids[None]).logits[0] for ids in batch.documents]
    found: dict[str, Any] = {"measure": "relative error of the logits of the worst document"}
    wanted, bound = alone, WITHOUT_REFERENCE
    if not size.lean:
        exact = copy.deepcopy(model).float()
        with torch.autocast(model.device.type, enabled=False):
            wanted = [exact(input_ids=ids[None]).logits[0] for ids in batch.documents]
        del exact
        job.machine.forget()
        found["alone in bfloat16, against float32"] = worst(alone, wanted)
        bound = max(FACTOR * found["alone in bfloat16, against float32"], FLOOR)
    found["bound"], found["arms"] = bound, {}
    ids = torch.cat(list(batch.documents))[None]
    leaking = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    found["control: documents that see each other"] = worst(
        by_document(batch, ARMS[2], leaking), wanted
    )
    del leaking
    contest = Contest(
        model,
        [arm for arm in size.arms if arm.form not in (GROUPED, REGROUPED)],
        [batch],
        partial(on, model, proven=size.prompt > 0),
        calls=calls,
    )
    for outcome in contest.outcomes:
        error = contest.attempt(outcome, partial(_off, contest, outcome.arm, batch, wanted))
        found["arms"][outcome.arm.name] = outcome.failed if error is None else error
        _note(job, outcome)
        if error is not None and not error <= bound:
            job.problem(f"{outcome.arm.name} is off by {error:.1e}, allowed {bound:.1e}")
    return found


def worst(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    """Return the relative error of the worst document."""
    pairs = [(one.double(), other.double()) for one, other in zip(found, wanted, strict=True)]
    return max(float((one - other).norm() / other.norm()) for one, other in pairs)


def _off(contest: Contest, arm: Arm, batch: Batch, wanted: list[torch.Tensor]) -> float:
    with contest.state(arm):
        return worst(
            by_document(batch, arm, contest.model(**contest.calls[arm.name][0]).logits), wanted
        )


def _note(job: Job, outcome: Outcome) -> None:
    """Note an arm that failed for another reason than memory."""
    if outcome.failed not in (None, NO_MEMORY):
        job.problem(f"{outcome.arm.name} cannot be run: {outcome.failed}")


def race(
    job: Job, size: Size, model: Any, batches: Sequence[Batch], kind: str, until: float
) -> None:
    """Run all arms in rounds until the time is over; an arm that fails or has no memory is recorded
    as such."""
    optimizer, more = None, {}
    if kind == "step":
        optimizer = make_optimizer(size, model)
        more = {"optimizer": size.optimizer, "checkpointing": size.lean}
        if size.lean:
            model.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )
    model.train(kind == "step")
    contest = Contest(
        model,
        size.arms,
        batches,
        partial(on, model, proven=size.prompt > 0),
        optimizer,
        calls=calls,
    )
    flash = next(
        (outcome for outcome in contest.outcomes if outcome.arm == FLASH), contest.outcomes[0]
    )

    def warm_up(outcome: Outcome) -> None:
        with contest.state(outcome.arm) as handle:
            for _ in range(0 if size.lean else 1):
                contest.run(outcome.arm)
            contest.measure_peak(outcome)
            if handle is not None:
                outcome.note = f"{backend_of(outcome.arm)}; {handle.tally}"

    def report(number: int, laps: Any = None) -> None:
        arms = {
            outcome.arm.name: outcome.as_dict(contest.outcomes[0]) for outcome in contest.outcomes
        }
        for outcome in contest.outcomes:
            ratio = outcome.over(flash)
            arms[outcome.arm.name]["speed of stock packed flash"] = (
                None if ratio is None else asdict(ratio)
            )
        job.record(**{kind: {"rounds": number, "arms": arms, **more}})

    for outcome in contest.outcomes:
        contest.attempt(outcome, partial(warm_up, outcome))
        _note(job, outcome)
        report(0)
    contest.race(size.rounds, until=until, report=report)
    for outcome in contest.outcomes:
        if outcome.seconds:  # those that failed before are noted
            _note(job, outcome)


def make_optimizer(size: Size, model: Any) -> torch.optim.Optimizer:
    """Return the optimizer that a size names, of a rate that hardly moves a bfloat16 weight: all
    arms find the same."""
    if size.lean:
        return torch.optim.SGD(model.parameters(), lr=1e-9, foreach=False)
    return torch.optim.AdamW(model.parameters(), lr=1e-9, weight_decay=0.0, fused=True)
