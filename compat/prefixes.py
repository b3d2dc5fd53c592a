"""Print, for every causal type, whether rows that begin alike give what stock gives where that is
computed once.

    python -m compat.prefixes --record        all types on all backends, recorded in compat/results/prefixes.json
    python -m compat.prefixes llama gemma2    some types, printed only; with --record also merged into the results

Each model is tiny, in evaluation mode (many types have dropout), and enabled by the plain
`autopack.enable(model)`. Its batches are trees of depth 1, 2 and 3, padded and as packed rows.
Compared with stock's run of the padded batch are the logits and hidden states of all real tokens,
the loss that the model makes and one that is made of its logits, and the gradients of both. `flash`
and `flex` run on stand-ins for the CPU, which are taken for the kernels. A type that is `kept`
computes every row, as it would without prefixes."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import autopack
from autopack import tiny
from autopack.calls.prefixes import why_not
from autopack.errors import AutopackError
from compat.common import quietly, said, write_json
from compat.exactness import BACKENDS, Undeclared, built, stand_in
from compat.standins import taken_for_kernels

RESULTS = Path(__file__).parent / "results" / "prefixes.json"
TOLERANCE = {"logits": 1e-4, "hidden": 1e-4, "loss": 1e-5, "gradients": 1e-3}
"""Of float32, relative to the largest value: those of `autopack.audit`, and of losses a tenth of
its."""
_PREFIX = 24
"""Tokens of each level of a tree; one stretch has to be no shorter than 16."""


def rows_of_tree(
    depth: int, vocabulary: torch.Tensor, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """A right-padded batch of tokens, (rows, columns), and its mask: two rests below each of two to
    the `depth` - 1 prefixes, each of which goes on from one of the level before; a row that shares
    nothing; and one row twice."""
    generator = torch.Generator().manual_seed(seed)

    def draw(count: int) -> torch.Tensor:
        return vocabulary[torch.randint(len(vocabulary), (count,), generator=generator)]

    level = [draw(_PREFIX)]
    for _ in range(depth - 1):
        level = [torch.cat([above, draw(_PREFIX)]) for above in level for _ in range(2)]
    rows = [torch.cat([above, draw(5 + 3 * n)]) for above in level for n in range(2)]
    rows += [draw(9), rows[0].clone()]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=int(vocabulary[0]))
    lengths = torch.tensor([len(row) for row in rows])
    return ids, (torch.arange(ids.shape[1]) < lengths[:, None]).long()


def results_of(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> dict[str, list[torch.Tensor]]:
    """What a model gives a padded batch with labels and without: see the top of this module."""
    labels = ids.masked_fill(mask == 0, -100)
    return _results(model, {"input_ids": ids, "attention_mask": mask}, labels, labels, mask.bool())


def results_of_row(
    model: Any, ids: torch.Tensor, mask: torch.Tensor
) -> dict[str, list[torch.Tensor]]:
    """The same of the documents of a padded batch in one packed row, as the collator makes it."""
    documents = [{"input_ids": row[real.bool()]} for row, real in zip(ids, mask, strict=True)]
    batch = dict(autopack.PackingCollator.for_model(model)(documents))
    # the loss of some types does not shift
    predicted, labels = batch.pop("labels"), batch["input_ids"].clone()
    return _results(model, batch, labels, predicted, torch.ones_like(labels, dtype=torch.bool))


def _results(
    model: Any,
    call: dict[str, torch.Tensor],
    labels: torch.Tensor,
    predicted: torch.Tensor,
    real: torch.Tensor,
) -> dict[str, list[torch.Tensor]]:
    """Of a call: `labels` are for the model's own loss, `predicted` for one made of its logits, of
    the next tokens."""
    found: dict[str, list[torch.Tensor]] = {"logits": [], "hidden": [], "loss": [], "gradients": []}
    for given in ({"labels": labels}, {}):
        model.zero_grad()
        output = model(**call, use_cache=False, output_hidden_states=True, **given)
        logits = output.logits
        shifted = logits[:, :-1].float().flatten(0, 1), predicted[:, 1:].flatten()
        loss = (
            output.loss if given else torch.nn.functional.cross_entropy(*shifted, ignore_index=-100)
        )
        loss.backward()
        found["logits"].append(logits.detach()[real])
        found["hidden"] += [states.detach()[real] for states in output.hidden_states or ()]
        found["loss"].append(loss.detach().reshape(1))
        found["gradients"] += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return found


def measure(model_type: str, backend: str, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Compare one type on one backend: its `status` (exact, APART, kept, refused, undeclared, ...)
    and errors."""
    with stand_in(backend):
        try:
            model = built(model_type, backend, dtype).eval()
        except Undeclared:
            return {"status": "undeclared"}
        except tiny.CannotBuild as error:
            return {"status": "unbuildable", "reason": error.reason}
        vocabulary = tiny.tokens(model.config, 1, 64).reshape(-1)
        batches = [rows_of_tree(depth, vocabulary, seed) for seed, depth in enumerate((1, 2, 3))]
        try:
            stock = [results_of(model, *batch) for batch in batches]
        except Exception as error:
            return {"status": "upstream error", "reason": said(error)}
        try:
            stands_in = backend in ("flash", "flex")
            handle = autopack.enable(model, verify=not stands_in)
            if stands_in:
                taken_for_kernels(handle)
        except AutopackError as error:
            return {"status": "refused", "reason": error.message.partition("\n")[0]}
        kept = why_not(handle.enabled)
        if kept is not None:
            return {"status": "kept", "reason": kept}
        errors: dict[str, float] = {}
        shared = 0
        for batch, wanted in zip(batches, stock, strict=True):
            for _ in range(2):  # in the first one, whether padding is read is found out
                before = handle.tally.training.shared
                try:
                    found = results_of(model, *batch)
                except AutopackError as error:
                    return {"status": "refused", "reason": error.message.partition("\n")[0]}
                shared += handle.tally.training.shared > before
            for name in wanted:
                errors[name] = max(errors.get(name, 0.0), _error(found[name], wanted[name]))
        if not shared:
            return {
                "status": "kept",
                "reason": why_not(handle.enabled) or "; ".join(handle.tally.left),
            }
        packed = _packed(model, handle, batches, stock)
    apart = {name for name, error in errors.items() if not error <= TOLERANCE[name]}
    return {
        "status": "APART" if apart else "exact",
        "shared calls": shared,
        "packed": packed,
        **errors,
    }


def _packed(model: Any, handle: Any, batches: list[Any], stock: list[Any]) -> str:
    """What becomes of the same documents in packed rows: exact, APART by how much, kept, or why it
    is refused."""
    worst = dict.fromkeys(TOLERANCE, 0.0)
    shared = handle.tally.training.shared
    for batch, wanted in zip(batches, stock, strict=True):
        try:
            found = results_of_row(model, *batch)
        except AutopackError as error:
            return "refused: " + error.message.partition("\n")[0]
        for name in wanted:
            worst[name] = max(worst[name], _error(found[name], wanted[name]))
    if any(not error <= TOLERANCE[name] for name, error in worst.items()):
        return "APART by " + ", ".join(f"{name} {error:.0e}" for name, error in worst.items())
    return "exact" if handle.tally.training.shared > shared else "kept"


def _error(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    """The largest difference, each relative to the largest value of its tensor, or to a thousandth
    of that of all."""
    largest = max((float(value.abs().max()) for value in wanted if value.numel()), default=0.0)
    worst = 0.0
    for one, other in zip(found, wanted, strict=True):
        if one.shape != other.shape:
            return float("inf")
        if other.numel() and largest:
            own = max(float(other.abs().max()), 1e-3 * largest)
            worst = max(worst, float((one - other).abs().nan_to_num(float("inf")).max()) / own)
    return worst


def _measured(model_type: str, backend: str) -> dict[str, Any]:
    try:
        return measure(model_type, backend)
    except Exception as error:
        return {"status": "ERROR", "reason": said(error)}


def main() -> int:
    """Run the measurements, print a line for each cell, and return 1 where one is apart."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("types", nargs="*", help="model types (default: all)")
    parser.add_argument(
        "--record", action="store_true", help="merge them into the recorded results"
    )
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="where it is recorded (%(default)s)"
    )
    asked = parser.parse_args()
    found: dict[str, dict[str, dict[str, Any]]] = {}
    with quietly():
        for model_type in tqdm(asked.types or tiny.types_for("causal-lm"), disable=None):
            cells = found[model_type] = {
                backend: _measured(model_type, backend) for backend in BACKENDS
            }
            for backend, cell in cells.items():
                print(model_type, backend, *(f"{name}={value}" for name, value in cell.items()))
    everything = [cell for cells in found.values() for cell in cells.values()]
    print(dict(Counter(cell["status"] for cell in everything)))
    if asked.record:
        recorded = json.loads(asked.results.read_text())["types"] if asked.results.exists() else {}
        versions = {name: version(name) for name in ("transformers", "torch")}
        write_json(
            asked.results,
            {**versions, "types": dict(sorted({**recorded, **found}.items()))},
            depth=3,
        )
    bad = any(
        cell["status"] in ("APART", "ERROR") or "APART" in cell.get("packed", "")
        for cell in everything
    )
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
