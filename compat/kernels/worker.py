"""Packed rows against documents alone, forward and backward, through interpreted kernels. In a
process of its own:

python -m compat.kernels.worker mamba2 llama     one line of JSON for each type; --short: with fewer tokens
python -m compat.kernels.worker mamba2 --blind   with kernels that cannot be told of documents
"""

from __future__ import annotations

import functools
import inspect
import json
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any
from unittest import mock

from compat.kernels import compiled, interpreter  # before anything that looks for kernels
from compat.kernels.cells import CELLS, Cell

compiled.install()

import torch  # noqa: E402

import autopack  # noqa: E402
from autopack import tiny  # noqa: E402
from compat.standins import set_implementation  # noqa: E402
from tests.conftest import alone_loss, positions, weights_like  # noqa: E402
from tests.engine import padded_batch  # noqa: E402

Parts = list[torch.Tensor]


def _alone(model: Any, documents: Sequence[torch.Tensor]) -> Parts:
    """The logits (tokens, vocabulary) of each document.

    One of a single token is the first of two, where a model is causal: causal_conv1d's backward
    refuses one alone."""
    found = []
    for document in documents:
        tokens = document.shape[1]
        given = (
            document.repeat(1, 2) if tokens == 1 and model.config.model_type != "bert" else document
        )
        found.append(model(input_ids=given).logits[0, :tokens])
    return found


def _gradients(model: Any, parts: Parts) -> torch.Tensor:
    """Of all parameters, one after the other, by a sum with fixed weights."""
    total = torch.stack([(part.float() * weights_like(part)).sum() for part in parts]).sum()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    found = torch.autograd.grad(total, parameters, allow_unused=True, materialize_grads=True)
    return torch.cat([gradient.flatten() for gradient in found])


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).detach().norm() / expected.detach().norm())


def _load_flash_attn() -> None:
    """transformers looks for flash-attn where CUDA is, once. Its Triton kernels take float32 as it
    is."""
    from transformers import modeling_flash_attention_utils as flash

    with mock.patch.object(flash, "is_flash_attn_2_available", return_value=True):
        flash.lazy_import_flash_attention("flash_attention_2")


def measure(name: str, cell: Cell, short: bool, blind: bool) -> dict[str, Any]:
    """Relative errors of logits (the worst document) or the loss, and of all gradients; the kernels
    that ran packed."""
    torch.manual_seed(0)
    model = tiny.build(cell.type or name, dtype=torch.float32, **cell.config).train()
    model.config.use_cache = False
    if cell.flash:
        set_implementation(model, "flash_attention_2")
    if cell.liger == "before":
        _apply_liger(model)
    rows = cell.rows(short)
    packed = tiny.tokens(model.config, len(rows), sum(rows[0]))

    def packed_call(**declared: torch.Tensor) -> Parts:
        if cell.loss:
            return [model(input_ids=packed, labels=packed, **declared).loss]
        logits = model(input_ids=packed, **declared).logits
        return [
            part
            for row, lengths in zip(logits, rows, strict=True)
            for part in row.split(list(lengths))
        ]

    def worst(found: Parts) -> float:
        return max(_error(part, wanted) for part, wanted in zip(found, alone, strict=True))

    every = [
        document
        for row, lengths in zip(packed, rows, strict=True)
        for document in row[None].split(lengths, 1)
    ]

    def padded_loss() -> torch.Tensor:
        batch = padded_batch([document[0] for document in every])
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        return model(**batch, labels=labels).loss

    as_it_came = padded_loss() if cell.loss else None
    alone = [alone_loss(model, packed, *rows)] if cell.loss else _alone(model, every)
    wanted = _gradients(model, alone)
    as_one = packed_call()
    control = _error(_gradients(model, as_one), wanted) if cell.loss else worst(as_one)
    # flash-attn's kernels are taken on CUDA alone, so on a CPU they are asked for.
    # Liger's forward is nobody's record, and its proof by an audit takes minutes here, as that of
    # blind kernels does.
    options: dict[str, Any] = {"verify": False} if cell.liger or blind else {}
    with autopack.enable(model, backend="flash" if cell.flash else "auto", **options) as handle:
        if cell.liger == "after":
            _apply_liger(model)
        interpreter.LAUNCHED.clear()
        compiled.LAUNCHED.clear()
        found = packed_call(position_ids=positions(*rows))
        gradients = _gradients(model, found)
        verified = str(handle.verified)
        padded = 0.0 if as_it_came is None else _error(padded_loss(), as_it_came)
        assert as_it_came is None or handle.tally.batches, handle.tally
    return {
        "type": name,
        "logits": worst(found),
        "gradients": _error(gradients, wanted),
        "padded": padded,
        "one document": control,
        "kernels": {**interpreter.LAUNCHED, **compiled.LAUNCHED},
        "verified": verified,
    }


_TOLD = (
    "causal_conv1d:causal_conv1d_fn",
    "mamba_ssm.ops.triton.ssd_combined:mamba_chunk_scan_combined",
    "mamba_ssm.ops.triton.ssd_combined:mamba_split_conv1d_scan_combined",
    "fla.ops.gated_delta_rule:chunk_gated_delta_rule",
    "fla.ops.kda:chunk_kda",
)
"""Kernels that take the bounds of documents."""


def _take_no_bounds() -> None:
    """Give kernels the signatures that older releases had, before a modeling file looks at them."""
    for module, name in (place.split(":") for place in _TOLD):
        home = import_module(module)
        kernel = getattr(home, name)
        signature = inspect.signature(kernel)
        kept = [p for n, p in signature.parameters.items() if n not in ("seq_idx", "cu_seqlens")]
        older = functools.partial(kernel)
        vars(older)["__signature__"] = signature.replace(parameters=kept)
        setattr(home, name, older)


def _apply_liger(model: Any) -> None:
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    _apply_liger_kernel_to_instance(model=model)


def main(arguments: Sequence[str]) -> None:
    names = [name for name in arguments if not name.startswith("--")]
    short, blind = "--short" in arguments, "--blind" in arguments
    if blind:
        _take_no_bounds()
    if any(CELLS[name].flash for name in names):
        _load_flash_attn()
    for name in names:
        print(json.dumps(measure(name, CELLS[name], short, blind)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
