"""Assertions for tests of models and trainers, enabled by autopack or not; failures say where."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

__all__ = ["assert_packing_exact", "assert_step_exact"]


def assert_packing_exact(model: Any, **options: Any) -> None:
    """Raise `AssertionError` unless every document of a packed row gets what it gets alone.

    It says which token of which document is off, by how much, and in which module it begins.
    `options` are those of `autopack.audit`, such as `modes=("use_cache=False",)` for a model that is
    called in no other way.
    """
    __tracebackhide__ = True
    from autopack.auditing.auditor import Audit, audit
    from autopack.auditing.compare import bounds_of
    from autopack.auditing.left_as_found import left_as_found
    from autopack.auditing.running import dtype_of
    from autopack.integrations.wrappers import unwrap

    report = audit(model, **options)
    if not report.exact:
        said = [f"{report.model} is not exact:", report.worst_case]
        base, worst = unwrap(model), report.worst_result
        # A call that raises has no tokens, and is said all the same.
        with suppress(Exception), left_as_found(base):
            base.train(worst.training)
            bounds = bounds_of(dtype_of(base))
            again = Audit(base, bounds, report.lengths, (worst.mode,), options.get("seed", 0))
            module = again.place(worst)
            said += [f"it begins in {module}"] if module else []
            said.insert(2, again.first_token(worst))
        raise AssertionError("\n  ".join(filter(None, said)) + f"\n\n{report}")


def assert_step_exact(trainer: Any) -> None:
    """Raise `AssertionError` unless a trainer trains on the documents of its data, as if alone.

    It says what is lost, cut, repeated or counted otherwise, from the columns of the data to the
    loss of a step.
    """
    __tracebackhide__ = True
    from autopack.auditing.auditor import audit

    report = audit(trainer)
    if not report.exact:
        raise AssertionError(str(report))
