"""Assertions for tests of models and trainers, enabled by autopack or not."""

from __future__ import annotations

from typing import Any

__all__ = ["assert_packing_exact", "assert_step_exact"]


def assert_packing_exact(model: Any, **options: Any) -> None:
    """Raise `AssertionError` unless documents of packed rows get the results they get alone.

    It shows the report, which names the worst call and the module in which that begins. `options`
    are passed to `autopack.audit`, such as `modes=("use_cache=False",)` for a model that is called
    in no other way.
    """
    __tracebackhide__ = True
    from autopack.auditing.auditor import audit

    report = audit(model, **options)
    if not report.exact:
        raise AssertionError(str(report))


def assert_step_exact(trainer: Any) -> None:
    """Raise `AssertionError` unless a trainer trains on its documents as if each were alone.

    It says what is lost, cut, repeated or counted otherwise, from the columns of the data to the
    loss of a step.
    """
    __tracebackhide__ = True
    assert_packing_exact(trainer)
