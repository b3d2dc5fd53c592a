"""Forward passes and training steps of all arms, interleaved on one model, at one size."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import torch

from autopack.bench.batches import Batch, grouped
from autopack.bench.race import Entrant, Lap
from autopack.bench.race import race as timed_race
from benchmarks import workload
from benchmarks.gpu.arms import ARMS, FLEX, GROUPED, Arm, backend_of, by_document, call_of, on
from benchmarks.gpu.exactness import FACTOR, FLOOR, worst
from benchmarks.gpu.job import Job, LeftOut

DTYPE = torch.bfloat16
WITHOUT_REFERENCE = 0.1
"""How far an arm may be from documents alone in bfloat16 where there is no float32: rounding adds up over the layers.
The control, documents that see each other, is measured beside it."""


@dataclass(frozen=True)
class Size:
    """A Llama and its batches; `state` is what the optimizer keeps, in bytes per parameter.

    Its weights are in bfloat16, or with `autocast` in float32 and its calls under autocast to bfloat16.
    """

    layers: int
    hidden: int
    inner: int
    heads: int
    key_heads: int
    vocabulary: int
    documents: int
    batches: int
    optimizer: str = "AdamW, fused"
    state: int = 4
    checkpointing: bool = False
    reference: bool = True
    warm_up: int = 2
    rounds: int = 10
    autocast: bool = False
    flex: bool = False

    @property
    def arms(self) -> tuple[Arm, ...]:
        """What is compared at this size."""
        return (*ARMS, *FLEX) if self.flex else ARMS

    @property
    def dtype(self) -> torch.dtype:
        """That of the weights."""
        return torch.float32 if self.autocast else DTYPE


SIZES = {
    "0.1B": Size(12, 768, 2048, 12, 4, 32000, documents=16, batches=4, flex=True),
    "0.1B, autocast": Size(12, 768, 2048, 12, 4, 32000, documents=16, batches=4, state=8, autocast=True, flex=True),
    "1B": Size(16, 2048, 8192, 32, 8, 32000, documents=8, batches=4, rounds=6),
    "1B, autocast": Size(16, 2048, 8192, 32, 8, 32000, documents=8, batches=4, state=8, rounds=4, autocast=True),
    "7B": Size(
        32, 4096, 11008, 32, 32, 32000, documents=8, batches=4, optimizer="SGD, one tensor at a time", state=0,
        checkpointing=True, reference=False, warm_up=1, rounds=5,
    ),
    "7B, autocast": Size(
        32, 4096, 11008, 32, 32, 32000, documents=8, batches=4, optimizer="SGD, one tensor at a time", state=0,
        checkpointing=True, reference=False, warm_up=1, rounds=3, autocast=True,
    ),
}  # fmt: skip
SMALL = {
    "0.1B": Size(2, 64, 128, 4, 2, 128, documents=3, batches=2, warm_up=1, rounds=2, flex=True),
    "0.1B, autocast": Size(2, 64, 128, 4, 2, 128, documents=3, batches=2, warm_up=1, rounds=1, autocast=True),
    "7B": Size(
        2, 64, 128, 4, 4, 128, documents=2, batches=2, optimizer="SGD, one tensor at a time", state=0,
        checkpointing=True, reference=False, warm_up=1, rounds=1,
    ),
}  # fmt: skip
SMALL_LONGEST = 40
_Found = TypeVar("_Found")
OUT_OF_MEMORY = torch.cuda.OutOfMemoryError


def measure_size(job: Job, name: str) -> None:
    """Check that the arms of a size compute the same, then time them: forward, and training steps."""
    size = (SMALL if job.small else SIZES).get(name)
    if size is None:
        raise LeftOut("not among the tiny sizes")
    free = job.machine.free()
    count = parameters(size)
    dtype = "float32 under autocast to bfloat16" if size.autocast else "bfloat16"
    job.record(size=asdict(size), parameters=count, dtype=dtype, **{"free, GiB": free})
    each = size.dtype.itemsize
    needed = {"forward": count * each / 2**30 * 1.1 + 4, "step": count * (2 * each + size.state) / 2**30 * 1.1 + 8}
    if free is not None and free < needed["forward"]:
        raise LeftOut(f"needs {needed['forward']:.0f} GiB of memory, and {free:.0f} are free")
    model = build(size, job.machine.device, job.seed)
    lengths = draw(size, job)
    job.record(lengths=lengths, **{"real tokens": sum(map(sum, lengths)), "padded tokens": _padded(lengths)})
    lowering = torch.autocast(model.device.type, dtype=DTYPE, enabled=size.autocast)
    with job.machine.kernels_of("flash") as kernels, job.machine.kernels_of("flex"), lowering:
        job.record(flash=kernels, checked=check(job, size, model, lengths))
        for kind in ("forward", "step"):
            if free is not None and free < needed[kind]:
                job.record(**{kind: {"left out": f"needs {needed[kind]:.0f} GiB of memory, and {free:.0f} are free"}})
                continue
            # what forward leaves of the time is for the steps, which take three times as long
            until = time.monotonic() + job.left() * (0.3 if kind == "forward" else 1)
            race(job, size, model, lengths, kind, until)


def parameters(size: Size) -> int:
    """The number of parameters of a size's model."""
    head = size.hidden // size.heads
    attention = size.hidden * head * (2 * size.heads + 2 * size.key_heads)
    layer = attention + 3 * size.hidden * size.inner + 2 * size.hidden
    return size.layers * layer + 2 * size.vocabulary * size.hidden + size.hidden


def build(size: Size, device: str, seed: int) -> Any:
    """A random Llama, made where it is to be and in its own precision: nothing of it is ever held twice."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=size.layers,
        hidden_size=size.hidden,
        intermediate_size=size.inner,
        num_attention_heads=size.heads,
        num_key_value_heads=size.key_heads,
        vocab_size=size.vocabulary,
        max_position_embeddings=workload.LONGEST,
        tie_word_embeddings=False,
    )
    torch.manual_seed(seed)
    with torch.device(device):
        return LlamaForCausalLM._from_config(config, attn_implementation="sdpa", dtype=size.dtype)


def tokens_of(size: Size) -> torch.Tensor:
    """The tokens that documents are drawn of."""
    return torch.arange(1, size.vocabulary)


def draw(size: Size, job: Job) -> list[list[int]]:
    """Lengths of the documents of every batch, as FLAN's."""
    drawn = workload.lengths(job.seed)
    batches = [list(islice(drawn, size.documents)) for _ in range(size.batches)]
    return [[3 + n * SMALL_LONGEST // workload.LONGEST for n in batch] for batch in batches] if job.small else batches


def _padded(lengths: list[list[int]]) -> dict[str, int]:
    return {name: sum(len(batch) * max(batch) for batch in form)
            for name, form in (("as drawn", lengths), ("grouped", grouped(lengths)))}  # fmt: skip


@torch.no_grad()
def check(job: Job, size: Size, model: Any, lengths: list[list[int]]) -> dict[str, Any]:
    """How far each arm is off for the documents of the first batch, and by what it is judged."""
    model.eval()
    set_stock(model)
    batch = Batch.of(lengths[0], tokens_of(size), job.seed, job.machine.device)
    alone = [model(input_ids=ids, use_cache=False).logits[0] for ids in batch.documents]
    found: dict[str, Any] = {"measure": "relative error of the logits of the worst document"}
    wanted, bound = alone, WITHOUT_REFERENCE
    if size.reference:
        exact = copy.deepcopy(model).float()
        with torch.autocast(model.device.type, enabled=False):
            wanted = [exact(input_ids=ids, use_cache=False).logits[0] for ids in batch.documents]
        del exact
        job.machine.forget()
        found["alone in bfloat16, against float32"] = worst(alone, wanted)
        bound = max(FACTOR * found["alone in bfloat16, against float32"], FLOOR[DTYPE])
    found["bound"], found["arms"] = bound, {}
    leaking = model(input_ids=batch.ids, attention_mask=torch.ones_like(batch.ids), use_cache=False).logits
    found["control: documents that see each other"] = worst(by_document(batch, ARMS[2], leaking), wanted)
    del leaking
    for arm in size.arms:
        if arm.form == GROUPED:
            continue  # as `padded`, on other batches
        error, failed = tried(job, arm, model, partial(_off, arm, model, batch, wanted))
        found["arms"][arm.name] = failed if error is None else error
        if error is not None and not error <= bound:
            job.problem(f"{arm.name} is off by {error:.1e}, allowed {bound:.1e}")
    return found


def _off(arm: Arm, model: Any, batch: Batch, wanted: list[torch.Tensor]) -> float:
    with on(arm, model):
        return worst(by_document(batch, arm, model(**call_of(batch, arm)).logits), wanted)


def set_stock(model: Any) -> None:
    """Let the model attend by SDPA, as documents alone do."""
    with on(ARMS[0], model):
        pass


def tried(job: Job, arm: Arm, model: Any, act: Callable[[], _Found]) -> tuple[_Found | None, dict[str, str]]:
    """What an act on a model gives, or None and why: what fails leaves room for others."""
    try:
        return act(), {}
    except OUT_OF_MEMORY as raised:
        failed = {"out of memory": _first_line(raised)}
    except Exception as raised:
        failed = {"error": f"{type(raised).__name__}: {_first_line(raised)}"}
        job.problem(f"{arm.name} cannot be run: {failed['error']}")
    # Here and not above: an error holds the frames, and they the tensors, of what did not fit.
    model.zero_grad(set_to_none=True)
    job.machine.forget()
    return None, failed


def race(job: Job, size: Size, model: Any, lengths: list[list[int]], kind: str, until: float) -> None:
    """Run all arms in rounds until the time is over; an arm that fails or has no memory is recorded as such."""
    runs, found = runs_of(job, size, model, lengths, kind), {}
    more = {"optimizer": size.optimizer, "checkpointing": size.checkpointing} if kind == "step" else {}
    racing: dict[str, Arm] = {}
    entrants: dict[str, Entrant] = {}

    def warm_up(arm: Arm) -> dict[str, Any]:
        with on(arm, model) as handle:
            for _ in range(size.warm_up - 1):
                runs[arm.name]()
            memory = {"memory, GiB": job.machine.peak(runs[arm.name])}
            if handle is None:
                return memory
            return {**memory, "enabled": {"backend": backend_of(arm), "padded batches": str(handle.tally)}}

    model.train(kind == "step")
    for arm in size.arms:
        warm, failed = tried(job, arm, model, partial(warm_up, arm))
        found[arm.name] = failed if warm is None else warm
        if warm is not None:
            racing[arm.name] = arm
            state, make_ready = partial(on, arm, model), partial(ready, arm, model, size, job)
            entrants[arm.name] = Entrant(runs[arm.name], state, make_ready)
        job.record(**{kind: {"rounds": 0, "arms": found, **more}})
    real = sum(map(sum, lengths))

    def attempt(name: str, lap: Callable[[], Lap]) -> Lap | None:
        taken, failed = tried(job, racing[name], model, lap)
        if taken is None:
            found[name] = failed
        return taken

    def report(number: int, times: dict[str, list[Lap]]) -> None:
        job.record(**{kind: {"rounds": number, "arms": found, **_summary(found, times, real), **more}})

    timed_race(entrants, size.rounds, until=until, clock=job.machine.timed, attempt=attempt, report=report)


@torch.no_grad()
def ready(arm: Arm, model: Any, size: Size, job: Job) -> None:
    """What the first call of a model does that has just been given to an arm, on a few tokens."""
    model(**call_of(Batch.of([2, 3], tokens_of(size), job.seed, job.machine.device), arm))


def runs_of(job: Job, size: Size, model: Any, lengths: list[list[int]], kind: str) -> dict[str, Callable[[], None]]:
    """For each arm, a pass over all batches, which lie on the device in its form already."""
    optimizer, runs = make_optimizer(size, model) if kind == "step" else None, {}
    if kind == "step" and size.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for arm in size.arms:
        own = grouped(lengths) if arm.form == GROUPED else lengths
        batches = [Batch.of(each, tokens_of(size), job.seed + i, job.machine.device) for i, each in enumerate(own)]
        calls = [call_of(batch, arm) for batch in batches]
        runs[arm.name] = _pass(model, calls, optimizer)
    return runs


def make_optimizer(size: Size, model: Any) -> torch.optim.Optimizer:
    """The optimizer that a size names; a rate that small hardly moves a bfloat16 weight: all arms find the same."""
    if size.optimizer.startswith("SGD"):
        return torch.optim.SGD(model.parameters(), lr=1e-9, foreach=False)
    return torch.optim.AdamW(model.parameters(), lr=1e-9, weight_decay=0.0, fused=True)


def _pass(model: Any, calls: list[dict[str, Any]], optimizer: torch.optim.Optimizer | None) -> Callable[[], None]:
    def forward() -> None:
        with torch.no_grad():
            for call in calls:
                model(**call).loss  # noqa: B018

    def step() -> None:
        assert optimizer is not None
        for call in calls:
            model(**call).loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return forward if optimizer is None else step


def _summary(
    found: dict[str, dict[str, Any]], times: dict[str, list[dict[str, float]]], real: int
) -> dict[str, dict[str, Any]]:
    """Fill in what each arm took, and give the ratios to the two that all are held against."""
    for name, taken in times.items():
        walls = [each["wall"] for each in taken]
        median = statistics.median(walls)
        found[name].update(
            {"median s": median, "min s": min(walls), "max s": max(walls), "real tokens/s": real / median}
        )
        if "events" in taken[0]:
            found[name]["median of events, s"] = statistics.median(each["events"] for each in taken)
        found[name]["all"] = taken
    others = [name for name in ("padded", "stock packed flash") if name in times]
    return {
        f"speed of {other}": {name: ratio(times[other], taken) for name, taken in times.items()} for other in others
    }


def ratio(other: list[dict[str, float]], times: list[dict[str, float]]) -> dict[str, float]:
    """How many times as fast as another arm one is, round by round."""
    found = [a["wall"] / b["wall"] for a, b in zip(other, times, strict=True)]
    return {"median": statistics.median(found), "min": min(found), "max": max(found)}


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "")[:300]
