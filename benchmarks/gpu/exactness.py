"""Whether a dozen model types are exact in half precision, against references in float32, by backend.

Documents are run alone in float32 (the reference), alone in half precision (what half precision costs anyway), and
packed in half precision. Packed may be no further from the reference than `FACTOR` times what alone is.
"""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import torch

import autopack
from autopack import tiny
from autopack.auditing.compare import BOUNDS
from benchmarks.gpu.job import Job
from benchmarks.gpu.machine import Machine
from compat.standins import set_implementation, supported_implementations

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
FACTOR = 2
"""Another kernel or another shape of matrices rounds otherwise, and so differs from float32 by another amount."""
FLOOR = {torch.bfloat16: 2**-7, torch.float16: 2**-10}
"""One rounding of a value of order 1 (8 and 11 bits): where alone happens to be lucky, packed need not be."""
TYPES = {
    "varlen": "llama mistral qwen2 qwen3 phi3 olmo2 gemma3_text cohere2 gpt2 bert deepseek_v3 llama4_text".split(),
    # torch's kernels have neither sinks nor a softcap of their own, and Llama 4 declares no flash attention
    "flash": "llama mistral qwen2 qwen3 phi3 olmo2 gemma3_text cohere2 gpt2 gpt_neox bert deepseek_v3".split(),
    # compiled kernels want heads of 16 and more, which the tiny DeepSeek-V3 has not
    "flex": "llama mistral qwen2 qwen3 phi3 olmo2 gemma2 gemma3_text cohere2 gpt_neox llama4_text gpt_oss".split(),
}
SMALL = {"varlen": ["llama", "mistral"], "flash": ["gemma3_text"], "flex": ["gemma2"]}
ROWS = ((7, 130, 1, 62), (120, 80))
SMALL_ROWS = ((3, 9, 1, 7), (12, 8))


def measure_backend(job: Job, backend: str) -> None:
    """Measure all types of a backend in both precisions, as far as time allows."""
    types = (SMALL if job.small else TYPES)[backend]

    def of(cell: str) -> dict[str, Any]:
        model_type, name = cell.split()
        torch._dynamo.reset()  # flex compiles for each of them, and after some it would no longer
        return measure(model_type, backend, DTYPES[name], job)

    with job.machine.kernels_of(backend) as kernels:
        about = {"kernels": kernels, "factor": FACTOR, "rows": SMALL_ROWS if job.small else ROWS}
        job.measure([f"{model_type} {name}" for name in DTYPES for model_type in types], of, **about)


def measure(model_type: str, backend: str, dtype: torch.dtype, job: Job) -> dict[str, Any]:
    """The errors of one type on one backend in one precision; `inexact` says which are too large, if any."""
    machine, rows = job.machine, SMALL_ROWS if job.small else ROWS
    half = built(model_type, dtype, machine)
    exact = copy.deepcopy(half).float()
    if hasattr(exact, "set_experts_implementation"):
        exact.set_experts_implementation("eager")  # grouped matrix products on a GPU are for bfloat16
    documents = [[tiny.tokens(half.config, 1, n, seed=job.seed + 10 * r + i) for i, n in enumerate(row)]
                 for r, row in enumerate(rows)]  # fmt: skip
    alone = [document.to(machine.device) for row in documents for document in row]
    packed = torch.cat([torch.cat(row, dim=1) for row in documents]).to(machine.device)
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in rows]).to(machine.device)
    wanted, wanted_gradients = _alone(exact, alone, job.seed)
    found, found_gradients = _alone(half, alone, job.seed)
    stock = _leak(half, packed, positions, wanted)
    if backend != "varlen":
        set_implementation(half, {"flash": "flash_attention_2", "flex": "flex_attention"}[backend])
    with autopack.enable(half, backend=backend, verify=False):
        logits = half(input_ids=packed, position_ids=positions).logits
        parts = [part for row, lengths in zip(logits, rows, strict=True) for part in row.split(list(lengths))]
        gradients = _gradients(half, parts, job.seed)
        influence = _influence(half, packed, positions, logits.detach(), rows[0])
    result: dict[str, Any] = {
        "alone": worst(found, wanted),
        "packed": worst(parts, wanted),
        "median token alone": median_token(found, wanted),
        "median token packed": median_token(parts, wanted),
        "gradient alone": distance(found_gradients, wanted_gradients),
        "gradient packed": distance(gradients, wanted_gradients),
        "influence": influence,
        "stock leaks": stock,
    }
    judged = ["influence", "median token packed"]
    if any("expert" in name for name, _ in half.named_modules()):
        # A tie that rounding breaks otherwise sends a token to another expert, alone as packed.
        result["judged"] = "by its median token and influence, because it routes tokens"
    else:
        judged += ["packed", "gradient packed"]
    bounds = {
        "influence": BOUNDS[dtype].results,
        "packed": max(FACTOR * result["alone"], FLOOR[dtype]),
        "median token packed": max(FACTOR * result["median token alone"], FLOOR[dtype]),
        "gradient packed": max(FACTOR * result["gradient alone"], FLOOR[dtype]),
    }
    # `not <=`, so that NaN is too large
    wrong = [f"{name} is {result[name]:.1e}, allowed {bounds[name]:.1e}" for name in judged
             if not result[name] <= bounds[name]]  # fmt: skip
    return {**result, "inexact": "; ".join(wrong)} if wrong else result


def built(model_type: str, dtype: torch.dtype, machine: Machine) -> Any:
    """A tiny model that computes its attention by SDPA, or by its own functions where it has none."""
    model: Any = tiny.build(model_type, dtype=dtype, device=machine.device)
    if "sdpa" in supported_implementations(model):
        model = tiny.build(model_type, attn_implementation="sdpa", dtype=dtype, device=machine.device)
    return model


def _weighted(logits: torch.Tensor, number: int, seed: int) -> torch.Tensor:
    """A sum of logits with random weights, by which all parameters get gradients of the same order."""
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1000 * seed + number))
    return (logits.float() * weights.to(logits.device)).sum() / logits.shape[-1] ** 0.5


def _gradients(model: Any, documents: list[torch.Tensor], seed: int, first: int = 0) -> list[torch.Tensor]:
    """Return the gradients, in float32, of a sum over documents that are numbered from `first` on."""
    loss = torch.stack([_weighted(logits, number, seed) for number, logits in enumerate(documents, first)]).sum()
    parameters = [p for p in model.parameters() if p.requires_grad]
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return [torch.zeros_like(p).float() if g is None else g.float() for p, g in zip(parameters, found, strict=True)]


def _alone(model: Any, documents: list[torch.Tensor], seed: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return logits (tokens, vocabulary) of each document alone, and the gradients of all, added up in float32."""
    logits, gradients = [], []
    for number, ids in enumerate(documents):
        found = model(input_ids=ids, use_cache=False).logits[0]
        gradients.append(_gradients(model, [found], seed, number))
        logits.append(found.detach())
    return logits, [torch.stack(each).sum(0) for each in zip(*gradients, strict=True)]


@torch.no_grad()
def _leak(model: Any, ids: torch.Tensor, positions: torch.Tensor, wanted: list[torch.Tensor]) -> float | None:
    """How far stock is off on the same rows with a mask of ones, as a control: it must be a lot."""
    with contextlib.suppress(Exception):
        found = model(input_ids=ids, position_ids=positions, attention_mask=torch.ones_like(ids), use_cache=False)
        lengths = [len(each) for each in wanted]
        return worst(list(found.logits.flatten(0, 1).split(lengths)), wanted)
    return None


def _influence(
    model: Any, ids: torch.Tensor, positions: torch.Tensor, before: torch.Tensor, row: tuple[int, ...]
) -> float:
    """How much other tokens in the second document move the logits of all others, in their standard deviations."""
    here = slice(row[0], row[0] + row[1])
    other = ids.clone()
    other[0, here] = tiny.tokens(model.config, row[1], seed=99).to(ids.device)
    # With gradients, as the call before it: without, flex would be compiled once more.
    after = model(input_ids=other, position_ids=positions).logits.detach()
    moved = (after.float() - before.float()).abs() / before.float().std()
    assert float(moved[0, here].max()) > 0, "other tokens must change their own document"
    moved[0, here] = 0
    return float(moved.max())


def worst(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    """The relative error of the worst document."""
    return max(distance([f], [w]) for f, w in zip(found, wanted, strict=True))


def median_token(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    """The relative error of the median token of all documents."""
    off = torch.cat([(f.detach().double() - w.double()).norm(dim=-1) for f, w in zip(found, wanted, strict=True)])
    return float((off / torch.cat([w.double().norm(dim=-1) for w in wanted])).median())


def distance(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    squares = [((f.detach().double() - w.double()).square().sum(), w.double().square().sum())
               for f, w in zip(found, wanted, strict=True)]  # fmt: skip
    off, size = (torch.stack(each).sum() for each in zip(*squares, strict=True))
    return float((off / size).sqrt())
