"""What the doctor tries: whether a tiny model, enabled, is exact with the packages that are installed."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress

IMPLEMENTATIONS = ("sdpa", "eager")


def failures() -> list[str]:
    """What of autopack does not work here, in words: importing a part, the operator of compiled graphs, or a model."""
    found: list[str] = []
    for name, work in {"importing autopack's parts": _import_all, "its operator": _try_operator}.items():
        with _noting(name, found):
            work()
    for implementation in IMPLEMENTATIONS:
        with _noting(f"a tiny Llama with {implementation} attention", found), _quietly():
            _try_model(implementation)
    return found


@contextmanager
def _noting(what: str, found: list[str]) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # whatever an installation that does not fit may raise
        first = next(iter(str(error).splitlines()), "")
        found.append(f"{what} fails with {type(error).__name__}: {first}")


@contextmanager
def _quietly() -> Iterator[None]:
    """Without the log lines of `enable` and of tiny models; the doctor prints what it finds."""
    before, logging.root.manager.disable = logging.root.manager.disable, logging.WARNING
    try:
        yield
    finally:
        logging.root.manager.disable = before


def _import_all() -> None:
    import autopack
    from autopack.errors import UnsupportedVersion

    for name in autopack.__all__:
        with suppress(UnsupportedVersion):  # one name may need more than autopack does, and says so where it is used
            getattr(autopack, name)
    autopack.registry.families()


def _try_operator() -> None:
    """Two documents by the operator that compiled graphs hold, forward and backward, against each alone."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    from autopack.attention.compiled import attend_compiled
    from autopack.inspection.masks import Pattern

    drawn = torch.Generator().manual_seed(0)
    given = [torch.randn(1, 2, 7, 8, generator=drawn, dtype=torch.float64).requires_grad_() for _ in range(3)]
    bounds = torch.tensor([0, 3, 7], dtype=torch.int32)
    query, key, value = given
    together = attend_compiled(bounds, query, key, value, Pattern(causal=True), None).transpose(1, 2)
    parts = zip(*(states.split([3, 4], dim=2) for states in given), strict=True)
    alone = torch.cat([scaled_dot_product_attention(q, k, v, is_causal=True) for q, k, v in parts], dim=2)
    pairs = [(together, alone)]
    pairs += zip(*(torch.autograd.grad(out.square().sum(), given) for out in (together, alone)), strict=True)
    worst = max(float((found - wanted).abs().max().detach()) for found, wanted in pairs)
    if worst > 1e-9:
        raise ArithmeticError(f"it is off by {worst:.1e} from attention of each document alone")


def _try_model(implementation: str) -> None:
    from autopack.auditing.auditor import audit
    from autopack.enabling.enable import enable
    from autopack.tiny.models import build

    model = build("llama", attn_implementation=implementation)
    with enable(model, verify="never"):
        report = audit(model)
    if not report.exact:
        raise ArithmeticError(str(report.packed or report.labels or report.padded))
