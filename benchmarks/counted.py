"""What a training step asks of a GPU, counted where there is none: operations, waits and bytes, by
way of batching.

    python -m benchmarks.counted --json benchmarks/results/counted.json    all types and sizes, some minutes
    python -m benchmarks.counted --types llama --sizes 1B                   a first look
    python -m benchmarks.counted --check                                    exit with 1 where a count has risen

Six documents of 25 to 1,366 tokens make a step of forward and backward in bfloat16, without an
optimizer. Tensors are torch's meta tensors, which say that they are on a GPU of the H100's class
(`benchmarks/counting.py`): no value is computed, and one that is asked for is a wait. Attention
takes the kernels that it would take there: torch's `varlen_attn`, and FlashAttention or
memory-efficient attention in stock models; recurrences run in torch, as without kernel packages.
Models are enabled with `verify=False`, since checks compare values.

Few layers are counted, and the others by adding what such layers add: counts are linear in layers
of one kind. Each type has its own vocabulary and experts. Arms: `padded`; `stock packed` (one row
and `position_ids`, which many types leak from); `by hand` (the same row, with an attention function
of one's own that calls `varlen_attn`: the bound); `enabled` (that row as the collator makes it);
`enabled, padded batch`; `regrouped` (rows of at most 1,536 tokens, as `enable(trainer,
max_tokens=1536)` cuts this step; what is saved is that of the largest row).

The predictions are those of `autopack estimate --on`: by roofline, not measured.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import autopack
from autopack.bench import subjects
from autopack.bench.predicted import DEVICES
from autopack.bench.race import Batch
from autopack.packing import HostBatch
from benchmarks import interleave
from benchmarks.counting import Counting, Counts, as_on_cuda, count
from benchmarks.gpu import arms
from compat.torch_flash import aten_on_cpu

LENGTHS = (388, 25, 1366, 96, 702, 211)
MOST = 1536
PERIODS = {
    "llama": 1,
    "qwen3": 1,
    "mixtral": 1,
    "gemma3_text": 6,
    "modernbert": 3,
    "mamba2": 1,
    "qwen3_next": 4,
}
"""The types, and after how many layers their kinds of layers begin anew."""
SIZES = {name: subjects.SIZES[name] for name in ("1B", "7B")} | {
    "70B": subjects.SIZES["7B"]
    | {
        "num_hidden_layers": 80,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    }
}
DENSE = ("llama", "qwen3")
BY_HAND = (*DENSE, "mixtral", "gemma3_text")
REGROUPED, ENABLED, HAND, UNPADDED = "regrouped", "enabled", "by hand", "enabled, padded batch"
_OF_GPU = {arm.name: arm for arm in arms.ARMS}
ARMS = {
    "padded": _OF_GPU["padded"],
    "stock packed": _OF_GPU["stock packed sdpa"],
    HAND: _OF_GPU["varlen_attn by hand"],
    ENABLED: _OF_GPU["enabled"],
    UNPADDED: _OF_GPU["enabled, padded batch"],
    REGROUPED: _OF_GPU["enabled"],
}
RECORD = Path(__file__).parent / "results" / "counted.json"
BOUNDS = {"flops": 1.01, "operations": 1.10, "saved": 1.02}
"""How much of what is done by hand an enabled packed row may take."""
Record = dict[str, dict[str, Any]]


def build(model_type: str, size: str, layers: int) -> Any:
    """Return a model on the meta device."""
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    default = CONFIG_MAPPING[model_type]()
    fields = {
        name: value
        for name, value in SIZES[size].items()
        if hasattr(default, name) and name != "vocab_size"
    }
    if model_type == "mamba2":
        fields["num_heads"] = 2 * fields["hidden_size"] // fields["head_dim"]
    config = CONFIG_MAPPING[model_type](**{**fields, "num_hidden_layers": layers})
    config.use_cache = False
    attention = "eager" if model_type == "mamba2" else "sdpa"  # it has none
    auto = AutoModelForMaskedLM if model_type == "modernbert" else AutoModelForCausalLM
    with torch.device("meta"):
        return auto.from_config(config, attn_implementation=attention, dtype=torch.bfloat16).train()


def calls(arm: str, model: Any) -> Iterator[tuple[dict[str, Any], list[int]]]:
    """Yield the calls of an arm on the device, and the lengths of their documents."""
    whole = Batch.of(LENGTHS, torch.arange(1, 1000), 0, "cpu")
    for batch in arms.regrouped([whole], MOST) if arm == REGROUPED else [whole]:
        (made,) = arms.calls(ARMS[arm], model, [batch])
        with Counting(batch.lengths):
            moved = HostBatch(made).to("cuda")
        yield dict(moved), batch.lengths


def measure(model: Any, arm: str) -> tuple[Counts, list[str]]:
    """Return the counts of an arm, and what its waits are."""
    found, waits = [], []
    with aten_on_cpu(), as_on_cuda(not ARMS[arm].enabled), arms.on(model, ARMS[arm]):
        for call, lengths in calls(arm, model):
            # The first padded batches of some models are looked at, whether their padding is read;
            # the third is not.
            for _ in range(3 if arm == UNPADDED else 1):
                counts, counting = count(model, call, lengths)
            found.append(counts)
            waits += [f"{number} x {name}" for name, number in counting.waits.items()]
    total = Counts(*map(sum, zip(*found, strict=True)))
    return total._replace(saved=max(each.saved for each in found)), waits


def counts_of(model_type: str, size: str) -> dict[str, Any]:
    """Return the counts of all arms for all layers, and those of one layer in an enabled model."""
    period, layers = PERIODS[model_type], SIZES[size]["num_hidden_layers"]
    few, more = (build(model_type, size, layers) for layers in (period, 2 * period))
    found: dict[str, Any] = {}
    for arm in ARMS:
        if arm == HAND and model_type not in BY_HAND:
            continue
        (a, waits), (b, _) = measure(few, arm), measure(more, arm)
        slope = [(y - x) / period for x, y in zip(a, b, strict=True)]
        counts = [round(x + (layers - period) * each) for x, each in zip(a, slope, strict=True)]
        found[arm] = {**Counts(*counts)._asdict(), "waits are": waits}
        if arm == ENABLED:
            found["layer"] = Counts(*map(round, slope))._asdict()
    if model_type in DENSE:
        found["formula"] = formula(build(model_type, size, layers))
    return found


def formula(model: Any) -> int:
    """Return the operations of a packed row of a dense model: six for every token and weight of a
    linear layer, and 14 for every pair of tokens of a document and unit of a layer's heads, as
    torch counts attention."""
    weights = sum(
        part.weight.numel() for part in model.modules() if isinstance(part, torch.nn.Linear)
    )
    config = model.config
    heads = config.num_hidden_layers * config.num_attention_heads * config.head_dim
    return 6 * weights * sum(LENGTHS) + 14 * heads * sum(length**2 for length in LENGTHS)


def failures(counts: Record, before: Record | None = None) -> list[str]:
    """Return what does not hold of the counts of types and sizes, and what of enabled models is
    more than before."""
    found = []
    for name, of_arms in counts.items():
        enabled, by_hand = of_arms[ENABLED], of_arms.get(HAND)
        for what, bound in BOUNDS.items() if by_hand else ():
            if enabled[what] > bound * by_hand[what]:
                found.append(
                    f"{name}: {enabled[what] / by_hand[what]:.3f} x the {what} by hand, at most "
                    f"{bound}"
                )
        if "formula" in of_arms and abs(enabled["flops"] / of_arms["formula"] - 1) > 0.01:
            found.append(
                f"{name}: {enabled['flops']:,} operations by the counter, {of_arms['formula']:,} "
                "by formula"
            )
        for arm in (ENABLED, UNPADDED, REGROUPED):
            now, then = of_arms[arm], before[name][arm] if before else of_arms[arm]
            found += [f"{name}, {arm}: waits, {now['waits are']}"] if now["waits"] else []
            more = [what for what in Counts._fields if now[what] > then[what]]
            found += [
                f"{name}, {arm}: {what} {now[what]:,}, recorded {then[what]:,}" for what in more
            ]
    return found


def lines(result: dict[str, Any]) -> Iterator[str]:
    """Yield the result in words."""
    yield (
        " " * 37
        + "".join(f"{what:>20}" for what in Counts._fields)
        + f"   over by hand: {', '.join(BOUNDS)}"
    )
    for name, of_arms in result["counts"].items():
        hand = of_arms.get(HAND)
        for arm in [*filter(of_arms.get, ARMS), "layer"]:
            of = of_arms[arm]
            ratios = (
                "".join(f"{of[what] / hand[what]:8.3f}" for what in BOUNDS)
                if hand and arm != "layer"
                else ""
            )
            yield (
                f"{f'{name}, {arm}':37}"
                + "".join(f"{of[what]:20,}" for what in Counts._fields)
                + ratios
            )
        yield f"{f'{name}, formula':37}{of_arms['formula']:20,}" if "formula" in of_arms else ""
    yield from (
        "",
        (
            "predicted, not measured: tokens/s of forward and backward of a 7B on one GPU, FLAN's "
            "lengths"
        ),
    )
    yield " " * 10 + "".join(f"{name:>17}" for name in result["predicted"]["h100"])
    for device, predicted in result["predicted"].items():
        yield f"{device:10}" + "".join(f"{speed:17,.0f}" for speed in predicted.values())
    yield from ["", *(failures(result["counts"]) or ["PASS"])]


def main(arguments: Sequence[str] | None = None) -> int:
    """Count, print and write; 1 where something does not hold, or with --check a count has
    risen."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--types", nargs="+", choices=list(PERIODS), default=list(PERIODS))
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument(
        "--json", type=Path, help="where to write the result; a .txt goes beside it"
    )
    parser.add_argument("--check", action="store_true", help="compare with the record instead")
    options = parser.parse_args(arguments)
    where = interleave.origin()
    counts = {
        f"{name} {size}": counts_of(name, size) for name in options.types for size in options.sizes
    }
    if options.check:
        record = json.loads(RECORD.read_text())
        same = all(where[name] == record["origin"][name] for name in ("torch", "transformers"))
        wrong = failures(counts, record["counts"] if same else None)
        print("\n".join(wrong or ["PASS"]))
        return bool(wrong)
    lengths = subjects.draw(subjects.DISTRIBUTIONS["flan"], 20_000, 4096, 0)
    estimates = {
        device: autopack.estimate(lengths, batch_size=4, on=device).predicted for device in DEVICES
    }
    predicted = {
        device: {each.name: each.tokens_per_second for each in of}
        for device, of in estimates.items()
    }
    result = interleave.result_of("counted", options, where, counts=counts, predicted=predicted)
    interleave.write(options.json, result, lines(result))
    return bool(failures(counts))


if __name__ == "__main__":
    sys.exit(main())
