"""The pytest plugin: fixtures that assert, and `--pack-audit` for what other fixtures give."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from autopack.testing import assert_packing_exact, assert_step_exact


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option `--pack-audit` to pytest."""
    parser.getgroup("autopack").addoption(
        "--pack-audit",
        action="store_true",
        help="after each test, audit the transformers models and trainers of its fixtures",
    )


@pytest.fixture
def packing_exact() -> Callable[..., None]:
    """The function `autopack.testing.assert_packing_exact`, as a fixture."""
    return assert_packing_exact


@pytest.fixture
def step_exact() -> Callable[..., None]:
    """The function `autopack.testing.assert_step_exact`, as a fixture."""
    return assert_step_exact


@pytest.hookimpl(trylast=True)
def pytest_runtest_call(item: Any) -> None:
    """Audit the models and trainers among a passed test's fixtures, if `--pack-audit` is given."""
    if not item.config.getoption("pack_audit") or "transformers" not in sys.modules:
        return
    from transformers import PreTrainedModel

    from autopack.integrations.trainers import adapter_of

    for value in getattr(item, "funcargs", {}).values():
        if isinstance(value, PreTrainedModel):
            assert_packing_exact(value)
        elif adapter_of(value) is not None:
            assert_step_exact(value)
