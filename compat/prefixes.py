"""Measure, for every causal type, whether rows that begin alike give what stock gives where that is
computed once.

    python -m compat.prefixes --record     all types on all backends; other releases have a record of their own

Each model is tiny, in evaluation mode (many types have dropout), and enabled by the plain
`autopack.enable(model)`. Its batches are trees of depth 1, 2 and 3, padded and as packed rows.
Compared with stock's run of the padded batch are the logits and hidden states of all real tokens,
the loss that the model makes and one that is made of its logits, and the gradients of both. `flash`
and `flex` run on stand-ins for the CPU, which are taken for the kernels. A type that is `kept`
computes every row, as it would without prefixes."""

from __future__ import annotations

from typing import Any

import torch
import transformers

import autopack
from autopack import tiny
from autopack.calls.prefixes import why_not
from autopack.errors import AutopackError
from compat import study
from compat.common import said
from compat.exactness import BACKENDS, Undeclared, built, stand_in
from compat.standins import taken_for_kernels
from compat.study import Study
from tests.engine import in_rows, padded_batch

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
    return in_rows(rows, value=int(vocabulary[0])), padded_batch(rows)["attention_mask"]


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
        output = model(**call, use_cache=False, **given)
        logits = output.logits
        shifted = logits[:, :-1].float().flatten(0, 1), predicted[:, 1:].flatten()
        loss = (
            output.loss if given else torch.nn.functional.cross_entropy(*shifted, ignore_index=-100)
        )
        loss.backward()
        found["logits"].append(logits.detach()[real])
        with torch.no_grad():  # with gradients, rows whose states are asked for share nothing
            states = model(**call, use_cache=False, output_hidden_states=True, **given)
        found["hidden"] += [each[real] for each in states.hidden_states or ()]
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
        found, shared = [], 0
        for batch in batches:
            for _ in range(2):  # in the first one, whether padding is read is found out
                before = handle.tally.training.shared
                try:
                    found.append(results_of(model, *batch))
                except AutopackError as error:
                    return {"status": "refused", "reason": error.message.partition("\n")[0]}
                shared += handle.tally.training.shared > before
        if not shared:
            return {
                "status": "kept",
                "reason": why_not(handle.enabled) or "; ".join(handle.tally.left),
            }
        packed = _packed(model, handle, batches, stock)
    errors = _errors(found, [each for each in stock for _ in range(2)])
    return {
        "status": "APART" if _apart(errors) else "exact",
        "shared calls": shared,
        "packed": packed,
        **errors,
    }


def _packed(model: Any, handle: Any, batches: list[Any], stock: list[Any]) -> str:
    """What becomes of the same documents in packed rows: exact, APART by how much, kept, or why it
    is refused."""
    shared = handle.tally.training.shared
    try:
        found = [results_of_row(model, *batch) for batch in batches]
    except AutopackError as error:
        return "refused: " + error.message.partition("\n")[0]
    worst = _errors(found, stock)
    if _apart(worst):
        return "APART by " + ", ".join(f"{name} {error:.0e}" for name, error in worst.items())
    return "exact" if handle.tally.training.shared > shared else "kept"


def _apart(errors: dict[str, float]) -> bool:
    return any(not error <= TOLERANCE[name] for name, error in errors.items())


def _errors(found: list[Any], wanted: list[Any]) -> dict[str, float]:
    """The largest errors of all calls, by what is compared."""
    pairs = list(zip(found, wanted, strict=True))
    return {name: max(_error(one[name], other[name]) for one, other in pairs) for name in TOLERANCE}


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


def _measured(model_type: str) -> dict[str, Any]:
    found = {}
    for backend in BACKENDS:
        try:
            found[backend] = measure(model_type, backend)
        except Exception as error:
            found[backend] = {"status": "ERROR", "reason": said(error)}
    return found


def _wrong(_: str, cells: dict[str, Any]) -> str | None:
    bad = [
        backend
        for backend, cell in cells.items()
        if cell["status"] in ("APART", "ERROR") or "APART" in cell.get("packed", "")
    ]
    return ", ".join(bad)


_RELEASE = transformers.__version__
STUDY = Study(
    "prefixes" if _RELEASE == "5.23.0" else f"prefixes-{_RELEASE}",
    str(__doc__),
    lambda: tiny.types_for("causal-lm"),
    lambda names, _: ((name, _measured(name)) for name in names),
    _wrong,
)

if __name__ == "__main__":
    raise SystemExit(study.main(STUDY))
